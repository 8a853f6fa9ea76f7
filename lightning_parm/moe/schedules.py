"""Where communication is placed: the four schedules side by side, as in the paper's figure (Pan et al., 2024, sec. 3).

S tokens, equal on all N_MP peers; E experts spread over N_EP ranks, each cut over N_ESP; k choices per token::

    baseline  gather S over esp | route, dispatch | AlltoAll ep | experts, AllReduce esp | AlltoAll ep | combine, split
    plain                         route, dispatch | AlltoAll ep | experts, AllReduce esp | AlltoAll ep | combine
    s1        split S over mp   | route, dispatch | send        | experts                | return      | combine, gather
    s2        route, dispatch   | split rows, mp  | send        | experts                | return      | gather, combine
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.autocast_mode import is_autocast_available
from torch.utils.checkpoint import checkpoint

from lightning_parm.moe.collectives import (
    all_to_all,
    exchange_sizes,
    gather,
    lend,
    reduce,
    replicate,
    scale_gradient,
    split,
)
from lightning_parm.moe.experts import Experts, Prepare
from lightning_parm.moe.layout import Layout, Plan, Travel, exchange
from lightning_parm.moe.overlap import Steps, beside, run
from lightning_parm.moe.routers import Part, Router
from lightning_parm.moe.routing import (
    Choice,
    DropPolicy,
    Routing,
    arrange,
    arrange_static,
    capacity,
    drop,
    token_ranges,
)
from lightning_parm.moe.topology import Topology
from lightning_parm.moe.transport import return_fused, return_two_hop, send_fused, send_two_hop

Schedule = Literal["baseline", "plain", "s1", "s2"]
Transport = Literal["fused", "two_hop"]


class Layer(Protocol):
    """What a schedule needs of the layer."""

    topology: Topology
    training: bool
    sequence_parallel: bool
    num_experts: int
    top_k: int
    capacity_factor: float | None
    drop_policy: DropPolicy
    static_shapes: bool
    recompute: bool
    router: Router
    experts: Experts
    shared_experts: Experts | None

    @property
    def has_auxiliary_loss(self) -> bool:
        """Whether the router's statistics are part of the loss."""


class Outcome(NamedTuple):
    """What a schedule gives.

    Attributes:
        output: ``(S, M)``.
        statistics: Of the router, ``(parts, 2 E + 2)``, equal on mp peers.
        own: Which of the parts are this rank's tokens.
        load: Choices of each expert, ``(E,)``, whose sum over all ranks counts every token of the job once.
        dropped: Share of the choices that were not sent; of the tokens without an expert if experts choose.
    """

    output: Tensor
    statistics: Tensor
    own: int
    load: Tensor
    dropped: Tensor


@torch.compiler.disable  # type: ignore[untyped-decorator]
def run_schedule(layer: Layer, x: Tensor, schedule: Schedule, transport: Transport, chunks: int) -> Outcome:
    """Run a schedule on tokens ``(S, M)``, or on this mp peer's share of them if they are sequence-parallel.

    Compilers leave it as it is, for it waits and counts; ``layer.experts.compile()`` compiles the computation in it.

    Raises:
        ValueError: If there is no such schedule, transport or number of chunks, or if it does not fit the topology.
    """
    if schedule not in SCHEDULES or transport not in TRANSPORTS or not isinstance(chunks, int) or chunks < 1:
        raise ValueError(
            f"schedule={schedule!r}, transport={transport!r}, chunks={chunks} cannot run; the schedules are "
            f"{', '.join(SCHEDULES)}, the transports {', '.join(TRANSPORTS)}, and chunks count from 1."
        )
    function = SCHEDULES[schedule]
    if not layer.sequence_parallel or schedule == "s1":
        return function(layer, x, transport, chunks)
    mp = layer.topology.group("tensor_parallel")
    sizes = exchange_sizes(x.shape[0], mp, x.device)
    outcome = function(layer, gather(x, sizes, mp).wait(), transport, chunks)
    return outcome._replace(output=split(outcome.output, sizes, mp).wait())


