"""Where communication is placed: the schedules side by side, as in the paper's figure (Pan et al., 2024, sec. 3).

S tokens, equal on all N_MP peers; E experts spread over N_EP ranks, each cut over N_ESP; k choices per token::

    baseline  gather S over esp | route, dispatch | AlltoAll ep | experts, AllReduce esp | AlltoAll ep | combine, split
    plain                         route, dispatch | AlltoAll ep | experts, AllReduce esp | AlltoAll ep | combine
    s0                            route, dispatch | AlltoAll ep | experts                | AlltoAll ep | combine, sum
    s1        split S over mp   | route, dispatch | send        | experts                | return      | combine, gather
    s2        route, dispatch   | split rows, mp  | send        | experts                | return      | gather, combine

The paper's are ``baseline``, ``s1`` and ``s2``. ``s0`` is ``plain`` with its sums moved behind the combine, where they
are those of S tokens rather than of k S rows, as tensor parallelism sums up a dense layer (Shoeybi et al., 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Literal

import torch
from torch import Tensor

from lightning_parm.moe.collectives import (
    all_to_all,
    exchange_sizes,
    gather,
    reduce,
    replicate,
    scale_gradient,
    split,
)
from lightning_parm.moe.layout import Layout
from lightning_parm.moe.overlap import Steps, beside, run
from lightning_parm.moe.routers import Part
from lightning_parm.moe.routing import Routing
from lightning_parm.moe.stages import (
    Layer,
    Outcome,
    apply_experts,
    apply_shared,
    cast_once,
    cat,
    dropped_share,
    even_lengths,
    in_autocast_type,
    lay_out,
    own_load,
    plus,
    replicated,
    route,
    through_shards,
)
from lightning_parm.moe.topology import Topology
from lightning_parm.moe.transport import return_fused, return_two_hop, send_fused, send_two_hop

Schedule = Literal["baseline", "plain", "s0", "s1", "s2"]
Transport = Literal["fused", "two_hop"]


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
    rows = through_shards(layer, routing.dispatch(in_autocast_type(everyone)), plan.layouts[0], once)
    y = plus(split(routing.combine(rows), sizes, esp).wait(), apply_shared(layer, x))
    load = statistics[:, : layer.num_experts].detach().sum(0) / (mp_size * esp_size)
    return Outcome(y, statistics, topology.expert_shard_rank, load, dropped_share(layer, choice))


def plain(layer: Layer, x: Tensor, transport: Transport, chunks: int) -> Outcome:
    """No pause and no duplicates: the esp peers are the mp peers, so they hold the same rows already."""
    topology = layer.topology
    _shards_are_mp_peers("plain", topology)
    choice, statistics = route(layer, x, [Part(topology.data_parallel_rank, 0, len(x))])
    routing, plan = lay_out(layer, choice, "plain", [len(x)])
    rows = through_shards(layer, routing.dispatch(in_autocast_type(x)), plan.layouts[0])
    y = plus(routing.combine(rows), apply_shared(layer, x))
    load = own_load(layer, statistics) / topology.tensor_parallel_size
    return Outcome(y, statistics, 0, load, dropped_share(layer, choice))


def s0(layer: Layer, x: Tensor, transport: Transport, chunks: int) -> Outcome:
    """MP never pauses: the shards' partial results come back and are added up as tokens; chunks are ranges of these."""
    topology, mp, ep = layer.topology, layer.topology.group("tensor_parallel"), layer.topology.group("expert_parallel")
    _shards_are_mp_peers("s0", topology)
    lengths = even_lengths(len(x), chunks)
    # Every mp peer has its shards' share of the gradients of the rows and of the router's weights. What sums them up
    # is made before the router is, so that backward waits for the sums when nothing but the router is left to do.
    pieces = [replicate(piece, mp) for piece in torch.split(in_autocast_type(x), lengths)]
    choice, statistics = route(layer, x, [Part(topology.data_parallel_rank, 0, len(x))])
    weighing = replicate(choice.weight, mp)
    routing, plan = lay_out(layer, choice, "plain", [len(x)], chunks)
    weights = cache(lambda: torch.split(weighing.wait(), lengths))
    once = cast_once(layer, x, chunks)

    def chunk(index: int, routing: Routing) -> Steps[tuple[Tensor, Tensor | None]]:
        layout = plan.layouts[index]
        arriving = all_to_all(routing.dispatch(pieces[index].wait()), layout.send, layout.receive, ep)
        shared = None if index else apply_shared(layer, x)
        yield
        arriving = all_to_all(apply_experts(layer, arriving.wait(), layout, once), layout.receive, layout.send, ep)
        yield
        whole = reduce(routing.combine(arriving.wait(), weights()[index]), mp)
        yield
        return whole.wait(), shared

    routings = routing.chunks([rows for (rows,) in plan.sizes])
    done = run([chunk(*each) for each in enumerate(routings)])
    y = plus(cat([tokens for tokens, _ in done]), done[0][1])
    load = own_load(layer, statistics) / topology.tensor_parallel_size
    return Outcome(y, statistics, 0, load, dropped_share(layer, choice))


