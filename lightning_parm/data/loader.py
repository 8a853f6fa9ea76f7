"""An iterable of token batches for plain loops, for Fabric and inside torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from lightning_parm.data.blocks import BlockReader, Segments
from lightning_parm.data.mixture import Mixture
from lightning_parm.data.order import Order
from lightning_parm.data.sources.registry import open_sources
from lightning_parm.data.state import check_state, describe

Batch = dict[str, torch.Tensor]


class TokenLoader(IterableDataset[Batch]):
    """Batches of token windows in a global order that no number of ranks, workers or samples a batch can change.

    Every ``iter()`` starts an epoch of ``len(loader)`` batches where the stream stands (the stream never goes back);
    the first one after :meth:`load_state_dict` finishes the epoch that was interrupted.

    Args:
        sources: a path (file, folder or pattern) or ``{name: path}``.
        sequence_length: L, tokens a sample.
        batch_size: B, samples this rank takes a step.
        rank: this rank among the data-parallel ranks.
        size: number of data-parallel ranks.
        weights: share of each source in the tokens served; ``None`` is in proportion to their sizes.
        delimiter: token put between documents; ``None`` takes what the files say, if they say anything.
        seed: another seed is another order.
        num_logical_shards: K, a power of two, fixed for the life of a run.
        num_workers: processes that read ahead.
        shuffle: ``False`` keeps the order of the files.
        bad_files: what to do with a file that cannot be read.

    Yields:
        ``input_ids`` (B, L) int64, ``labels`` (B, L) int64 (the next tokens) and ``sample_index`` (B,) int64.

    Raises:
        ValueError: an argument is out of range, a path leads nowhere, or a source is smaller than one window.
    """

    def __init__(
        self,
        sources: str | dict[str, str],
        sequence_length: int,
        batch_size: int,
        rank: int = 0,
        size: int = 1,
        weights: dict[str, float] | None = None,
        delimiter: int | None = None,
        seed: int = 0,
        num_logical_shards: int = 1024,
        num_workers: int = 0,
        shuffle: bool = True,
        bad_files: str = "raise",
    ) -> None:
        super().__init__()
        _check_positive(sequence_length=sequence_length, batch_size=batch_size, num_logical_shards=num_logical_shards)
        if num_logical_shards & (num_logical_shards - 1):
            raise ValueError(f"num_logical_shards={num_logical_shards} is not a power of two, such as 1024.")
        if not 0 <= rank < size:
            raise ValueError(f"rank={rank} is not below size={size}: ranks count from 0.")
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.rank = rank
        self.size = size
        self.seed = seed
        self.num_logical_shards = num_logical_shards
        self.num_workers = num_workers
        self.sources = open_sources(sources, delimiter, bad_files)
        self.order = Order(self.sources, sequence_length, num_logical_shards, seed, shuffle)
        self._segments: Segments = ((0, self._as_weights(weights)),)
        self._samples = 0
        self._epoch_start = 0
        self._interrupted = False
        self._reader: BlockReader | None = None

    @property
    def samples_per_epoch(self) -> int:
        """Windows in all sources that the mix serves, each counted once."""
        weights = self._segments[-1][1]
        return sum(
            windows.windows_per_epoch() * windows.num_shards
            for windows, weight in zip(self.order.windows, weights, strict=True)
            if weight
        )

    def __len__(self) -> int:
        """Return the batches of one epoch."""
        return max(1, self.samples_per_epoch // (self.batch_size * self.size))

    def __iter__(self) -> Iterator[Batch]:
        remaining = self.samples_per_epoch - (self._samples - self._epoch_start)
        resumed = self._interrupted and remaining > 0
        self._interrupted = False
        if resumed:
            batches = -(-remaining // (self.batch_size * self.size))
        else:
            self._epoch_start, batches = self._samples, len(self)
        return (self.next_batch() for _ in range(batches))

    def next_batch(self) -> Batch:
        """Return this rank's part of the next global micro-batch and move on."""
        if self._reader is None:
            self._reader = BlockReader(
                self.order, self.batch_size, self.rank, self.size, self.num_workers, self._samples, self._segments
            )
        samples, tokens = self._reader.next()
        self._samples += self.batch_size * self.size
        return {
            "input_ids": _widen(tokens[:, :-1]),
            "labels": _widen(tokens[:, 1:]),
            "sample_index": torch.from_numpy(samples.copy()),
        }

    def seek(self, samples: int) -> None:
        """Make sample ``samples`` the next one; blocks read ahead are kept when it already is."""
        if samples != self._samples:
            self._samples = samples
            self._reader = None

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Change the mix from the next batch on. Call it on every rank alike.

        Raises:
            ValueError: a source is unknown or missing, or no weight is positive.
        """
        new = self._as_weights(dict(weights))
        kept = tuple(segment for segment in self._segments if segment[0] < self._samples)
        self._segments = (*kept, (self._samples, new))
        if self._reader is not None:
            self._reader.change(self._samples, self._segments)

    @property
    def mixture(self) -> Mixture:
        """The mix so far and from here on."""
        return Mixture(self._segments, self.order.num_lanes)

    def served(self, samples: int | None = None) -> dict[str, int]:
        """Return how many samples of each source were consumed; a pure function of the state."""
        counts = self.mixture.served(self._samples if samples is None else samples)
        return dict(zip((source.name for source in self.sources), counts, strict=True))

    def state_dict(self, samples: int | None = None) -> dict[str, Any]:
        """Return the position as plain, JSON-able values; the same on every rank, taken without communication.

        Args:
            samples: samples consumed, where something outside counts them; ``None`` is what this loader handed out.
        """
        return {
            "version": 1,
            "samples": self._samples if samples is None else samples,
            "epoch_start": self._epoch_start,
            "mix": [[start, list(weights)] for start, weights in self._segments],
            **describe(self),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken, on any number of ranks and workers and with any batch size.

        Raises:
            ValueError: the state belongs to other data or another order; the message says what differs.
        """
        check_state(self, state)
        self._segments = tuple((int(start), tuple(weights)) for start, weights in state["mix"])
        self._samples = int(state["samples"])
        self._epoch_start = int(state["epoch_start"])
        self._interrupted = True
        self._reader = None

    def _as_weights(self, weights: dict[str, float] | None) -> tuple[float, ...]:
        names = [source.name for source in self.sources]
        if weights is None:
            return tuple(float(source.num_tokens) for source in self.sources)
        if set(weights) != set(names):
            raise ValueError(f"weights name {sorted(weights)}, but the sources are {sorted(names)}: give one of each.")
        if min(weights.values()) < 0 or max(weights.values()) <= 0:
            raise ValueError(f"weights={weights}: none may be negative and one must be positive.")
        return tuple(float(weights[name]) for name in names)


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")


def _widen(tokens: Any) -> torch.Tensor:
    wide = np.empty(tokens.shape, dtype=np.int64)
    wide[...] = tokens
    return torch.from_numpy(wide)
