"""An iterable of token batches for plain loops, for Fabric and inside torch's DataLoader."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from lightning_parm.data.batches import Batch, BatchMaker
from lightning_parm.data.blocks import BlockReader, Steps
from lightning_parm.data.mixture import Mixture
from lightning_parm.data.order import Exhaustion, Order, Samples
from lightning_parm.data.schedule import Knots, Mix, Plans, Segments, as_knots, limit, pack, segments_of, unpack
from lightning_parm.data.sources.cache import DEFAULT_LIMIT_BYTES
from lightning_parm.data.sources.format import Format
from lightning_parm.data.sources.registry import open_sources
from lightning_parm.data.sources.source import Source
from lightning_parm.data.state import VERSION, check_order, check_sources, digest, mix_digest

log = logging.getLogger(__name__)

_ENDLESS = 1 << 62


class TokenLoader(IterableDataset[Batch]):
    """Batches of token windows in a global order that no number of ranks, workers or samples a batch can change.

    Every ``iter()`` starts an epoch of ``len(loader)`` batches where the stream stands (the stream never goes back);
    the first one after :meth:`load_state_dict` finishes the epoch that was interrupted.

    Args:
        sources: a path (file, folder, pattern or URL) or ``{name: path}``.
        sequence_length: L, tokens a sample.
        batch_size: B, samples this rank takes a step.
        rank: this rank among the data-parallel ranks.
        size: number of data-parallel ranks.
        weights: share of each source in the samples, ``{name: weight}``, or a schedule ``[(tokens, {name: weight})]``
            with straight lines between its entries; ``None`` is in proportion to the sources' sizes.
        delimiter: token put between documents; ``None`` takes what the files say, if they say anything.
        seed: another seed is another order.
        num_logical_shards: K, a power of two, fixed for the life of a run.
        num_workers: processes that read ahead.
        shuffle: ``False`` keeps the order of the files.
        samples: ``"windows"`` of packed documents, or ``"documents"``, one a sample, cut or padded.
        at_exhaustion: when a source has been served once: ``"repeat"`` it in another order, ``"stop"`` the stream, or
            ``"drop"`` the source and go on with the others.
        document_ids: add ``document_ids`` (B, L), which count the documents in each sample.
        position_ids: add ``position_ids`` (B, L), which start again at 0 with every document.
        mask_document_starts: label ``-100`` where the next token is the first of another document.
        transform: called with every sample before collation.
        collate: makes a batch of a list of samples; ``None`` stacks them.
        pin_memory: page-locked batches; ``None`` pins where there is a CUDA device.
        bad_files: ``"raise"`` or ``"skip"`` files that cannot be read.
        format: name of a format, ``"package.module.Class"`` of one of yours, or an object; ``None`` detects it.
        dtype: integer type of raw files, which cannot say it themselves.
        cache_folder: where indices, fetched and decoded parts are kept; ``None`` is ``~/.cache/lightning_parm``.
        cache_bytes: limit of the fetched and decoded parts.
        bos: token put before every document that does not begin with it.
        min_document_length: documents of fewer tokens, delimiter and ``bos`` not counted, are left out.

    Yields:
        ``input_ids`` (B, L) int64, ``labels`` (B, L) int64 (the next tokens) and ``sample_index`` (B,) int64.

    Raises:
        ValueError: an argument is out of range, a path leads nowhere, or a source is smaller than one sample.
    """

    def __init__(
        self,
        sources: str | Mapping[str, str],
        sequence_length: int,
        batch_size: int,
        rank: int = 0,
        size: int = 1,
        weights: Mix | None = None,
        delimiter: int | None = None,
        seed: int = 0,
        num_logical_shards: int = 1024,
        num_workers: int = 0,
        shuffle: bool = True,
        samples: Samples = "windows",
        at_exhaustion: Exhaustion = "repeat",
        document_ids: bool = False,
        position_ids: bool = False,
        mask_document_starts: bool = False,
        transform: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        collate: Callable[[list[dict[str, Any]]], Any] | None = None,
        pin_memory: bool | None = None,
        bad_files: str = "raise",
        format: str | Format | None = None,
        dtype: str | None = None,
        cache_folder: str | None = None,
        cache_bytes: int = DEFAULT_LIMIT_BYTES,
        bos: int | None = None,
        min_document_length: int = 1,
    ) -> None:
        super().__init__()
        _check_positive(sequence_length=sequence_length, batch_size=batch_size, num_logical_shards=num_logical_shards)
        if num_logical_shards & (num_logical_shards - 1):
            raise ValueError(f"num_logical_shards={num_logical_shards} is not a power of two, such as 1024.")
        if not 0 <= rank < size:
            raise ValueError(f"rank={rank} is not below size={size}: ranks count from 0.")
        self.batch_size = batch_size
        self.rank = rank
        self.size = size
        self.num_workers = num_workers
        self.sources: list[Source] = open_sources(
            sources, delimiter, bad_files, format, dtype, cache_folder, cache_bytes, bos, min_document_length
        )
        self._documents: dict[str, Any] = {"bos": bos, "min_document_length": min_document_length}
        self._order_arguments: dict[str, Any] = {
            "sequence_length": sequence_length,
            "num_logical_shards": num_logical_shards,
            "seed": seed,
            "shuffle": shuffle,
            "samples": samples,
            "at_exhaustion": at_exhaustion,
        }
        pin = torch.cuda.is_available() if pin_memory is None else pin_memory
        self._make = BatchMaker(document_ids, position_ids, mask_document_starts, pin, transform, collate)
        self._samples = 0
        self._epoch_start = 0
        self._interrupted = False
        self._reader: BlockReader | None = None
        self._waited = 0.0
        names = [source.name for source in self.sources]
        if weights is None:
            weights = {source.name: max(float(source.num_tokens), 1.0) for source in self.sources}
        self._configured = as_knots(weights, names, sequence_length)
        self._configured_digest = mix_digest(self._configured, names)
        self._arrange(names, ((0, self._configured),))
        lanes = self.order.num_lanes
        if rank == 0 and size > 1 and lanes > 1 and samples == "windows" and lanes % self.samples_per_step:
            log.warning(
                "size * batch_size = %d does not divide num_logical_shards = %d, so ranks share logical shards: "
                "every sample still comes once, but files are read by several ranks.",
                self.samples_per_step,
                lanes,
            )

    @property
    def samples_per_step(self) -> int:
        """Samples of one global micro-batch: of all data-parallel ranks together."""
        return self.batch_size * self.size

    @property
    def samples_per_epoch(self) -> int:
        """Samples in all sources that the mix serves now, each counted once."""
        if self._end < _ENDLESS:
            return self._end
        weights = self.weights().values()
        return sum(count for count, weight in zip(self.order.count(once=False), weights, strict=True) if weight)

    @property
    def exhausted(self) -> bool:
        """Whether the sources have no whole step of samples left."""
        return self._samples + self.samples_per_step > self._end

    @property
    def wait_seconds(self) -> float:
        """Seconds that this process has waited for data."""
        return self._waited + (self._reader.wait_seconds if self._reader else 0.0)

    def __len__(self) -> int:
        """Return the batches of one epoch."""
        return max(1, self.samples_per_epoch // self.samples_per_step)

    def __iter__(self) -> Iterator[Batch]:
        remaining = self.samples_per_epoch - (self._samples - self._epoch_start)
        if self._interrupted and remaining > 0:
            batches = -(-remaining // self.samples_per_step)
        else:
            self._epoch_start, batches = self._samples, len(self)
        self._interrupted = False
        batches = min(batches, (self._end - self._samples) // self.samples_per_step)
        worker = get_worker_info()
        if worker is not None:  # a copy in a worker of torch's DataLoader, which asks its workers in turn
            return self._every(worker.id, worker.num_workers, batches)
        return (self.next_batch() for _ in range(batches))

    def next_batch(self) -> Batch:
        """Return this rank's part of the next global micro-batch and move on.

        Raises:
            StopIteration: the sources have run out.
        """
        if self.exhausted:
            raise StopIteration
        if self._reader is None:
            self._reader = self._read(self._samples, self.samples_per_step, self.num_workers)
        batch: Batch = self._make(*self._reader.next())
        self._samples += self.samples_per_step
        return batch

    def seek(self, samples: int) -> None:
        """Make sample ``samples`` the next one; what was read ahead is kept when it already is."""
        if samples != self._samples:
            self.close()
            self._samples = samples

    def close(self) -> None:
        """End the processes that read ahead; the next batch starts others."""
        if self._reader is not None:
            self._reader.close()
            self._waited += self._reader.wait_seconds
            self._reader = None

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Change the mix from the next batch on, in place of whatever was planned. Call it on every rank alike.

        Raises:
            ValueError: a source is unknown or missing, or no weight is positive.
        """
        knots = as_knots(weights, [source.name for source in self.sources], self.order.width - 1)
        self._plan(self._samples, knots)
        if self._reader is not None:
            self._reader.change(self._samples + self.rank * self.batch_size, self._segments)

    def weights(self, samples: int | None = None) -> dict[str, float]:
        """Return the weight of each source at the next sample; ``samples`` is another position than the loader's."""
        position = self._samples if samples is None else samples
        weights = next(weights for start, weights in reversed(self._segments) if start <= position)
        return dict(zip(self._names, weights, strict=True))

    def served(self, samples: int | None = None) -> dict[str, int]:
        """Return how many samples of each source were consumed; a pure function of the state."""
        counts = self.mixture.served(self._samples if samples is None else samples)
        return dict(zip(self._names, counts, strict=True))

    def epochs(self, samples: int | None = None) -> dict[str, float]:
        """Return how often each source has been served: 1.5 is halfway through its second epoch."""
        sizes = dict(zip(self._names, self.order.count(once=False), strict=True))
        return {name: count / sizes[name] for name, count in self.served(samples).items() if sizes[name]}

    def state_dict(self, samples: int | None = None) -> dict[str, Any]:
        """Return the position as plain, JSON-able values; the same on every rank, taken without communication.

        Args:
            samples: samples consumed, where something outside counts them; ``None`` is what this loader handed out.
        """
        samples = self._samples if samples is None else samples
        fingerprints = {source.name: list(source.fingerprint) for source in self.sources}
        return {
            "version": VERSION,
            "samples": samples,
            "epoch_start": self._epoch_start,
            "order": {**self._order_arguments, **self._documents},
            "sources": {name: fingerprints.get(name) for name in self._names},
            "mix": self._packed,
            "configured": self._configured_digest,
            "digest": self._digest(samples),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken, on any number of ranks and workers and with any batch size.

        Sources may have been added or removed, and the constructor's weights changed: that acts from here on.

        Raises:
            ValueError: the state belongs to other data or another order; the message says what differs.
        """
        check_order(state, {**self._order_arguments, **self._documents})
        check_sources(state["sources"], self.sources)
        samples, own = int(state["samples"]), [source.name for source in self.sources]
        old = state["sources"]
        names = [*old, *(name for name in own if name not in old)]
        added = (0.0,) * (len(names) - len(old))
        plans = unpack(state["mix"])
        self._arrange(names, tuple((at, tuple((k, (*w, *added)) for k, w in knots)) for at, knots in plans))
        changed = set(own) != {name for name in old if old[name]} or state["configured"] != self._configured_digest
        if changed:
            self._plan(samples, self._configured)
        now = None if changed else self._digest(samples)
        if now is not None and state["digest"] not in (None, now):
            raise ValueError(
                f"The tokens of a sample shortly before the checkpoint (sample {samples}) are not what they were: "
                f"files have changed in place, with as many documents of the same lengths. Restore them as they were."
            )
        self._samples, self._epoch_start, self._interrupted = samples, int(state["epoch_start"]), True

    def _arrange(self, names: Sequence[str], plans: Plans) -> None:
        """Take a list of sources, which only grows over a run, and a mix of them."""
        by_name = {source.name: source for source in self.sources}
        self._names = list(names)
        self.order = Order([by_name.get(name) for name in names], **self._order_arguments)
        self._plans = plans
        self.close()
        self._resolve()

    def _plan(self, samples: int, knots: Knots) -> None:
        """Put a mix of this loader's own sources in force from ``samples`` on."""
        own = {source.name: number for number, source in enumerate(self.sources)}
        wide = tuple((at, tuple(w[own[n]] if n in own else 0.0 for n in self._names)) for at, w in knots)
        self._plans = (*(plan for plan in self._plans if plan[0] < samples), (samples, wide))
        self._resolve()

    def _resolve(self) -> None:
        self._packed = pack(self._plans)
        self._segments: Segments = segments_of(self._plans)
        self._end = _ENDLESS
        policy = self._order_arguments["at_exhaustion"]
        if policy != "repeat":
            self._segments, self._end = limit(self._segments, self.order.count(once=True), policy)
        lanes = self.order.num_lanes
        # Two, because what one has counted helps only with later samples.
        self.mixture = Mixture(self._segments, lanes, getattr(self, "mixture", None))
        self._digest_mixture = Mixture(self._segments, lanes, getattr(self, "_digest_mixture", None))
        self._digested: tuple[int, str] = -1, ""

    def _digest(self, samples: int) -> str | None:
        """Return a digest of the tokens of a recent sample, or nothing where reading it would use a network.

        It is the last one of the first lane: of a single lane, the counts need only be continued.
        """
        if samples < 1 or any(source.is_remote for source in self.sources):
            return None
        recent = (samples - 1) // self.order.num_lanes * self.order.num_lanes
        if self._digested[0] != recent:
            self._digested = recent, digest(self.order.read(np.array([recent]), self._digest_mixture)[0])
        return self._digested[1]

    def _read(self, start: int, stride: int, num_workers: int) -> BlockReader:
        steps = Steps(self.batch_size, stride)
        first = start + self.rank * self.batch_size
        return BlockReader(self.order, steps, self._make.needs_marks, num_workers, first, self._segments)

    def _every(self, number: int, count: int, batches: int) -> Iterator[Batch]:
        """Yield batches ``number``, ``number + count``, ... of the ``batches`` to come."""
        reader = self._read(self._samples + number * self.samples_per_step, count * self.samples_per_step, 0)
        for _ in range(number, batches, count):
            yield self._make(*reader.next())


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
