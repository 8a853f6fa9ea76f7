"""Which rows go where: one exchange of counts tells every chunk of a layer how many rows each rank and expert gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parm.moe.topology import Topology

Travel = Literal["plain", "fused", "two_hop"]


@dataclass(frozen=True)
class Layout:
    """The rows of one chunk on their way to the experts and back.

    Attributes:
        send: Rows for each range of experts, in rank order; ``(N_EP,)``.
        table: Rows received from each source for each local expert, sources in the order in which their rows arrive.
        device: Where index tensors are made.
    """

    send: tuple[int, ...]
    table: tuple[tuple[int, ...], ...]
    device: torch.device

    @property
    def receive(self) -> list[int]:
        """Rows received from each source."""
        return [sum(source) for source in self.table]

    @cached_property
    def per_expert(self) -> list[int]:
        """Rows of each local expert."""
        return [sum(expert) for expert in zip(*self.table, strict=True)]

    def by_expert(self, rows: Tensor) -> Tensor:
        """Received rows ``(R, M)``, sorted by source and expert, sorted by expert instead."""
        return rows if self._in_order else take(rows, *self._orders)

    def by_source(self, rows: Tensor) -> Tensor:
        """The inverse of :meth:`by_expert`."""
        return rows if self._in_order else take(rows, *reversed(self._orders))

    @property
    def _in_order(self) -> bool:
        """Rows of one source, or for one expert, are sorted by both."""
        return len(self.table) == 1 or len(self.table[0]) == 1

    @cached_property
    def _orders(self) -> tuple[Tensor, Tensor]:
        by_expert = [count for expert in zip(*self.table, strict=True) for count in expert]
        by_source = [count for source in self.table for count in source]
        sources, experts = len(self.table), len(self.table[0])
        source_starts, expert_starts = _starts(by_source), _starts(by_expert)
        forward = [source_starts[s * experts + e] for e in range(experts) for s in range(sources)]
        backward = [expert_starts[e * sources + s] for s in range(sources) for e in range(experts)]
        return (
            ranges(forward, by_expert, self.device).unsqueeze(0),
            ranges(backward, by_source, self.device).unsqueeze(0),
        )

    def repeated(self, rows: Tensor, copies: int) -> Tensor:
        """Each destination's rows ``copies`` times in a row: ``(copies * R, M)``; gradients are summed in float32."""
        return rows if copies == 1 else take(rows, *self._copy_orders(copies))

    def folded(self, rows: Tensor, copies: int) -> Tensor:
        """The float32 sum of the copies that came back, the transpose of :meth:`repeated`."""
        return rows if copies == 1 else take(rows, *reversed(self._copy_orders(copies)))

    def _copy_orders(self, copies: int) -> tuple[Tensor, Tensor]:
        starts = _starts(self.send)
        repeat = ranges(
            [s for s in starts for _ in range(copies)], [n for n in self.send for _ in range(copies)], self.device
        )
        fold = [
            ranges([copies * s + copy * n for s, n in zip(starts, self.send, strict=True)], self.send, self.device)
            for copy in range(copies)
        ]
        return repeat.unsqueeze(0), torch.stack(fold)


@dataclass(frozen=True)
class Plan:
    """What one layer sends.

    Attributes:
        sizes: Rows of each chunk and mp peer, ``[chunk][peer]``.
        layouts: One for each chunk.
    """

    sizes: list[list[int]]
    layouts: list[Layout]

    @property
    def num_rows(self) -> int:
        """R, rows of all chunks and peers."""
        return sum(sum(peers) for peers in self.sizes)


