"""What the links allow at best: the bytes that must cross the busiest link, divided by its rate."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_parm.moe.cost import Collective
from lightning_parm.moe.topology import Topology


def limit_seconds(
    calls: Sequence[Collective], topology: Topology, ranks_per_node: int, inter: float, intra: float
) -> float:
    """Seconds that full-duplex links need when everything overlaps with everything and every byte is sent once.

    Args:
        calls: The collectives of one layer, with the same bytes on every rank.
        topology: Who takes part in them.
        ranks_per_node: Neighbouring ranks on one node, which share the link to the switch and the fabric inside.
        inter: Bytes per second of a node's link, in each direction.
        intra: Bytes per second of the fabric inside a node.

    Example:
        >>> call = Collective("all_to_all", "expert_parallel", 2, num_bytes=100, backward=False)
        >>> limit_seconds([call], Topology(2, 0, 1, 2, 1), ranks_per_node=1, inter=25.0, intra=1e9)
        2.0
    """
    nodes = -(-topology.world_size // ranks_per_node)
    between, inside = [0.0] * nodes, [0.0] * nodes
    for call in calls:
        for group in topology._partition(call.axis):
            size, share = len(group), call.num_bytes / len(group)
            for node in {rank // ranks_per_node for rank in group}:
                here = sum(rank // ranks_per_node == node for rank in group)
                if call.kind == "all_to_all":
                    between[node] += here * (size - here) * share
                    inside[node] += here * (here - 1) * share
                else:  # what is outside enters once and is then passed on inside; a reduction is the same backwards
                    passes = 2 if call.kind == "all_reduce" else 1
                    between[node] += passes * (size - here) * share
                    inside[node] += passes * (here * (size - 1) - (size - here)) * share
    return max(max(between) / inter, max(inside) / intra)
