"""The time of one MoE layer under every schedule, transport and number of chunks, from bytes and links; pure Python.

What the model neglects: imbalance between experts (every expert gets its fair share of rows) and between ranks; the
router's own product and the losses; shared experts; other traffic on the links, such as gradients; congestion that
depends on message sizes other than those calibrated; the lower efficiency of small matrix products; kernels started
late by a busy host; the small sums over mp peers of the router's statistics and, in ``s0``, of its weights' gradients,
on their way beside everything else. Where ``links.overheads`` were measured they hold what a layer costs beyond bytes
and products.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

from lightning_parm.moe.cost import Workload
from lightning_parm.moe.links import Kind, LinkAxis, Links
from lightning_parm.moe.timeline import Compute, Sent, Step, Transfer, duration, moments

Schedule = Literal["baseline", "plain", "s0", "s1", "s2"]
Compared = Schedule | Literal["deepspeed"]
Transport = Literal["fused", "two_hop"]


class Candidate(NamedTuple):
    """A schedule with its transport and number of chunks; ``deepspeed`` is a competitor's order, never chosen."""

    schedule: Compared
    transport: Transport = "fused"
    chunks: int = 1

    def __str__(self) -> str:
        transport = f" {self.transport}" if self.schedule in ("s1", "s2") else ""
        return self.schedule + transport + (f" x{self.chunks}" if self.chunks > 1 else "")


def steps(candidate: Candidate, work: Workload, links: Links) -> list[list[list[Step]]]:
    """The parts of a layer that run one after another; each is a list of chunks, each a list of steps.

    Raises:
        ValueError: If these sizes do not allow the candidate.
    """
    schedule, transport, chunks = candidate
    mp, esp = work.tensor_parallel_size, work.expert_shard_size
    if (schedule in ("plain", "s0") and mp != esp) or (schedule == "deepspeed" and esp not in (1, mp)):
        raise ValueError(f"schedule={schedule!r} does not run with N_MP={mp} and N_ESP={esp}; use 's1' or 's2'.")
    row = work.model_dim * work.element_bytes
    tokens = work.num_tokens * row
    own = work.rows_at_experts(schedule, chunks) * row
    if schedule in ("s1", "s2"):
        own /= esp
        body = _journey(transport, own, work, links)
    elif schedule == "deepspeed":
        own *= mp / esp  # of all mp peers
    along = partial(_transfer, work, links)
    counts = [] if work.static_shapes else along("all_to_all", "fused", 0, None)
    around = along("all_gather", "tensor_parallel", tokens, None) if work.sequence_parallel else []
    after = along("all_gather", "tensor_parallel", None, tokens) if work.sequence_parallel else []

    if schedule == "s0":
        sent = along("all_to_all", "expert_parallel", own, own)
        apart, summed = (
            along("all_reduce", "tensor_parallel", *pair) for pair in ((None, tokens / chunks), (tokens / chunks, None))
        )
        experts = [*sent, *_experts(own, work, links), *sent]
        chunk = [*apart, _route(own, links), *experts, _route(own, links), *summed]
        return [[[*around, *counts]], [chunk] * chunks, [after]]
    if schedule == "s1":
        router = along("all_reduce", "tensor_parallel", None, work.num_experts * work.model_dim * work.router_bytes)
        chunk = [_route(own, links), *body, _route(own, links)]
        if work.sequence_parallel:
            return [[[*router, *counts]], [chunk] * chunks]
        chunk += along("all_gather", "tensor_parallel", tokens / chunks, None)
        apart = along("all_gather", "tensor_parallel", None, tokens)
        return [[[*apart, *router, *counts]], [chunk] * chunks]
    if schedule == "s2":
        apart = along("all_gather", "tensor_parallel", None, own * mp)
        chunk = [*apart, *body, *along("all_gather", "tensor_parallel", own * mp, None)]
        dispatch = _route(own * mp * chunks, links)
        return [[[*around, *counts, dispatch]], [chunk] * chunks, [[dispatch, *after]]]
    if schedule == "deepspeed":
        sent = along("all_to_all", "expert_parallel", own / mp, own / mp)
        experts = _experts(own / mp * esp, work, links)
        if esp > 1:  # every shard needs all of the mp peers' rows, and has part of their sums
            spread = along("all_gather", "tensor_parallel", own, None) + along("all_reduce", "expert_shard", None, own)
            summed = along("all_reduce", "expert_shard", own, None) + along("all_gather", "tensor_parallel", None, own)
            experts = [*spread, *experts, *summed]
        apart, joined = (along("all_gather", "tensor_parallel", *pair) for pair in ((None, own), (own, None)))
        dispatch = _route(own, links)
        return [[[*around, *counts, dispatch, *apart, *sent, *experts, *sent, *joined, dispatch, *after]]]

    gathered = tokens * esp if schedule == "baseline" else None
    dispatch, sent = _route(own, links), along("all_to_all", "expert_parallel", own, own)
    experts = [
        *along("all_reduce", "expert_shard", None, own),
        *_experts(own, work, links),
        *along("all_reduce", "expert_shard", own, None),
    ]
    before = along("all_gather", "expert_shard", gathered, None)
    last = along("all_gather", "expert_shard", None, gathered)
    return [[[*around, *before, *counts, dispatch, *sent, *experts, *sent, dispatch, *last, *after]]]


