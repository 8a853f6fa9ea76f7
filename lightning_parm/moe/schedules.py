"""Where communication is placed: the four schedules side by side, as in the paper's figure (Pan et al., 2024, sec. 3).

S tokens, equal on all N_MP peers; E experts spread over N_EP ranks, each cut over N_ESP; k choices per token::

    baseline  gather S over esp | route, dispatch | AlltoAll ep | experts, AllReduce esp | AlltoAll ep | combine, split
    plain                         route, dispatch | AlltoAll ep | experts, AllReduce esp | AlltoAll ep | combine
    s1        split S over mp   | route, dispatch | send        | experts                | return      | combine, gather
    s2        route, dispatch   | split rows, mp  | send        | experts                | return      | gather, combine
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_parm.moe.collectives import all_to_all, exchange_sizes, gather, reduce, replicate, scale_gradient, split
from lightning_parm.moe.experts import Experts, Prepare
from lightning_parm.moe.layout import Layout, exchange
from lightning_parm.moe.overlap import Steps, beside, run
from lightning_parm.moe.routers import Router
from lightning_parm.moe.routing import Routing, arrange, token_ranges
from lightning_parm.moe.topology import Topology
from lightning_parm.moe.transport import return_fused, return_two_hop, send_fused, send_two_hop

Schedule = Literal["baseline", "plain", "s1", "s2"]
Transport = Literal["fused", "two_hop"]


class Layer(Protocol):
    """What a schedule needs of the layer."""

    topology: Topology
    sequence_parallel: bool
    num_experts: int
    router: Router
    experts: Experts
    shared_experts: Experts | None


class Outcome(NamedTuple):
    """What a schedule gives.

    Attributes:
        output: ``(S, M)``.
        statistics: Of the router, ``(segments, 2 E + 2)``, equal on mp peers.
        own: This rank's segment.
        load: Choices of each expert, ``(E,)``, whose sum over all ranks counts every token of the job once.
    """

    output: Tensor
    statistics: Tensor
    own: int
    load: Tensor


def run_schedule(layer: Layer, x: Tensor, schedule: Schedule, transport: Transport, chunks: int) -> Outcome:
    """Run a schedule on tokens ``(S, M)``, or on this mp peer's share of them if they are sequence-parallel."""
    function = {"baseline": baseline, "plain": plain, "s1": s1, "s2": s2}[schedule]
    if not layer.sequence_parallel or schedule == "s1":
        return function(layer, x, transport, chunks)
    mp = layer.topology.group("tensor_parallel")
    sizes = exchange_sizes(x.shape[0], mp, x.device)
    outcome = function(layer, gather(x, sizes, mp).wait(), transport, chunks)
    return outcome._replace(output=split(outcome.output, sizes, mp).wait())


def baseline(layer: Layer, x: Tensor, transport: Transport, chunks: int) -> Outcome:
    """MP, EP and ESP as first built, for comparison: every rank's tokens visit all esp peers, duplicates included."""
    topology, esp = layer.topology, layer.topology.group("expert_shard")
    mp_size, esp_size = topology.tensor_parallel_size, topology.expert_shard_size
    if mp_size % esp_size and esp_size % mp_size:
        raise ValueError(
            f"schedule='baseline' needs tensor_parallel_size or expert_shard_size to divide the other, but they are "
            f"{mp_size} and {esp_size}; use 's1' or 's2'."
        )
    sizes = exchange_sizes(x.shape[0], esp, x.device)
    everyone = gather(x, sizes, esp).wait()
    # every esp peer routes all of their tokens, and every token reaches its expert once from each of its mp peers
    choice, statistics = layer.router(everyone, partial(scale_gradient, factor=1 / esp_size), sizes)
    routing = arrange(choice, layer.num_experts)
    rows = _through_shards(layer, routing.dispatch(everyone), routing, partial(scale_gradient, factor=1 / mp_size))
    y = split(routing.combine(rows), sizes, esp).wait()
    load = statistics[:, : layer.num_experts].detach().sum(0) / (mp_size * esp_size)
    return Outcome(_plus(y, _shared(layer, x)), statistics, topology.expert_shard_rank, load)


def plain(layer: Layer, x: Tensor, transport: Transport, chunks: int) -> Outcome:
    """No pause and no duplicates: the esp peers are the mp peers, so they hold the same rows already."""
    topology = layer.topology
    if topology.tensor_parallel_size != topology.expert_shard_size:
        raise ValueError(
            f"schedule='plain' needs tensor_parallel_size = expert_shard_size, but they are "
            f"{topology.tensor_parallel_size} and {topology.expert_shard_size}; use 's1' or 's2'."
        )
    choice, statistics = layer.router(x)
    routing = arrange(choice, layer.num_experts)
    rows = _through_shards(layer, routing.dispatch(x), routing)
    y = _plus(routing.combine(rows), _shared(layer, x))
    return Outcome(y, statistics, 0, _load(layer, statistics) / topology.tensor_parallel_size)


