"""The stages of a layer, which schedules put in order: route, lay out, experts, and what goes around them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.autocast_mode import is_autocast_available
from torch.utils.checkpoint import checkpoint

from lightning_parm.moe.collectives import all_to_all, lend, reduce, replicate
from lightning_parm.moe.experts import Experts, Prepare
from lightning_parm.moe.layout import Layout, Plan, Travel, exchange
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


def through_shards(layer: Layer, rows: Tensor, layout: Layout, prepare: Prepare | None = None) -> Tensor:
    """AlltoAll over ep, experts with an AllReduce over the esp peers that hold the same rows, AlltoAll back."""
    ep, esp = layer.topology.group("expert_parallel"), layer.topology.group("expert_shard")
    rows = all_to_all(rows, layout.send, layout.receive, ep).wait()
    rows = reduce(apply_experts(layer, replicate(rows, esp).wait(), layout, prepare), esp).wait()
    return all_to_all(rows, layout.receive, layout.send, ep).wait()


def apply_experts(layer: Layer, rows: Tensor, layout: Layout, prepare: Prepare | None = None) -> Tensor:
    """This rank's experts on received rows, in the order in which these came."""
    rows = layout.by_expert(rows)
    if layer.recompute:
        rows = checkpoint(
            layer.experts, rows, layout.per_expert, prepare, use_reentrant=False, preserve_rng_state=False
        )
    else:
        rows = layer.experts(rows, layout.per_expert, prepare)
    return layout.by_source(rows)


def cast_once(layer: Layer, x: Tensor, chunks: int) -> Prepare | None:
    """Weights in the rows' type, made for the first chunk and lent to all: else each keeps its own for backward."""
    if chunks == 1 or layer.recompute:
        return None
    dtype = in_autocast_type(x[:0]).dtype
    copy = cache(lambda weight: weight.detach().to(dtype))
    return lambda weight: weight if weight.dtype == dtype else lend(weight, copy(weight))


def replicated(layer: Layer) -> list[Tensor]:
    """The weights that all ranks hold."""
    shared = [] if layer.shared_experts is None else layer.shared_experts.parameters()
    return [layer.router.weight, *shared]


def apply_shared(layer: Layer, x: Tensor, prepare: Prepare | None = None) -> Tensor | None:
    """Shared experts on tokens ``(S, M)``, if there are any."""
    return None if layer.shared_experts is None else layer.shared_experts(in_autocast_type(x), [len(x)], prepare)


def plus(y: Tensor, shared: Tensor | None) -> Tensor:
    """With what shared experts add, if there are any."""
    return y if shared is None else y + shared


def in_autocast_type(x: Tensor) -> Tensor:
    """To autocast's type, before anything is sent."""
    kind = x.device.type
    enabled = is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return x.to(torch.get_autocast_dtype(kind)) if enabled else x


def own_load(layer: Layer, statistics: Tensor) -> Tensor:
    """Choices of each expert in the first part, ``(E,)``."""
    return statistics[0, : layer.num_experts].detach()


def dropped_share(layer: Layer, choice: Choice) -> Tensor:
    """See :class:`Outcome`."""
    if choice.kept is None or not choice.kept.numel():
        return choice.weight.new_zeros(())
    kept = choice.kept.any(-1) if layer.router.kind == "expert_choice" else choice.kept
    return 1 - kept.to(choice.weight.dtype).mean()


def even_lengths(total: int, parts: int) -> list[int]:
    """Tokens of each of so many ranges."""
    return [last - first for first, last in token_ranges(total, parts)]


def cat(parts: Sequence[Tensor]) -> Tensor:
    """Concatenated, without a copy of what is whole already."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
