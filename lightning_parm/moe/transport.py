"""Rows to all shards of their experts, and the shards' partial results back: in one fused exchange or in two hops.

Both are generators for :func:`lightning_parm.moe.overlap.run`: they pause while a collective is in flight.

``fused``: one AlltoAll over the ep x esp block carries N_ESP copies of every row (the paper's EP&ESP-AlltoAll).
``two_hop``: an AlltoAll over ep carries one copy, then an AllGather over esp spreads it inside the node.
"""

from __future__ import annotations

from torch import Tensor

from lightning_parm.moe.collectives import all_to_all, gather_partial, reduce_scatter
from lightning_parm.moe.layout import Layout
from lightning_parm.moe.overlap import Steps
from lightning_parm.moe.topology import Topology


def send_fused(rows: Tensor, layout: Layout, topology: Topology) -> Steps[Tensor]:
    """Rows ``(R, M)`` sorted by expert -> the rows for this rank's experts, sorted by source and expert."""
    copies = topology.expert_shard_size
    send = [count for count in layout.send for _ in range(copies)]
    arriving = all_to_all(layout.repeated(rows, copies), send, layout.receive, topology.group("fused"))
    yield
    return arriving.wait()


def return_fused(rows: Tensor, layout: Layout, topology: Topology) -> Steps[Tensor]:
    """Partial results of this rank's experts -> the full results of the rows that this rank sent."""
    copies = topology.expert_shard_size
    send = [count for count in layout.send for _ in range(copies)]
    arriving = all_to_all(rows, layout.receive, send, topology.group("fused"))
    yield
    return layout.folded(arriving.wait(), copies)


def send_two_hop(rows: Tensor, layout: Layout, topology: Topology) -> Steps[Tensor]:
    """As :func:`send_fused`, across nodes once and then inside the node."""
    first_hop, second_hop = _hops(layout, topology)
    arriving = all_to_all(rows, layout.send, first_hop, topology.group("expert_parallel"))
    yield
    arriving = gather_partial(arriving.wait(), second_hop, topology.group("expert_shard"))
    yield
    return arriving.wait()


def return_two_hop(rows: Tensor, layout: Layout, topology: Topology) -> Steps[Tensor]:
    """As :func:`return_fused`, summed inside the node before it crosses nodes."""
    first_hop, second_hop = _hops(layout, topology)
    arriving = reduce_scatter(rows, second_hop, topology.group("expert_shard"))
    yield
    arriving = all_to_all(arriving.wait(), first_hop, layout.send, topology.group("expert_parallel"))
    yield
    return arriving.wait()


def _hops(layout: Layout, topology: Topology) -> tuple[list[int], list[int]]:
    """Rows from each ep peer in this rank's lane, and rows of each esp peer after that hop."""
    receive, lane = layout.receive, topology.expert_parallel_size
    lanes = [receive[first : first + lane] for first in range(0, len(receive), lane)]
    return lanes[topology.expert_shard_rank], [sum(rows) for rows in lanes]