def _journey(transport: Transport, own: float, work: Workload, links: Links) -> list[Step]:
    """A rank's rows to all shards of their experts, through them, and back."""
    copies = own * work.expert_shard_size
    along = partial(_transfer, work, links)
    if transport == "fused":
        hop = along("all_to_all", "fused", copies, copies)
        repeat = [_copy(copies, links)] if work.expert_shard_size > 1 else []
        return [*repeat, *hop, *_experts(copies, work, links), *hop, *repeat]
    hop = along("all_to_all", "expert_parallel", own, own)
    # uneven rows are gathered and scattered by an AlltoAll of whole buffers
    kinds: tuple[Kind, Kind] = ("all_gather", "reduce_scatter") if work.static_shapes else ("all_to_all", "all_to_all")
    if work.expert_shard_size == 1:
        return [*hop, *_experts(copies, work, links), *hop]
    spread, summed = (_sent(links, kind, "expert_shard", copies) for kind in kinds)
    return [*hop, Transfer(spread, summed), *_experts(copies, work, links), Transfer(summed, spread), *hop]


def _experts(num_bytes: float, work: Workload, links: Links) -> list[Step]:
    """Received rows put in the order of several experts, multiplied, and put back; twice the products in backward."""
    rows = num_bytes / (work.model_dim * work.element_bytes)
    flops = 2 * rows * work.model_dim * work.hidden_dim / work.expert_shard_size * work.num_matrices
    seconds = flops / links.flops_per_second
    order = [_copy(num_bytes, links)] if work.num_experts > work.expert_parallel_size else []
    return [*order, Compute(seconds, 2 * seconds), *order]


def _route(num_bytes: float, links: Links) -> Compute:
    """Dispatch or combine."""
    seconds = num_bytes / (links.route_bytes_per_second or links.copy_bytes_per_second)
    return Compute(seconds, seconds)


def _copy(num_bytes: float, links: Links) -> Compute:
    return Compute(num_bytes / links.copy_bytes_per_second, num_bytes / links.copy_bytes_per_second)


def _transfer(
    work: Workload, links: Links, kind: Kind, axis: LinkAxis, forward: float | None, backward: float | None
) -> list[Step]:
    """A collective of so many bytes in each direction; nothing on an axis with one rank, or where both are ``None``."""
    if work.size(axis) == 1 or (forward is None and backward is None):
        return []
    return [Transfer(_sent(links, kind, axis, forward), _sent(links, kind, axis, backward))]


def _sent(links: Links, kind: Kind, axis: LinkAxis, num_bytes: float | None) -> Sent | None:
    if num_bytes is None:
        return None
    line = links.line(kind, axis)
    whole = line.seconds(num_bytes)
    start = min(line.start_seconds, whole)
    return Sent(axis, whole - start, start)


def seconds(candidate: Candidate, work: Workload, links: Links) -> float:
    """Predicted seconds of forward + backward of one layer."""
    base, each = links.overheads.get(f"{candidate.schedule}/{candidate.transport}", (0.0, 0.0))
    hidden = each if links.host_runs_ahead else 0.0  # the host's work for a further chunk
    more = Compute(hidden / 2, hidden / 2)
    total = base + (each - hidden) * (candidate.chunks - 1)
    for part in steps(candidate, work, links):
        happened = moments([part[0], *([more, *chunk] for chunk in part[1:])])
        for backward in (False, True):
            total += duration(happened, links.overlap, backward)
    return total
