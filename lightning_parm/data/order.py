"""Sample index -> (source, logical shard, window), and reading it: the whole order as a pure function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lightning_parm.data.documents import Documents
from lightning_parm.data.mixture import Mixture
from lightning_parm.data.shards import count_shards
from lightning_parm.data.shuffle import name_key
from lightning_parm.data.sources.format import Tokens
from lightning_parm.data.sources.source import Source
from lightning_parm.data.windows import Windows

Int64 = npt.NDArray[np.int64]
Marks = npt.NDArray[np.uint8]
Samples = Literal["windows", "documents"]
Exhaustion = Literal["repeat", "stop", "drop"]

CONTINUES, STARTS, PADS = 0, 1, 2
"""Marks of tokens: goes on with the document before it, starts a document, is no token of the data."""


class Order:
    """The global order of samples over all sources.

    ``sample(i)`` depends on the sources, the seed, the sequence length, the number of logical shards and the mix;
    never on ranks, workers or batch sizes.

    Args:
        sources: the data sets of the mix; ``None`` for one that a resumed run no longer has.
        sequence_length: L; a sample is L + 1 tokens.
        num_logical_shards: K, a power of two, fixed for the life of a run.
        seed: another seed is another order.
        shuffle: ``False`` keeps the order of the files.
        samples: windows of the packed stream, or one document each.
        at_exhaustion: with ``"repeat"`` the mix runs in K lanes, so that ranks read shards of their own; otherwise in
            one, so that a source ends exactly when its last sample is served.
        complete: serve the last window of a source too, padded, for evaluation.

    Raises:
        ValueError: a source is smaller than one sample.
    """

    def __init__(
        self,
        sources: Sequence[Source | None],
        sequence_length: int,
        num_logical_shards: int,
        seed: int,
        shuffle: bool = True,
        samples: Samples = "windows",
        at_exhaustion: Exhaustion = "repeat",
        complete: bool = False,
    ) -> None:
        self.sources = list(sources)
        self.width = sequence_length + 1
        self.num_lanes = num_logical_shards if at_exhaustion == "repeat" else 1
        self.readers: list[Windows | Documents | None] = []
        for source in sources:
            if source is None:
                self.readers.append(None)
                continue
            key = name_key(seed, source.name)
            if samples == "documents":
                _require(source, source.num_documents > 0, "no document with a token in it")
                self.readers.append(Documents(source.ends, self.width, key, shuffle))
            else:
                _require(
                    source,
                    source.num_tokens >= (2 if complete else self.width),
                    f"less than one window of sequence_length + 1 = {self.width}",
                )
                num_shards = count_shards(source.num_tokens, sequence_length, num_logical_shards)
                self.readers.append(
                    Windows(source.ends, source.part_first, sequence_length, num_shards, key, shuffle, complete)
                )
        self._num_shards = np.array([reader.num_shards if reader else 1 for reader in self.readers])
        self.dtype: np.dtype[Any] = np.result_type(*(source.dtype for source in sources if source is not None))
        self._padded = complete or samples == "documents"

    def count(self, once: bool) -> list[int]:
        """Return the samples in one epoch of each source; ``once`` leaves out windows that reach into the next."""
        return [reader.count(once) if reader else 0 for reader in self.readers]

    def locate(self, samples: Int64, mixture: Mixture) -> tuple[Int64, Int64, Int64]:
        """Return source, logical shard and window of each sample (N,)."""
        source, ticket = mixture.choose(samples)
        return source, ticket % self._num_shards[source], ticket // self._num_shards[source]

    def read(self, samples: Int64, mixture: Mixture, marked: bool = False) -> tuple[Tokens, Marks | None]:
        """Return the tokens of the samples, (N, L + 1) in the sources' own integer type, and what each of them is.

        The marks (N, L + 1) uint8 are left out where nobody asks for them and no token is padding.
        """
        shape = (len(samples), self.width)
        out = np.empty(shape, dtype=self.dtype)
        marks = np.empty(shape, dtype=np.uint8) if self.has_marks(marked) else None
        self.read_into(samples, mixture, out, marks)
        return out, marks

    def has_marks(self, marked: bool) -> bool:
        """Return whether :meth:`read` marks tokens: where somebody asks, and where some of them are padding."""
        return marked or self._padded

    def read_into(self, samples: Int64, mixture: Mixture, out: Tokens, marks: Marks | None) -> None:
        """As :meth:`read`, into arrays (N, L + 1) that may hold anything."""
        if self._padded:
            out.fill(0)
        if marks is not None:
            marks.fill(PADS if self._padded else CONTINUES)
        sources, shards, windows = self.locate(samples, mixture)
        for number in np.unique(sources).tolist():
            rows = np.flatnonzero(sources == number)
            source, reader = self.sources[number], self.readers[number]
            if source is None or reader is None:  # gone since: only a state's digest looks back that far
                out[rows] = 0
                continue
            pieces = reader.pieces(shards[rows], windows[rows])
            source.fill(pieces, rows, out)
            if marks is not None:
                if self._padded:
                    filled = np.bincount(pieces.row, weights=pieces.size, minlength=len(rows)).astype(np.int64)
                    marks[rows] = np.where(np.arange(self.width) < filled[:, None], CONTINUES, PADS)
                marks[rows[pieces.row], pieces.column] = STARTS


def _require(source: Source, holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(
            f"Source {source.name!r} has {source.num_tokens} tokens in {source.num_documents} documents, {what}. "
            f"Add data or shorten sequence_length."
        )
