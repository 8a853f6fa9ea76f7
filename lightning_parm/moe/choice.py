"""The automatic schedule: predict every candidate and take the best; pure Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lightning_parm.moe.cost import Workload
from lightning_parm.moe.links import Links
from lightning_parm.moe.prediction import Candidate, Schedule, Transport, seconds

#: Most parts that are considered: two where ranks share cores, since waiting for a core is in no measurement.
MAX_CHUNKS, MAX_CHUNKS_ON_SHARED_CORES = 4, 2
#: A candidate must promise more than this share of time to be preferred to a simpler one: more of it where the cores
#: that compute also communicate, since there everything that a layer does competes for them.
MARGIN, MARGIN_ON_SHARED_CORES = 0.02, 0.05


class Sizes(Protocol):
    """What is read of a :class:`~lightning_parm.moe.topology.Topology`, or of a workload."""

    @property
    def tensor_parallel_size(self) -> int:
        """N_MP."""

    @property
    def expert_parallel_size(self) -> int:
        """N_EP."""

    @property
    def expert_shard_size(self) -> int:
        """N_ESP."""


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why.

    Attributes:
        schedule: The best.
        transport: Its transport.
        chunks: Its number of chunks.
        seconds: Predicted forward + backward of every candidate, the comparisons among them.
    """

    schedule: Schedule
    transport: Transport
    chunks: int
    seconds: dict[Candidate, float]

    @property
    def candidate(self) -> Candidate:
        """The three choices as one."""
        return Candidate(self.schedule, self.transport, self.chunks)


def candidates(sizes: Sizes, max_chunks: int = MAX_CHUNKS) -> list[Candidate]:
    """Everything that can run on these sizes, the simplest first; without the comparisons.

    Example:
        >>> from lightning_parm.moe.topology import Topology
        >>> [str(candidate) for candidate in candidates(Topology(8, 0, 2, 4, 1), max_chunks=2)]
        ['s1 fused', 's2 fused', 's1 fused x2', 's2 fused x2']
    """
    sharded = sizes.expert_shard_size > 1
    transports: tuple[Transport, ...] = ("fused", "two_hop") if sharded else ("fused",)
    schedules: tuple[Schedule, ...] = ("s1", "s2") if sizes.tensor_parallel_size > 1 else ("s1",)
    shards_are_peers = sizes.tensor_parallel_size == sizes.expert_shard_size
    found = [Candidate("plain")] if shards_are_peers else []
    for chunks in range(1, max_chunks + 1):
        if shards_are_peers and sharded:
            found.append(Candidate("s0", chunks=chunks))
        found += [Candidate(schedule, transport, chunks) for schedule in schedules for transport in transports]
    return found


def comparisons(sizes: Sizes) -> list[Candidate]:
    """What is timed and predicted beside the candidates, where these sizes allow it."""
    mp, esp = sizes.tensor_parallel_size, sizes.expert_shard_size
    return [Candidate("baseline")] * (not (mp % esp and esp % mp)) + [Candidate("deepspeed")] * (esp in (1, mp))


def choose(
    sizes: Sizes,
    tokens: int,
    model_dim: int,
    hidden_dim: int,
    num_experts: int,
    top_k: int,
    capacity_factor: float | None,
    links: Links,
    *,
    static_shapes: bool = False,
    element_bytes: int = 4,
    num_matrices: int = 3,
    sequence_parallel: bool = False,
    max_chunks: int = MAX_CHUNKS,
    allowed: Callable[[Candidate], bool] = lambda candidate: True,
) -> Choice:
    """Predict every candidate and take the best; pure arithmetic, so equal arguments give equal choices on all ranks.

    Args:
        sizes: The topology.
        tokens: S, tokens that every mp peer holds.
        model_dim: M.
        hidden_dim: H.
        num_experts: E.
        top_k: k.
        capacity_factor: f, or ``None`` for dropless.
        links: Constants of the cluster for groups of these sizes.
        static_shapes: Whether experts are padded to their capacity.
        element_bytes: Of activations.
        num_matrices: Of one expert; 3 with SwiGLU, otherwise 2.
        sequence_parallel: Whether every mp peer holds only its share of the tokens.
        max_chunks: Most parts in flight together.
        allowed: Which candidates may be chosen, for a user who fixed one of the three.

    Raises:
        ValueError: If nothing is allowed.

    Example:
        >>> from lightning_parm.moe.links import PUBLISHED_32_GPUS
        >>> from lightning_parm.moe.topology import Topology
        >>> choice = choose(
        ...     Topology(32, 0, 4, 8, 4), 4096, 2048, 8192, 8, 2, 1.2, PUBLISHED_32_GPUS, static_shapes=True
        ... )
        >>> ratio = choice.seconds[Candidate("deepspeed")] / choice.seconds[choice.candidate]
        >>> str(choice.candidate), round(ratio, 1)
        ('s1 two_hop', 1.9)
    """
    work = Workload(
        num_tokens=tokens,
        model_dim=model_dim,
        hidden_dim=hidden_dim,
        num_experts=num_experts,
        top_k=top_k,
        tensor_parallel_size=sizes.tensor_parallel_size,
        expert_parallel_size=sizes.expert_parallel_size,
        expert_shard_size=sizes.expert_shard_size,
        capacity_factor=capacity_factor,
        static_shapes=static_shapes,
        sequence_parallel=sequence_parallel,
        num_matrices=num_matrices,
        element_bytes=element_bytes,
    )
    return choose_for(work, links, max_chunks, allowed)


def choose_for(
    work: Workload,
    links: Links,
    max_chunks: int = MAX_CHUNKS,
    allowed: Callable[[Candidate], bool] = lambda candidate: True,
) -> Choice:
    """As :func:`choose`, for a workload."""
    possible = candidates(work, max_chunks)
    predicted = {each: seconds(each, work, links) for each in [*possible, *comparisons(work)]}
    wanted, margin = [each for each in possible if allowed(each)], MARGIN
    if not links.host_runs_ahead:
        wanted = [each for each in wanted if each.chunks <= MAX_CHUNKS_ON_SHARED_CORES] or wanted
        margin = MARGIN_ON_SHARED_CORES
    return Choice(*best(wanted, predicted, margin), predicted)  # type: ignore[arg-type]


def best(possible: Sequence[Candidate], predicted: dict[Candidate, float], margin: float = MARGIN) -> Candidate:
    """The fastest, or one that is nearly as fast and simpler: with fewer chunks, and among those ``plain``.

    Args:
        possible: What may be chosen.
        predicted: Seconds of each.
        margin: Share of the fastest one's time by which a simpler one may be slower.

    Raises:
        ValueError: If nothing is possible.
    """
    if not possible:
        raise ValueError("None of the schedules, transports and numbers of chunks that run here is allowed.")
    fastest = min(predicted[each] for each in possible)
    near = [each for each in possible if predicted[each] <= fastest * (1 + margin)]
    return min(near, key=lambda each: (each.chunks, each.schedule != "plain", predicted[each]))
