"""Blocks of many micro-batches, read ahead in this process or by workers, in the sources' own integer type.

One micro-batch a message would drown in what a message between processes costs, so workers send blocks and the main
process cuts and widens them.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_parm.data.mixture import Mixture
from lightning_parm.data.order import Int64, Marks, Order
from lightning_parm.data.schedule import Segments
from lightning_parm.data.sources.format import Tokens

_BLOCK_TOKENS = 1 << 20


@dataclass(frozen=True)
class Steps:
    """Which samples of which global micro-batches are this reader's: ``first + step * stride + [0, batch_size)``."""

    batch_size: int
    stride: int

    def samples(self, first: int, count: int) -> Int64:
        """Return the numbers of the samples of ``count`` micro-batches, (count * batch_size,)."""
        return (first + np.arange(count)[:, None] * self.stride + np.arange(self.batch_size)).reshape(-1)


@dataclass(frozen=True)
class Request:
    """A block to read: ``count`` micro-batches, the first of which starts with sample ``first``.

    ``version`` counts the changes of the mix, so that blocks asked for before a change are recognised and dropped.
    """

    version: int
    first: int
    count: int
    segments: Segments


Block = tuple[Request, torch.Tensor, torch.Tensor | None]


class _Reader(Dataset[Block]):
    """Turns requests into blocks; a map-style data set whose indices are requests, so torch's workers can serve it."""

    def __init__(self, order: Order, steps: Steps, marked: bool) -> None:
        self.order = order
        self.steps = steps
        self.marked = marked
        self.mixture: Mixture | None = None

    def __getitem__(self, request: Request) -> Block:
        if self.mixture is None or self.mixture.segments != request.segments:
            self.mixture = Mixture(request.segments, self.order.num_lanes, self.mixture)
        samples = self.steps.samples(request.first, request.count)
        tokens, marks = self.order.read(samples, self.mixture, self.marked)
        return request, torch.from_numpy(tokens), None if marks is None else torch.from_numpy(marks)


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
        steps: which samples of each global micro-batch to read.
        marked: whether tokens that start a document are to be marked.
        num_workers: processes that read ahead; 0 reads in this process (in a thread, where data comes over a network).
        start: this reader's first sample.
        segments: the mix.

    Attributes:
        wait_seconds: time spent waiting for blocks.
    """

    def __init__(
        self, order: Order, steps: Steps, marked: bool, num_workers: int, start: int, segments: Segments
    ) -> None:
        self.wait_seconds = 0.0
        self._steps = steps
        largest = max(1, _BLOCK_TOKENS // (order.width * steps.batch_size))
        self._plan = _Plan(start, steps.stride, largest, segments)
        self._block: tuple[Int64, Tokens, Marks | None] = (np.empty(0, dtype=np.int64), np.empty((0, 0)), None)
        self._row = 0
        reader = _Reader(order, steps, marked)
        self._results: Iterator[Block]
        if num_workers:
            self._results = _from_workers(reader, self._plan, num_workers)
        elif any(source is not None and source.is_remote for source in order.sources):
            self._results = _one_ahead(reader, self._plan)
        else:
            self._results = map(reader.__getitem__, self._plan)

    def change(self, start: int, segments: Segments) -> None:
        """Go on at sample ``start`` with another mix; what was read ahead is dropped."""
        plan = self._plan
        plan.version, plan.start, plan.count, plan.segments = plan.version + 1, start, 1, segments
        self._row = len(self._block[0])

    def close(self) -> None:
        """End what reads ahead, now: a worker that is left to the garbage collector keeps a process waiting for 5 s."""
        if isinstance(self._results, Generator):
            self._results.close()

    def next(self) -> tuple[Int64, Tokens, Marks | None]:
        """Return sample numbers (B,), tokens (B, L + 1) and marks (B, L + 1) of this reader's next micro-batch."""
        if self._row == len(self._block[0]):
            self._advance()
        samples, tokens, marks = self._block
        rows = slice(self._row, self._row + self._steps.batch_size)
        self._row = rows.stop
        return samples[rows], tokens[rows], None if marks is None else marks[rows]

    def _advance(self) -> None:
        began = time.perf_counter()
        request, tokens, marks = next(self._results)
        while request.version != self._plan.version:
            request, tokens, marks = next(self._results)
        self.wait_seconds += time.perf_counter() - began
        samples = self._steps.samples(request.first, request.count)
        self._block, self._row = (samples, tokens.numpy(), None if marks is None else marks.numpy()), 0


def _from_workers(reader: _Reader, plan: _Plan, num_workers: int) -> Iterator[Block]:
    """Read the first block here, so that the first batch need not wait for processes to start, and the rest there."""
    yield reader[next(iter(plan))]
    # Its own generator: seeding the workers must not draw from the user's global one.
    yield from DataLoader(
        reader,
        batch_size=None,
        sampler=plan,
        num_workers=num_workers,
        collate_fn=_as_it_is,
        generator=torch.Generator(),
    )


def _one_ahead(reader: _Reader, plan: _Plan) -> Iterator[Block]:
    """Read the next block in a thread while this one is used: the network works while the training does."""
    requests = iter(plan)
    with ThreadPoolExecutor(max_workers=1) as pool:
        pending = pool.submit(reader.__getitem__, next(requests))
        while True:
            block = pending.result()
            pending = pool.submit(reader.__getitem__, next(requests))
            yield block


def _as_it_is(block: Any) -> Any:
    return block
