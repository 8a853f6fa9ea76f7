"""Links of a cluster that is only described: constants for any group sizes from bandwidths and latencies; pure Python.

Collectives are taken as their textbook algorithms: an AlltoAll sends every peer its share, an AllGather or
ReduceScatter moves every byte once through each node's links and through every rank inside, an AllReduce is both.
Traffic inside a node and between nodes runs at the same time, so the slower of the two counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_parm.moe.choice import Sizes
from lightning_parm.moe.links import Kind, Line, LinkAxis, Links

_KINDS: tuple[Kind, ...] = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
_AXES: tuple[LinkAxis, ...] = ("fused", "expert_parallel", "expert_shard", "tensor_parallel")


@dataclass(frozen=True)
class Hardware:
    """A cluster of equal nodes.

    Attributes:
        gpus_per_node: Ranks of one node.
        intra_bytes_per_second: What one GPU sends to the others of its node.
        inter_bytes_per_second: What one GPU sends to other nodes: its share of the node's network.
        flops_per_second: Of large dense matrix products on one GPU.
        memory_bytes: Of one GPU.
        copy_bytes_per_second: At which rows are picked: half the bandwidth of its memory.
        intra_seconds: Until a collective inside a node starts to move bytes.
        inter_seconds: The same between nodes.
        peer_seconds: More for every peer of an AlltoAll.
        overlap: Share of a transfer that hides behind computing, or behind a transfer on the other kind of link.
        source: Where the numbers are from.
    """

    gpus_per_node: int
    intra_bytes_per_second: float
    inter_bytes_per_second: float
    flops_per_second: float
    memory_bytes: float
    copy_bytes_per_second: float
    intra_seconds: float = 1e-5
    inter_seconds: float = 2e-5
    peer_seconds: float = 5e-7
    overlap: float = 0.8
    source: str = ""

    def links(self, sizes: Sizes) -> Links:
        """Constants for groups of these sizes, mp and esp peers being neighbours.

        Example:
            >>> from lightning_parm.moe.topology import Topology
            >>> links = HARDWARE["h100"].links(Topology(64, 0, 8, 8, 8))
            >>> links.seconds("all_gather", "expert_shard", 2**24) < links.seconds("all_to_all", "fused", 2**24)
            True
        """
        extents: dict[LinkAxis, tuple[int, int]] = {  # size, and distance between neighbours
            "fused": (sizes.expert_parallel_size * sizes.expert_shard_size, 1),
            "expert_parallel": (sizes.expert_parallel_size, sizes.expert_shard_size),
            "expert_shard": (sizes.expert_shard_size, 1),
            "tensor_parallel": (sizes.tensor_parallel_size, 1),
        }
        lines, inside = {}, {}
        for axis, (size, stride) in extents.items():
            here = min(size, max(1, self.gpus_per_node // stride))
            inside[axis] = here == size
            for kind in _KINDS:
                lines[f"{kind}/{axis}"] = self._line(kind, size, here)
        overlaps = {f"compute+{axis}": self.overlap for axis in _AXES}
        for first in _AXES:
            for second in _AXES:
                if inside[first] != inside[second]:
                    overlaps["+".join(sorted((first, second)))] = self.overlap
        overlaps = {"+".join(sorted(pair.split("+"))): share for pair, share in overlaps.items()}
        return Links(lines, self.flops_per_second, self.copy_bytes_per_second, overlaps, source=self.source)

    def _line(self, kind: Kind, size: int, here: int) -> Line:
        start = self.intra_seconds if here == size else self.inter_seconds
        if kind == "all_to_all":
            outside = (size - here) / size / self.inter_bytes_per_second
            inside = (here - 1) / size / self.intra_bytes_per_second
            return Line(start + self.peer_seconds * (size - 1), max(outside, inside))
        # every rank carries its part of what enters the node
        outside = (size - here) / size / here / self.inter_bytes_per_second
        inside = (size - 1) / size / self.intra_bytes_per_second
        passes = 2 if kind == "all_reduce" else 1
        return Line(passes * start * max(1.0, math.log2(size)), passes * max(outside, inside))


#: Data sheets' rates times what is usually reached: 0.8 of links, 0.6 of dense bfloat16 products. The latencies and the
#: overlap above are assumptions: calibrate where a cluster is at hand.
HARDWARE = {
    "a100": Hardware(
        8, 0.8 * 300e9, 0.8 * 25e9, 0.6 * 312e12, 80e9, 0.5 * 2.0e12, source="NVIDIA A100 80GB data sheet; 8x200 Gbit/s"
    ),
    "h100": Hardware(
        8, 0.8 * 450e9, 0.8 * 50e9, 0.6 * 989e12, 80e9, 0.5 * 3.35e12, source="NVIDIA H100 SXM data sheet; 8x400 Gbit/s"
    ),
    "h200": Hardware(
        8, 0.8 * 450e9, 0.8 * 50e9, 0.6 * 989e12, 141e9, 0.5 * 4.8e12, source="NVIDIA H200 data sheet; 8x400 Gbit/s"
    ),
    "l40s": Hardware(
        8,
        0.8 * 32e9,
        0.8 * 6.25e9,
        0.6 * 362e12,
        48e9,
        0.5 * 0.864e12,
        source="NVIDIA L40S data sheet; 4x100 Gbit/s, PCIe 4",
    ),
}