def exchange(counts: Tensor, mine: int, topology: Topology, travel: Travel, static: int | None = None) -> Plan:
    """Tell every rank of the block how many rows it will get; the layer's only host sync on CUDA.

    Args:
        counts: Rows per chunk, mp peer and expert ``(chunks, peers, E)``, of which this rank sends peer ``mine``'s.
        mine: This rank's position among the peers.
        topology: Where the experts are.
        travel: ``"plain"`` sends along ep only; with ``"fused"`` and ``"two_hop"`` all N_ESP shards of an expert get
            its rows.
        static: Every entry of ``counts``, on every rank, when that is known: then nothing is exchanged or synchronised.

    Returns:
        The rows of every chunk and peer, and one layout for each chunk.
    """
    chunks, peers, experts = counts.shape
    copies = 1 if travel == "plain" else topology.expert_shard_size
    sources, local = topology.expert_parallel_size * copies, experts // topology.expert_parallel_size
    group = topology.group("expert_parallel" if copies == 1 else "fused")
    if static is not None:
        everywhere = [static] * (chunks * (peers * experts + sources * local))
    else:
        outgoing = counts[:, mine].view(chunks, topology.expert_parallel_size, local).transpose(0, 1)
        outgoing = outgoing.repeat_interleave(copies, dim=0).contiguous()
        incoming = outgoing
        if group is not None:
            incoming = torch.empty_like(outgoing)
            dist.all_to_all_single(incoming, outgoing, group=group)
        everywhere = torch.cat([counts.flatten(), incoming.transpose(0, 1).flatten()]).tolist()

    sent = _nested(everywhere[: counts.numel()], (chunks, peers, experts))
    received = _nested(everywhere[counts.numel() :], (chunks, sources, local))
    order = list(range(sources))
    if travel == "two_hop":  # its second hop puts the rows of one esp peer after those of another
        order.sort(key=lambda source: source % copies)
    layouts = [
        Layout(
            send=tuple(sum(sent[chunk][mine][first : first + local]) for first in range(0, experts, local)),
            table=tuple(tuple(received[chunk][source]) for source in order),
            device=counts.device,
        )
        for chunk in range(chunks)
    ]
    return Plan([[sum(peer) for peer in chunk] for chunk in sent], layouts)


class _Take(torch.autograd.Function):
    """Forward rows by index, summed over the index's first dim; backward the same with the transposed index."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, transposed: Tensor) -> Tensor:
        ctx.save_for_backward(index, transposed)
        return sum_rows(rows, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        _, transposed = ctx.saved_tensors
        return sum_rows(gradient, transposed), None, None


def take(rows: Tensor, index: Tensor, transposed: Tensor) -> Tensor:
    """``out[r] = sum_j rows[index[j, r]]`` with a backward that gathers too, so it is deterministic on every device.

    Args:
        rows: ``(R, M)``.
        index: ``(J, R_out)``.
        transposed: ``(I, R)``, for every input row the output rows that read it.
    """
    result: Tensor = _Take.apply(rows, index, transposed)  # type: ignore[no-untyped-call]
    return result


def pick(rows: Tensor, index: Tensor, gaps: bool = False) -> Tensor:
    """``rows[index]``; with ``gaps`` an index of -1 gives zeros."""
    if not gaps:
        return rows.index_select(0, index)
    if not len(rows):
        return rows.new_zeros((len(index), *rows.shape[1:]))
    return rows.index_select(0, index.clamp_min(0)).masked_fill_((index < 0).unsqueeze(1), 0)


def sum_rows(rows: Tensor, index: Tensor, gaps: bool = False) -> Tensor:
    """``sum_j rows[index[j]]``, accumulated in float32."""
    if index.shape[0] == 1:
        return pick(rows, index[0], gaps)
    total = pick(rows, index[0], gaps).to(torch.promote_types(rows.dtype, torch.float32))
    for more in index[1:]:
        total += pick(rows, more, gaps)
    return total.to(rows.dtype)


def ranges(starts: Sequence[int], lengths: Sequence[int], device: torch.device) -> Tensor:
    """``[starts[0], ..., starts[0] + lengths[0] - 1, starts[1], ...]`` as one index tensor.

    Example:
        >>> ranges([7, 0], [2, 3], torch.device("cpu"))
        tensor([7, 8, 0, 1, 2])
    """
    total = sum(lengths)
    shifts = [start - before for start, before in zip(starts, _starts(lengths), strict=True)]
    table = torch.tensor([shifts, list(lengths)], dtype=torch.int64).to(device, non_blocking=True)
    return torch.arange(total, device=device) + table[0].repeat_interleave(table[1], output_size=total)


def _starts(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)][:-1]


def _nested(flat: list[int], shape: tuple[int, int, int]) -> list[list[list[int]]]:
    outer, middle, inner = shape
    rows = [flat[first : first + inner] for first in range(0, outer * middle * inner, inner)]
    return [rows[first : first + middle] for first in range(0, outer * middle, middle)]
