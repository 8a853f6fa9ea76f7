"""What every schedule sends: each collective of one layer, forward and backward, with its group and its bytes.

Pure arithmetic on sizes, without torch, so that it runs before any process starts. Recorded calls on up to 512 ranks
are held equal to it. Rows count as if every expert had equally many, which is what capacity, balancing losses or biases
aim at. A collective takes about ``alpha + beta * num_bytes`` seconds with constants of its kind and axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Kind = Literal["all_to_all", "all_gather", "reduce_scatter", "all_reduce"]
Axis = Literal["tensor_parallel", "expert_parallel", "expert_shard", "fused"]

COUNT_BYTES = 8
STATISTIC_BYTES = 4


@dataclass(frozen=True)
class Collective:
    """One call.

    Attributes:
        kind: What it does.
        axis: Over which group.
        group_size: Ranks of that group.
        num_bytes: The larger of its two buffers: what AlltoAll, ReduceScatter and AllReduce read, what AllGather
            writes.
        backward: Whether it belongs to the backward pass.
    """

    kind: Kind
    axis: Axis
    group_size: int
    num_bytes: int
    backward: bool


@dataclass(frozen=True)
class Workload:
    """One layer on one topology.

    Attributes:
        num_tokens: S, tokens of one data-parallel rank (all of its mp peers together).
        model_dim: M.
        hidden_dim: H.
        num_experts: E.
        top_k: k.
        tensor_parallel_size: N_MP.
        expert_parallel_size: N_EP.
        expert_shard_size: N_ESP.
        capacity_factor: f, or ``None`` if nothing is dropped.
        static_shapes: Whether experts are padded to their capacity.
        sequence_parallel: Whether mp peers hold shares of the tokens.
        num_shared_experts: Experts that every token visits.
        auxiliary_loss: Whether the balance loss or the z-loss has a weight.
        num_matrices: Of one expert; 3 with SwiGLU, otherwise 2.
        element_bytes: Of activations and expert parameters.
        router_bytes: Of one element of the router's weight.

    Example:
        >>> work = Workload(num_tokens=4096, model_dim=512, hidden_dim=2048, num_experts=8, top_k=2,
        ...                 tensor_parallel_size=2, expert_parallel_size=4, expert_shard_size=2)
        >>> total_bytes(collectives(work, "baseline")) / total_bytes(collectives(work, "s1"))
        2.7...
    """

    num_tokens: int
    model_dim: int
    hidden_dim: int
    num_experts: int
    top_k: int
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1
    expert_shard_size: int = 1
    capacity_factor: float | None = None
    static_shapes: bool = False
    sequence_parallel: bool = False
    num_shared_experts: int = 0
    auxiliary_loss: bool = True
    num_matrices: int = 3
    element_bytes: int = 4
    router_bytes: int = 4

    def rows(self, num_tokens: int, parts: int = 1) -> int:
        """Rows that ``num_tokens`` tokens send, with static shapes rounded up to a multiple of ``parts`` per expert."""
        rows = self.top_k * num_tokens
        if self.capacity_factor is None:
            return rows
        capacity = math.ceil(self.capacity_factor * rows / self.num_experts - 1e-9)
        if self.static_shapes:
            return self.num_experts * parts * -(-capacity // parts)
        return min(rows, self.num_experts * capacity)

    def rows_at_experts(
        self, schedule: Literal["baseline", "plain", "s0", "s1", "s2", "deepspeed"], chunks: int = 1
    ) -> float:
        """Rows of one chunk that a rank's experts multiply; ``deepspeed`` is the order of today's DeepSpeed.

        Example:
            >>> work = Workload(num_tokens=8, model_dim=4, hidden_dim=4, num_experts=2, top_k=1,
            ...                 tensor_parallel_size=2, expert_parallel_size=2, expert_shard_size=2)
            >>> work.rows_at_experts("baseline"), work.rows_at_experts("s1")
            (16, 8)
        """
        tokens, mp, esp = self.num_tokens, self.tensor_parallel_size, self.expert_shard_size
        if schedule in ("baseline", "plain"):
            return self.rows(tokens) * (esp if schedule == "baseline" else 1)
        if schedule == "s0":  # every mp peer has them all, and one shard
            return self.rows(-(-tokens // chunks))
        if schedule == "s1":  # the mp peers share the tokens
            return self.rows(-(-tokens // mp // chunks)) * esp
        parts = mp * chunks  # ... or the rows
        return self.rows(tokens, parts) / parts * esp

    @property
    def largest_bytes(self) -> int:
        """About the most that one collective carries: a rank's rows, for all shards of their experts."""
        own = self.rows(-(-self.num_tokens // self.tensor_parallel_size))
        return own * self.expert_shard_size * self.model_dim * self.element_bytes

    def size(self, axis: Axis) -> int:
        """Ranks along ``axis``."""
        return {
            "tensor_parallel": self.tensor_parallel_size,
            "expert_parallel": self.expert_parallel_size,
            "expert_shard": self.expert_shard_size,
            "fused": self.expert_parallel_size * self.expert_shard_size,
        }[axis]


def collectives(
    work: Workload,
    schedule: Literal["baseline", "plain", "s0", "s1", "s2"],
    transport: Literal["fused", "two_hop"] = "fused",
    chunks: int = 1,
) -> list[Collective]:
    """Every call of one forward and backward, in no particular order.

    Args:
        work: The layer.
        schedule: Where communication is placed.
        transport: How rows reach all shards of their experts; of no effect in ``baseline``, ``plain`` and ``s0``.
        chunks: Parts sent one after another; of no effect in ``baseline`` and ``plain``.
    """
    parts = {"baseline": _baseline, "plain": _plain}
    if schedule in parts:
        calls = parts[schedule](work)
    elif schedule == "s0":
        calls = _s0(work, chunks)
    elif schedule == "s1":
        calls = _s1(work, transport, chunks)
    else:
        calls = _s2(work, transport, chunks)
    found = [
        Collective(kind, axis, work.size(axis), size, backward) for kind, axis, size, backward in calls if size > 0
    ]
    return [call for call in found if call.group_size > 1]


def total_bytes(calls: list[Collective]) -> int:
    """Bytes of all calls."""
    return sum(call.num_bytes for call in calls)


Call = tuple[Kind, Axis, int, bool]
FORWARD, BACKWARD = False, True


def _baseline(work: Workload) -> Iterator[Call]:
    token = work.model_dim * work.element_bytes
    everyone = work.expert_shard_size * work.num_tokens
    yield "all_gather", "expert_shard", work.expert_shard_size * COUNT_BYTES, FORWARD
    yield "all_gather", "expert_shard", everyone * token, FORWARD
    yield "all_gather", "expert_shard", everyone * token, BACKWARD
    yield from _through_shards(work, work.expert_shard_size * work.rows(work.num_tokens))
    yield from _whole_sequence(work)


def _plain(work: Workload) -> Iterator[Call]:
    yield from _through_shards(work, work.rows(work.num_tokens))
    yield from _whole_sequence(work)


def _s0(work: Workload, chunks: int) -> Iterator[Call]:
    token = work.model_dim * work.element_bytes
    for tokens in _lengths(work.num_tokens, chunks):
        for direction in (FORWARD, BACKWARD):
            yield "all_to_all", "expert_parallel", work.rows(tokens) * token, direction
            yield "all_to_all", "expert_parallel", work.rows(tokens) * token, direction
            yield "all_reduce", "tensor_parallel", tokens * token, direction
    yield "all_reduce", "tensor_parallel", work.num_tokens * work.top_k * STATISTIC_BYTES, BACKWARD
    if not work.static_shapes or chunks > 1:
        yield "all_to_all", "expert_parallel", chunks * work.num_experts * COUNT_BYTES, FORWARD
    yield from _whole_sequence(work)


def _s1(work: Workload, transport: str, chunks: int) -> Iterator[Call]:
    token, mp = work.model_dim * work.element_bytes, work.tensor_parallel_size
    own = -(-work.num_tokens // mp)
    for tokens in _lengths(own, chunks):
        yield from _send_and_return(work, transport, work.rows(tokens))
        if not work.sequence_parallel:
            yield "all_gather", "tensor_parallel", mp * tokens * token, FORWARD
    if not work.sequence_parallel:
        yield "all_gather", "tensor_parallel", work.num_tokens * token, BACKWARD
    if work.auxiliary_loss:
        yield "all_reduce", "tensor_parallel", (2 * work.num_experts + 2) * STATISTIC_BYTES, FORWARD
    yield "all_reduce", "tensor_parallel", work.num_experts * work.model_dim * work.router_bytes, BACKWARD
    shared = work.num_shared_experts * work.hidden_dim * work.model_dim * work.element_bytes
    yield "all_reduce", "tensor_parallel", (work.num_matrices - 1) * shared, BACKWARD
    yield "all_reduce", "tensor_parallel", shared, BACKWARD
    yield from _exchange_of_counts(work, chunks, work.static_shapes and chunks == 1)


def _s2(work: Workload, transport: str, chunks: int) -> Iterator[Call]:
    token, mp = work.model_dim * work.element_bytes, work.tensor_parallel_size
    rows = work.rows(work.num_tokens, mp * chunks)
    for own in _lengths(-(-rows // mp), chunks):
        yield from _send_and_return(work, transport, own)
        yield "all_gather", "tensor_parallel", mp * own * token, FORWARD
        yield "all_gather", "tensor_parallel", mp * own * token, BACKWARD
    yield from _exchange_of_counts(work, chunks, work.static_shapes)
    yield from _whole_sequence(work)


def _send_and_return(work: Workload, transport: str, rows: int) -> Iterator[Call]:
    """Rows of one rank to all shards of their experts and back, forward and backward."""
    one_copy = rows * work.model_dim * work.element_bytes
    all_copies = one_copy * work.expert_shard_size
    for direction in (FORWARD, BACKWARD):
        if transport == "fused":
            yield "all_to_all", "fused", all_copies, direction
            yield "all_to_all", "fused", all_copies, direction
        else:
            yield "all_to_all", "expert_parallel", one_copy, direction
            yield "all_gather", "expert_shard", all_copies, direction
            yield "reduce_scatter", "expert_shard", all_copies, direction
            yield "all_to_all", "expert_parallel", one_copy, direction


def _through_shards(work: Workload, rows: int) -> Iterator[Call]:
    """AlltoAll, experts with an AllReduce, AlltoAll, forward and backward."""
    size = rows * work.model_dim * work.element_bytes
    for direction in (FORWARD, BACKWARD):
        yield "all_to_all", "expert_parallel", size, direction
        yield "all_reduce", "expert_shard", size, direction
        yield "all_to_all", "expert_parallel", size, direction
    if not work.static_shapes:
        yield "all_to_all", "expert_parallel", work.num_experts * COUNT_BYTES, FORWARD


def _exchange_of_counts(work: Workload, chunks: int, static: bool) -> Iterator[Call]:
    if not static:
        yield "all_to_all", "fused", work.expert_shard_size * chunks * work.num_experts * COUNT_BYTES, FORWARD


def _whole_sequence(work: Workload) -> Iterator[Call]:
    """A sequence-parallel input is gathered for the schedules that need all tokens, and the output's gradient too."""
    if work.sequence_parallel:
        size = work.num_tokens * work.model_dim * work.element_bytes
        yield "all_gather", "tensor_parallel", work.tensor_parallel_size * COUNT_BYTES, FORWARD
        yield "all_gather", "tensor_parallel", size, FORWARD
        yield "all_gather", "tensor_parallel", size, BACKWARD


def _lengths(total: int, parts: int) -> list[int]:
    """As even as possible."""
    ends = [-(-part * total // parts) for part in range(parts + 1)]
    return [last - first for first, last in pairwise(ends)]