def s1(layer: Layer, x: Tensor, transport: Transport, chunks: int) -> Outcome:
    """MP pauses before the router, so no token is routed, sent or computed twice; chunks are ranges of tokens."""
    topology, mp = layer.topology, layer.topology.group("tensor_parallel")
    send, give_back = TRANSPORTS[transport]
    over_mp = partial(replicate, group=mp)  # what every mp peer applies to its own tokens
    peers = [x.shape[0]] if layer.sequence_parallel else _lengths(x.shape[0], topology.tensor_parallel_size)
    own = x if layer.sequence_parallel else split(x, peers, mp).wait()
    choice, statistics = layer.router(own, over_mp)
    routing = arrange(choice, layer.num_experts, chunks)
    plan = exchange(routing.counts, 0, topology, transport)

    def chunk(tokens: Tensor, routing: Routing, layout: Layout, sizes: tuple[int, ...]) -> Steps[Tensor]:
        sending = send(routing.dispatch(tokens), layout, topology)
        rows, shared = yield from beside(sending, lambda: _shared(layer, tokens, over_mp))
        rows = yield from give_back(_experts(layer, rows, layout), layout, topology)
        y = _plus(routing.combine(rows), shared)
        if layer.sequence_parallel:
            return y
        whole = gather(y, sizes, mp)
        yield
        return whole.wait()

    ranges = torch.split(own, _lengths(own.shape[0], chunks))
    sizes = list(zip(*(_lengths(peer, chunks) for peer in peers), strict=True))
    routings = routing.chunks([rows for (rows,) in plan.sizes])
    done = run([chunk(*parts) for parts in zip(ranges, routings, plan.layouts, sizes, strict=True)])
    pieces = [torch.split(part, list(size)) for part, size in zip(done, sizes, strict=True)]  # [chunk][peer]
    y = _cat([piece for peer in zip(*pieces, strict=True) for piece in peer])
    return Outcome(y, reduce(statistics, mp).wait(), 0, _load(layer, statistics))


def s2(layer: Layer, x: Tensor, transport: Transport, chunks: int) -> Outcome:
    """MP pauses between dispatch and combine; returning chunks overlap the mp AllGather (SAA); chunks are of rows."""
    topology, mp = layer.topology, layer.topology.group("tensor_parallel")
    send, give_back = TRANSPORTS[transport]
    choice, statistics = layer.router(x)
    routing = arrange(choice, layer.num_experts, chunks, peers=topology.tensor_parallel_size)
    plan = exchange(routing.counts, topology.tensor_parallel_rank, topology, transport)
    rows = torch.split(routing.dispatch(x), [sum(peers) for peers in plan.sizes])
    own = [split(part, sizes, mp) for part, sizes in zip(rows, plan.sizes, strict=True)]

    def chunk(index: int) -> Steps[tuple[Tensor, Tensor | None]]:
        layout, sizes = plan.layouts[index], plan.sizes[index]
        sending = send(own[index].wait(), layout, topology)
        arrived, shared = yield from beside(sending, lambda: None if index else _shared(layer, x))
        returned = yield from give_back(_experts(layer, arrived, layout), layout, topology)
        whole = gather(returned, sizes, mp)
        yield
        return whole.wait(), shared

    done = run([chunk(index) for index in range(chunks)])
    y = _plus(routing.combine(_cat([rows for rows, _ in done])), done[0][1])
    return Outcome(y, statistics, 0, _load(layer, statistics) / topology.tensor_parallel_size)


TRANSPORTS = {"fused": (send_fused, return_fused), "two_hop": (send_two_hop, return_two_hop)}


def _through_shards(layer: Layer, rows: Tensor, routing: Routing, prepare: Prepare | None = None) -> Tensor:
    """AlltoAll over ep, experts with an AllReduce over the esp peers that hold the same rows, AlltoAll back."""
    ep, esp = layer.topology.group("expert_parallel"), layer.topology.group("expert_shard")
    (layout,) = exchange(routing.counts, 0, layer.topology, "plain").layouts
    rows = all_to_all(rows, layout.send, layout.receive, ep).wait()
    rows = reduce(_experts(layer, replicate(rows, esp), layout, prepare), esp).wait()
    return all_to_all(rows, layout.receive, layout.send, ep).wait()


def _experts(layer: Layer, rows: Tensor, layout: Layout, prepare: Prepare | None = None) -> Tensor:
    return layout.by_source(layer.experts(layout.by_expert(rows), layout.per_expert, prepare))


def _shared(layer: Layer, x: Tensor, prepare: Prepare | None = None) -> Tensor | None:
    return None if layer.shared_experts is None else layer.shared_experts(x, [x.shape[0]], prepare)


def _plus(y: Tensor, shared: Tensor | None) -> Tensor:
    return y if shared is None else y + shared


def _load(layer: Layer, statistics: Tensor) -> Tensor:
    return statistics[0, : layer.num_experts].detach()


def _lengths(total: int, parts: int) -> list[int]:
    return [last - first for first, last in token_ranges(total, parts)]


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
