"""Blocks of many micro-batches, read ahead in this process or by workers, in the sources' own integer type.

One micro-batch a message would drown in what a message between processes costs, so workers fill blocks in memory that
they share with the main process, which cuts and widens them. The blocks are few and used again and again: fresh shared
memory for every block costs more than to fill it.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_parm.data.mixture import Mixture
from lightning_parm.data.order import Int64, Marks, Order
from lightning_parm.data.schedule import Segments
from lightning_parm.data.sources.format import Tokens

_BLOCK_TOKENS = 1 << 20
_AHEAD = 2  # blocks that each worker reads ahead


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
    ``number`` counts the requests.
    """

    number: int
    version: int
    first: int
    count: int
    segments: Segments


class Blocks:
    """Memory for a few blocks; request after request takes the next of them, and after the last the first again.

    Args:
        order: what fills them.
        marked: whether tokens that start a document are to be marked.
        rows: samples of the largest block.
        count: blocks.
        shared: whether other processes fill them.
    """

    def __init__(self, order: Order, marked: bool, rows: int, count: int, shared: bool) -> None:
        shape = (count, rows, order.width)
        dtype = torch.from_numpy(np.empty(0, dtype=order.dtype)).dtype
        self._tokens = torch.empty(shape, dtype=dtype)
        self._marks = torch.empty(shape if order.has_marks(marked) else 0, dtype=torch.uint8)
        if shared:
            self._tokens.share_memory_()
            self._marks.share_memory_()

    def of(self, request: Request, samples: Int64) -> tuple[Tokens, Marks | None]:
        """Return the tokens and marks (N, L + 1) of a request's samples (N,)."""
        place = request.number % len(self._tokens), slice(len(samples))
        return self._tokens[place].numpy(), self._marks[place].numpy() if len(self._marks) else None


class _Reader(Dataset[Request]):
    """Fills blocks as requested; a map-style data set whose indices are requests, so torch's workers can serve it."""

    def __init__(self, order: Order, steps: Steps, blocks: Blocks) -> None:
        self.order = order
        self.steps = steps
        self.blocks = blocks
        self.mixture: Mixture | None = None

    def __getitem__(self, request: Request) -> Request:
        if self.mixture is None or self.mixture.segments != request.segments:
            self.mixture = Mixture(request.segments, self.order.num_lanes, self.mixture)
        samples = self.steps.samples(request.first, request.count)
        self.order.read_into(samples, self.mixture, *self.blocks.of(request, samples))
        return request


class _Plan:
    """The requests to come. It knows no reader, so that dropping a reader ends its workers at once."""

    def __init__(self, start: int, stride: int, largest: int, segments: Segments) -> None:
        self.number = 0
        self.version = 0
        self.start = start
        self.count = 1
        self.segments = segments
        self._stride = stride
        self._largest = largest

    def __iter__(self) -> Iterator[Request]:
        while True:  # small blocks first, so that the first batch comes at once
            request = Request(self.number, self.version, self.start, self.count, self.segments)
            self.number += 1
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
        remote = any(source is not None and source.is_remote for source in order.sources)
        # the one in use, and what is in flight: torch asks each worker for two in advance
        count = 1 + (_AHEAD * num_workers if num_workers else remote)
        self._blocks = Blocks(order, marked, largest * steps.batch_size, count, num_workers > 0)
        reader = _Reader(order, steps, self._blocks)
        self._results: Iterator[Request]
        if num_workers:
            self._results = _from_workers(reader, self._plan, num_workers)
        elif remote:
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
        request = next(self._results)
        while request.version != self._plan.version:
            request = next(self._results)
        self.wait_seconds += time.perf_counter() - began
        samples = self._steps.samples(request.first, request.count)
        self._block, self._row = (samples, *self._blocks.of(request, samples)), 0


def _from_workers(reader: _Reader, plan: _Plan, num_workers: int) -> Iterator[Request]:
    """Read the first block here, so that the first batch need not wait for processes to start, and the rest there."""
    yield reader[next(iter(plan))]
    # Its own generator: seeding the workers must not draw from the user's global one.
    yield from DataLoader(
        reader,
        batch_size=None,
        sampler=plan,
        num_workers=num_workers,
        prefetch_factor=_AHEAD,
        generator=torch.Generator(),
    )


def _one_ahead(reader: _Reader, plan: _Plan) -> Iterator[Request]:
    """Read the next block in a thread while this one is used: the network works while the training does."""
    requests = iter(plan)
    with ThreadPoolExecutor(max_workers=1) as pool:
        pending = pool.submit(reader.__getitem__, next(requests))
        while True:
            request = pending.result()
            pending = pool.submit(reader.__getitem__, next(requests))
            yield request
