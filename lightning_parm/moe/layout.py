"""Which rows go where: one exchange of counts tells every chunk of a layer how many rows each rank and expert gets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parm.moe.collectives import first_order
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
        if self._in_order:
            return rows
        if self._even:
            return _swapped(rows, len(self.table), len(self.table[0]))
        return take(rows, *self._orders)

    def by_source(self, rows: Tensor) -> Tensor:
        """The inverse of :meth:`by_expert`."""
        if self._in_order:
            return rows
        if self._even:
            return _swapped(rows, len(self.table[0]), len(self.table))
        return take(rows, *reversed(self._orders))

    @property
    def _in_order(self) -> bool:
        """Rows of one source, or for one expert, are sorted by both."""
        return len(self.table) == 1 or len(self.table[0]) == 1

    @cached_property
    def _even(self) -> bool:
        """As many rows from each source for each expert, so that no index has to be made."""
        return len({count for source in self.table for count in source}) == 1

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
        if copies == 1:
            return rows
        if len(set(self.send)) == 1:  # torch, too, sums in float32 whatever the type
            apart = rows.view(len(self.send), 1, self.send[0], rows.shape[1])
            return apart.expand(-1, copies, -1, -1).reshape(copies * len(rows), rows.shape[1])
        return take(rows, *self._copy_orders(copies))

    def folded(self, rows: Tensor, copies: int) -> Tensor:
        """The float32 sum of the copies that came back, the transpose of :meth:`repeated`."""
        if copies == 1:
            return rows
        if len(set(self.send)) == 1:
            return rows.view(len(self.send), copies, self.send[0], rows.shape[1]).sum(1).flatten(0, 1)
        return take(rows, *reversed(self._copy_orders(copies)))

    def _copy_orders(self, copies: int) -> tuple[Tensor, Tensor]:
        if copies not in self._orders_of_copies:
            starts = _starts(self.send)
            repeat = ranges(
                [s for s in starts for _ in range(copies)], [n for n in self.send for _ in range(copies)], self.device
            )
            # copy c of a destination's row r, which is the r'th of all, lies (copies - 1) s + c n rows behind it
            shifts = [[(copies - 1) * s + c * n for s, n in zip(starts, self.send, strict=True)] for c in range(copies)]
            table = torch.tensor([*shifts, list(self.send)]).to(self.device, non_blocking=True)
            rows = sum(self.send)
            fold = table[:-1].repeat_interleave(table[-1], dim=1, output_size=rows)
            self._orders_of_copies[copies] = repeat.unsqueeze(0), fold + torch.arange(rows, device=self.device)
        return self._orders_of_copies[copies]

    @cached_property
    def _orders_of_copies(self) -> dict[int, tuple[Tensor, Tensor]]:
        return {}


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
    """Tell every rank of the block how many rows it will get; on CUDA the host waits for the counts.

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


def _swapped(rows: Tensor, outer: int, inner: int) -> Tensor:
    """Rows ``(outer * inner * n, M)`` in the order of ``(inner, outer, n)``."""
    n = len(rows) // (outer * inner)
    return rows.view(outer, inner, n, rows.shape[1]).transpose(0, 1).reshape(rows.shape)


class _Take(torch.autograd.Function):
    """Forward rows by index, summed over the index's first dim; backward the same with the transposed index."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, transposed: Tensor) -> Tensor:
        ctx.save_for_backward(index, transposed)
        return sum_rows(rows, index)

    @staticmethod
    @first_order
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


def pick(rows: Tensor, at: Tensor, missing: Tensor | None = None) -> Tensor:
    """``rows[at]``, in memory of its own; zeros where ``missing``, ``(len(at), 1)``."""
    if missing is None:
        return rows.index_select(0, at)
    if not len(rows):
        return rows.new_zeros((len(at), *rows.shape[1:]))
    picked = rows.index_select(0, at)
    if rows.device.type == "cpu":  # where a mask over wide rows takes several times as long as picking them
        return picked.index_fill_(0, missing.squeeze(-1).nonzero().squeeze(-1), 0)
    return picked.masked_fill_(missing, 0)


def sum_rows(rows: Tensor, at: Tensor, missing: Tensor | None = None) -> Tensor:
    """``sum_j rows[at[j]]``, accumulated in float32; nothing is added where ``missing``, ``(*at.shape, 1)``."""
    first, *more = zip(at, each(missing, at), strict=True)
    total = pick(rows, *first)
    if not more:
        return total
    total = total.to(torch.promote_types(rows.dtype, torch.float32))
    for places in more:
        total += pick(rows, *places)
    return total.to(rows.dtype)


def each(missing: Tensor | None, at: Tensor) -> Iterable[Tensor | None]:
    """A mask for each row of ``at``, or as many times ``None``."""
    return [None] * len(at) if missing is None else missing


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
