"""Every window of a corpus once, in the order of its files, split over ranks that all take as many steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from lightning_parm.data.batches import Batch, BatchMaker
from lightning_parm.data.mixture import Mixture
from lightning_parm.data.order import PADS, Int64, Order, Samples
from lightning_parm.data.schedule import limit
from lightning_parm.data.sources.registry import open_sources


class EvaluationLoader(IterableDataset[Batch]):
    """A finite loader for validation and tests: deterministic, complete, each sample once over all ranks.

    The last window of a source is padded with the label ``-100``. When the samples do not fill the last step, the last
    two steps share what is left, so that every rank has something to do in each and none waits in a collective for the
    others. Only when there are fewer samples than ranks in those steps does a rank get one row of padding, with
    ``sample_index`` -1.

    Args:
        sources: a path or ``{name: path}``, all of which are read.
        sequence_length: L, tokens a sample.
        batch_size: samples this rank takes a step, at most.
        rank: this rank among the data-parallel ranks.
        size: number of data-parallel ranks.
        samples: ``"windows"`` or ``"documents"``.
        make: turns rows into batches.
        **opening: how to open the sources: ``delimiter``, ``format``, ``dtype``, ``bad_files``, ``cache_folder``.
    """

    def __init__(
        self,
        sources: str | Mapping[str, str],
        sequence_length: int,
        batch_size: int,
        rank: int = 0,
        size: int = 1,
        samples: Samples = "windows",
        make: BatchMaker | None = None,
        **opening: Any,
    ) -> None:
        super().__init__()
        opened = open_sources(sources, **opening)
        self.order = Order(opened, sequence_length, 1, 0, False, samples, "drop", complete=True)
        self.batch_size = batch_size
        self.rank = rank
        self.size = size
        self._make = make or BatchMaker()
        counts = self.order.count(once=True)
        self._segments, self.num_samples = limit(((0, tuple(float(count) for count in counts)),), counts, "drop")

    def __len__(self) -> int:
        """Return the steps, the same on every rank."""
        return -(-self.num_samples // (self.batch_size * self.size))

    def __iter__(self) -> Iterator[Batch]:
        mixture = Mixture(self._segments, self.order.num_lanes)
        for step in range(len(self)):
            samples = self._samples(step)
            if len(samples):
                tokens, marks = self.order.read(samples, mixture, marked=True)
            else:
                samples = np.array([-1])
                tokens = np.zeros((1, self.order.width), dtype=self.order.dtype)
                marks = np.full((1, self.order.width), PADS, dtype=np.uint8)
            yield self._make(samples, tokens, marks)

    def _samples(self, step: int) -> Int64:
        stride, steps = self.batch_size * self.size, len(self)
        shared = min(2, steps) if self.num_samples % stride else 0
        if step < steps - shared:
            return step * stride + self.rank * self.batch_size + np.arange(self.batch_size)
        begin, slots = (steps - shared) * stride, shared * self.size
        slot, left = (step - steps + shared) * self.size + self.rank, self.num_samples - begin
        return np.arange(begin + slot * left // slots, begin + (slot + 1) * left // slots)