def baseline(layer: Layer, x: Tensor, transport: Transport, chunks: int) -> Outcome:
    """MP, EP and ESP as first built, for comparison: every rank's tokens visit all esp peers, duplicates included."""
    topology = layer.topology
    mp_size, esp_size = topology.tensor_parallel_size, topology.expert_shard_size
    if mp_size % esp_size and esp_size % mp_size:
        raise ValueError(
            f"schedule='baseline' needs tensor_parallel_size or expert_shard_size to divide the other, but they are "
            f"{mp_size} and {esp_size}; use 's1' or 's2'."
        )
    esp = topology.group("expert_shard")
    sizes = exchange_sizes(x.shape[0], esp, x.device)
    everyone = gather(x, sizes, esp).wait()
    first = topology.rank - topology.expert_shard_rank
    parts = [Part((first + peer) // mp_size, 0, size) for peer, size in enumerate(sizes)]
    # every esp peer routes all of their tokens, and every token reaches its expert once from each of its mp peers
    choice, statistics = route(layer, everyone, parts, partial(scale_gradient, factor=1 / esp_size))
    routing, plan = lay_out(layer, choice, "plain", sizes)
    once = partial(scale_gradient, factor=1 / mp_size)
    rows = _through_shards(layer, routing.dispatch(_cast(everyone)), plan.layouts[0], once)
    y = _plus(split(routing.combine(rows), sizes, esp).wait(), _shared(layer, x))
    load = statistics[:, : layer.num_experts].detach().sum(0) / (mp_size * esp_size)
    return Outcome(y, statistics, topology.expert_shard_rank, load, _dropped(layer, choice))


def plain(layer: Layer, x: Tensor, transport: Transport, chunks: int) -> Outcome:
    """No pause and no duplicates: the esp peers are the mp peers, so they hold the same rows already."""
    topology = layer.topology
    if topology.tensor_parallel_size != topology.expert_shard_size:
        raise ValueError(
            f"schedule='plain' needs tensor_parallel_size = expert_shard_size, but they are "
            f"{topology.tensor_parallel_size} and {topology.expert_shard_size}; use 's1' or 's2'."
        )
    choice, statistics = route(layer, x, [Part(topology.data_parallel_rank, 0, len(x))])
    routing, plan = lay_out(layer, choice, "plain", [len(x)])
    rows = _through_shards(layer, routing.dispatch(_cast(x)), plan.layouts[0])
    y = _plus(routing.combine(rows), _shared(layer, x))
    load = _load(layer, statistics) / topology.tensor_parallel_size
    return Outcome(y, statistics, 0, load, _dropped(layer, choice))


def s1(layer: Layer, x: Tensor, transport: Transport, chunks: int) -> Outcome:
    """MP pauses before the router, so no token is routed, sent or computed twice; chunks are ranges of tokens."""
    topology, mp = layer.topology, layer.topology.group("tensor_parallel")
    send, give_back = TRANSPORTS[transport]
    # Every mp peer applies its replica of a weight to its own tokens; all chunks use the same one. They start before
    # the tokens are split, so that backward waits for the sums of their gradients after it has gathered the tokens'.
    starting = {weight: replicate(weight, mp) for weight in _replicated(layer)}
    over_mp = cache(lambda weight: starting[weight].wait())
    if layer.sequence_parallel:
        peers, own = [len(x)], x
        part = Part(topology.data_parallel_size + topology.rank, 0, len(x))
    else:
        peers = _lengths(len(x), topology.tensor_parallel_size)
        own = split(x, peers, mp).wait()
        first = sum(peers[: topology.tensor_parallel_rank])
        part = Part(topology.data_parallel_rank, first, first + len(own))
    choice, statistics = route(layer, own, [part], over_mp)
    load = _load(layer, statistics)
    summing = reduce(statistics, mp if layer.has_auxiliary_loss else None)
    routing, plan = lay_out(layer, choice, transport, [max(peers)], chunks)
    once = _cast_once(layer, own, chunks)

    def chunk(tokens: Tensor, routing: Routing, layout: Layout, sizes: tuple[int, ...]) -> Steps[Tensor]:
        sending = send(routing.dispatch(_cast(tokens)), layout, topology)
        rows, shared = yield from beside(sending, lambda: _shared(layer, tokens, over_mp))
        rows = yield from give_back(_experts(layer, rows, layout, once), layout, topology)
        y = _plus(routing.combine(rows), shared)
        if layer.sequence_parallel:
            return y
        whole = gather(y, sizes, mp)
        yield
        return whole.wait()

    ranges = [own] if chunks == 1 else torch.split(own, _lengths(len(own), chunks))
    sizes = list(zip(*(_lengths(peer, chunks) for peer in peers), strict=True))
    routings = routing.chunks([rows for (rows,) in plan.sizes])
    done = run([chunk(*each) for each in zip(ranges, routings, plan.layouts, sizes, strict=True)])
    y = done[0]
    if chunks > 1:
        pieces = [torch.split(y, list(size)) for y, size in zip(done, sizes, strict=True)]  # [chunk][peer]
        y = torch.cat([piece for peer in zip(*pieces, strict=True) for piece in peer])
    return Outcome(y, summing.wait(), 0, load, _dropped(layer, choice))


def s2(layer: Layer, x: Tensor, transport: Transport, chunks: int) -> Outcome:
    """MP pauses between dispatch and combine; returning chunks overlap the mp AllGather (SAA); chunks are of rows."""
    topology, mp = layer.topology, layer.topology.group("tensor_parallel")
    send, give_back = TRANSPORTS[transport]
    choice, statistics = route(layer, x, [Part(topology.data_parallel_rank, 0, len(x))])
    routing, plan = lay_out(layer, choice, transport, [len(x)], chunks, share=True)
    rows: Sequence[Tensor] = [routing.dispatch(_cast(x))]
    if chunks > 1:
        rows = torch.split(rows[0], [sum(peers) for peers in plan.sizes])
    # all splits before the first chunk: in backward their AllGathers then overlap the chunks that follow
    own = [split(part, sizes, mp) for part, sizes in zip(rows, plan.sizes, strict=True)]
    once = _cast_once(layer, x, chunks)

    def chunk(index: int) -> Steps[tuple[Tensor, Tensor | None]]:
        layout = plan.layouts[index]
        sending = send(own[index].wait(), layout, topology)
        rows, shared = yield from beside(sending, lambda: None if index else _shared(layer, x))
        rows = yield from give_back(_experts(layer, rows, layout, once), layout, topology)
        whole = gather(rows, plan.sizes[index], mp)
        yield
        return whole.wait(), shared

    done = run([chunk(index) for index in range(chunks)])
    y = _plus(routing.combine(_cat([rows for rows, _ in done])), done[0][1])
    load = _load(layer, statistics) / topology.tensor_parallel_size
    return Outcome(y, statistics, 0, load, _dropped(layer, choice))


SCHEDULES = {"baseline": baseline, "plain": plain, "s1": s1, "s2": s2}
TRANSPORTS = {"fused": (send_fused, return_fused), "two_hop": (send_two_hop, return_two_hop)}


def route(layer: Layer, x: Tensor, parts: Sequence[Part], prepare: Prepare | None = None) -> tuple[Choice, Tensor]:
    """Choose experts, and drop what is beyond their capacity, for each part by itself."""
    seed = _agreed_seed(layer, x.device) if layer.router.jitter and layer.training else 0
    choice, statistics = layer.router(x, prepare, parts, seed, layer.has_auxiliary_loss)
    if layer.capacity_factor is not None and layer.router.kind != "expert_choice":
        lengths = [part.length for part in parts]
        choice = drop(choice, layer.num_experts, lengths, [_capacity(layer, n) for n in lengths], layer.drop_policy)
    return choice, statistics


def _capacity(layer: Layer, num_tokens: int) -> int:
    assert layer.capacity_factor is not None
    return capacity(num_tokens, layer.top_k, layer.num_experts, layer.capacity_factor)


def _agreed_seed(layer: Layer, device: torch.device) -> int:
    """Drawn like all noise from the default generator, so recomputation repeats it, but equal where tokens are."""
    seed = torch.randint(2**62, (), dtype=torch.int64)
    for group in (layer.topology.group("tensor_parallel"), layer.topology.group("expert_shard")):
        if group is not None:
            seed = seed.to(device)
            dist.all_reduce(seed, dist.ReduceOp.MAX, group)
    return int(seed)


def lay_out(
    layer: Layer, choice: Choice, travel: Travel, lengths: Sequence[int], chunks: int = 1, share: bool = False
) -> tuple[Routing, Plan]:
    """Sort the rows and tell every rank what it will get.

    Args:
        layer: The layer.
        choice: What is kept.
        travel: How rows are sent.
        lengths: Tokens of each part, the most that any rank has; with static shapes they decide the number of rows.
        chunks: Parts that are sent one after another.
        share: Whether mp peers share the same rows out, instead of each sending its own.
    """
    topology = layer.topology
    peers = topology.tensor_parallel_size if share else None
    if layer.static_shapes and (share or chunks == 1):  # ranges of tokens have rows of any number
        width = sum(_capacity(layer, length) for length in lengths)
        routing = arrange_static(choice, layer.num_experts, width, chunks, peers or 1)
    else:
        routing = arrange(choice, layer.num_experts, chunks, peers)
    mine = topology.tensor_parallel_rank if share else 0
    plan = exchange(routing.counts, mine, topology, travel, routing.static)
    return routing.trimmed(plan.num_rows), plan


def _through_shards(layer: Layer, rows: Tensor, layout: Layout, prepare: Prepare | None = None) -> Tensor:
    """AlltoAll over ep, experts with an AllReduce over the esp peers that hold the same rows, AlltoAll back."""
    ep, esp = layer.topology.group("expert_parallel"), layer.topology.group("expert_shard")
    rows = all_to_all(rows, layout.send, layout.receive, ep).wait()
    rows = reduce(_experts(layer, replicate(rows, esp).wait(), layout, prepare), esp).wait()
    return all_to_all(rows, layout.receive, layout.send, ep).wait()


def _experts(layer: Layer, rows: Tensor, layout: Layout, prepare: Prepare | None = None) -> Tensor:
    rows = layout.by_expert(rows)
    if layer.recompute:
        rows = checkpoint(
            layer.experts, rows, layout.per_expert, prepare, use_reentrant=False, preserve_rng_state=False
        )
    else:
        rows = layer.experts(rows, layout.per_expert, prepare)
    return layout.by_source(rows)


def _cast_once(layer: Layer, x: Tensor, chunks: int) -> Prepare | None:
    """Weights in the rows' type, made for the first chunk and lent to all: else each keeps its own for backward."""
    if chunks == 1 or layer.recompute:
        return None
    dtype = _cast(x[:0]).dtype
    cast = cache(lambda weight: weight.detach().to(dtype))
    return lambda weight: weight if weight.dtype == dtype else lend(weight, cast(weight))


def _replicated(layer: Layer) -> list[Tensor]:
    """The weights that all ranks hold."""
    shared = [] if layer.shared_experts is None else layer.shared_experts.parameters()
    return [layer.router.weight, *shared]


def _shared(layer: Layer, x: Tensor, prepare: Prepare | None = None) -> Tensor | None:
    return None if layer.shared_experts is None else layer.shared_experts(_cast(x), [len(x)], prepare)


def _plus(y: Tensor, shared: Tensor | None) -> Tensor:
    return y if shared is None else y + shared


def _cast(x: Tensor) -> Tensor:
    """To autocast's type, before anything is sent."""
    kind = x.device.type
    enabled = is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return x.to(torch.get_autocast_dtype(kind)) if enabled else x


def _load(layer: Layer, statistics: Tensor) -> Tensor:
    return statistics[0, : layer.num_experts].detach()


def _dropped(layer: Layer, choice: Choice) -> Tensor:
    if choice.kept is None or not choice.kept.numel():
        return choice.weight.new_zeros(())
    kept = choice.kept.any(-1) if layer.router.kind == "expert_choice" else choice.kept
    return 1 - kept.to(choice.weight.dtype).mean()


def _lengths(total: int, parts: int) -> list[int]:
    return [last - first for first, last in token_ranges(total, parts)]


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
