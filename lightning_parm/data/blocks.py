"""Blocks of many micro-batches, read ahead in this process or by workers, in the sources' own integer type.

One micro-batch a message would drown in what a message between processes costs, so workers send blocks and the main
process cuts and widens them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_parm.data.mixture import Mixture
from lightning_parm.data.order import Order
from lightning_parm.data.sources.format import Int64, Tokens

Segments = tuple[tuple[int, tuple[float, ...]], ...]

_BLOCK_TOKENS = 1 << 20


@dataclass(frozen=True)
class Request:
    """Which samples a block holds: those of one rank in ``count`` global micro-batches from sample ``first`` on.

    ``version`` counts the changes of the mix, so that blocks asked for before a change are recognised and dropped.
    """

    version: int
    first: int
    count: int
    segments: Segments


class _Reader(Dataset[tuple[Request, torch.Tensor]]):
    """Turns requests into blocks; a map-style data set whose indices are requests, so torch's workers can serve it."""

    def __init__(self, order: Order, batch_size: int, rank: int, size: int) -> None:
        self.order = order
        self.batch_size = batch_size
        self.rank = rank
        self.size = size
        self.mixture: Mixture | None = None

    def samples(self, request: Request) -> Int64:
        """Return the numbers of the samples in a block, (count * batch_size,)."""
        starts = request.first + (np.arange(request.count) * self.size + self.rank) * self.batch_size
        return (starts[:, None] + np.arange(self.batch_size)).reshape(-1)

    def __getitem__(self, request: Request) -> tuple[Request, torch.Tensor]:
        if self.mixture is None or self.mixture.segments != request.segments:
            self.mixture = Mixture(request.segments, self.order.num_lanes, self.mixture)
        return request, torch.from_numpy(self.order.read(self.samples(request), self.mixture))


class _Plan:
    """The requests to come. It knows no reader, so that dropping a reader ends its workers at once."""

    def __init__(self, start: int, stride: int, largest: int, segments: Segments) -> None:
        self.version = 0
        self.start = start
        self.count = 1
        self.segments = segments
        self._stride = stride
        self._largest = largest

    def __iter__(self) -> Iterator[Request]:
        while True:  # small blocks first, so that the first batch comes at once
            request = Request(self.version, self.start, self.count, self.segments)
            self.start += self.count * self._stride
            self.count = min(2 * self.count, self._largest)
            yield request


class BlockReader:
    """Hands out micro-batches in order and lets the mix change between any two of them.

    Args:
        order: the global order.
        batch_size: samples a rank takes from each global micro-batch.
        rank: this rank among ``size`` data-parallel ranks.
        size: number of data-parallel ranks.
        num_workers: processes that read ahead; 0 reads in this process.
        start: first sample of the next global micro-batch.
        segments: the mix.
    """

    def __init__(
        self, order: Order, batch_size: int, rank: int, size: int, num_workers: int, start: int, segments: Segments
    ) -> None:
        self._reader = _Reader(order, batch_size, rank, size)
        self._batch_size = batch_size
        largest = max(1, _BLOCK_TOKENS // (order.width * batch_size))
        self._plan = _Plan(start, batch_size * size, largest, segments)
        self._tokens: Tokens = np.empty((0, 0))
        self._samples: Int64 = np.empty(0, dtype=np.int64)
        self._row = 0
        self._results: Iterator[tuple[Request, torch.Tensor]]
        if num_workers:
            # Its own generator: seeding the workers must not draw from the user's global one.
            loader: DataLoader[Any] = DataLoader(
                self._reader,
                batch_size=None,
                sampler=self._plan,
                num_workers=num_workers,
                collate_fn=_as_it_is,
                generator=torch.Generator(),
            )
            self._results = iter(loader)
        else:
            self._results = map(self._reader.__getitem__, self._plan)

    def change(self, start: int, segments: Segments) -> None:
        """Go on at sample ``start`` with another mix; what was read ahead is dropped."""
        plan = self._plan
        plan.version, plan.start, plan.count, plan.segments = plan.version + 1, start, 1, segments
        self._row = len(self._tokens)

    def next(self) -> tuple[Int64, Tokens]:
        """Return the sample numbers (B,) and the tokens (B, L + 1) of the next micro-batch of this rank."""
        if self._row == len(self._tokens):
            request, block = next(self._results)
            while request.version != self._plan.version:
                request, block = next(self._results)
            self._tokens, self._samples, self._row = block.numpy(), self._reader.samples(request), 0
        rows = slice(self._row, self._row + self._batch_size)
        self._row += self._batch_size
        return self._samples[rows], self._tokens[rows]


def _as_it_is(block: Any) -> Any:
    return block