def s1(layer: Layer, x: Tensor, transport: Transport, chunks: int) -> Outcome:
    """MP pauses before the router, so no token is routed, sent or computed twice; chunks are ranges of tokens."""
    topology, mp = layer.topology, layer.topology.group("tensor_parallel")
    send, give_back = TRANSPORTS[transport]
    # Every mp peer applies its replica of a weight to its own tokens; all chunks use the same one. They start before
    # the tokens are split, so that backward waits for the sums of their gradients after it has gathered the tokens'.
    starting = {weight: replicate(weight, mp) for weight in replicated(layer)}
    over_mp = cache(lambda weight: starting[weight].wait())
    if layer.sequence_parallel:
        peers, own = [len(x)], x
        part = Part(topology.data_parallel_size + topology.rank, 0, len(x))
    else:
        peers = even_lengths(len(x), topology.tensor_parallel_size)
        own = split(x, peers, mp).wait()
        first = sum(peers[: topology.tensor_parallel_rank])
        part = Part(topology.data_parallel_rank, first, first + len(own))
    choice, statistics = route(layer, own, [part], over_mp)
    load = own_load(layer, statistics)
    summing = reduce(statistics, mp if layer.has_auxiliary_loss else None)
    routing, plan = lay_out(layer, choice, transport, [max(peers)], chunks)
    once = cast_once(layer, own, chunks)

    def chunk(tokens: Tensor, routing: Routing, layout: Layout, sizes: tuple[int, ...]) -> Steps[Tensor]:
        sending = send(routing.dispatch(in_autocast_type(tokens)), layout, topology)
        rows, shared = yield from beside(sending, lambda: apply_shared(layer, tokens, over_mp))
        rows = yield from give_back(apply_experts(layer, rows, layout, once), layout, topology)
        y = plus(routing.combine(rows), shared)
        if layer.sequence_parallel:
            return y
        whole = gather(y, sizes, mp)
        yield
        return whole.wait()

    ranges = [own] if chunks == 1 else torch.split(own, even_lengths(len(own), chunks))
    sizes = list(zip(*(even_lengths(peer, chunks) for peer in peers), strict=True))
    routings = routing.chunks([rows for (rows,) in plan.sizes])
    done = run([chunk(*each) for each in zip(ranges, routings, plan.layouts, sizes, strict=True)])
    y = done[0]
    if chunks > 1:
        pieces = [torch.split(y, list(size)) for y, size in zip(done, sizes, strict=True)]  # [chunk][peer]
        y = torch.cat([piece for peer in zip(*pieces, strict=True) for piece in peer])
    return Outcome(y, summing.wait(), 0, load, dropped_share(layer, choice))


def s2(layer: Layer, x: Tensor, transport: Transport, chunks: int) -> Outcome:
    """MP pauses between dispatch and combine; returning chunks overlap the mp AllGather (SAA); chunks are of rows."""
    topology, mp = layer.topology, layer.topology.group("tensor_parallel")
    send, give_back = TRANSPORTS[transport]
    choice, statistics = route(layer, x, [Part(topology.data_parallel_rank, 0, len(x))])
    routing, plan = lay_out(layer, choice, transport, [len(x)], chunks, share=True)
    rows: Sequence[Tensor] = [routing.dispatch(in_autocast_type(x))]
    if chunks > 1:
        rows = torch.split(rows[0], [sum(peers) for peers in plan.sizes])
    # all splits before the first chunk: in backward their AllGathers then overlap the chunks that follow
    own = [split(part, sizes, mp) for part, sizes in zip(rows, plan.sizes, strict=True)]
    once = cast_once(layer, x, chunks)

    def chunk(index: int) -> Steps[tuple[Tensor, Tensor | None]]:
        layout = plan.layouts[index]
        sending = send(own[index].wait(), layout, topology)
        rows, shared = yield from beside(sending, lambda: None if index else apply_shared(layer, x))
        rows = yield from give_back(apply_experts(layer, rows, layout, once), layout, topology)
        whole = gather(rows, plan.sizes[index], mp)
        yield
        return whole.wait(), shared

    done = run([chunk(index) for index in range(chunks)])
    y = plus(routing.combine(cat([rows for rows, _ in done])), done[0][1])
    load = own_load(layer, statistics) / topology.tensor_parallel_size
    return Outcome(y, statistics, 0, load, dropped_share(layer, choice))


SCHEDULES = {"baseline": baseline, "plain": plain, "s0": s0, "s1": s1, "s2": s2}
TRANSPORTS = {"fused": (send_fused, return_fused), "two_hop": (send_two_hop, return_two_hop)}


def _shards_are_mp_peers(schedule: Schedule, topology: Topology) -> None:
    """As they must be where mp peers' equal rows reach all shards of an expert without being sent there."""
    if topology.tensor_parallel_size != topology.expert_shard_size:
        raise ValueError(
            f"schedule={schedule!r} needs tensor_parallel_size = expert_shard_size, but they are "
            f"{topology.tensor_parallel_size} and {topology.expert_shard_size}; use 's1' or 's2'."
        )
