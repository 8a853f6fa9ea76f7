"""One named data set of a mix: its documents, and reading stretches of them."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from lightning_parm.data.pieces import Pieces
from lightning_parm.data.sources.cache import DiskCache
from lightning_parm.data.sources.files import selected_rows
from lightning_parm.data.sources.format import Format, Int64, Tokens, map_tokens
from lightning_parm.data.sources.index import SourceIndex
from lightning_parm.data.sources.places import LocalPlace, Place, RemotePlace

_FETCHES_AT_ONCE = 16


class Source:
    """The documents of a source as the loader sees them: without empty ones, each closed by the delimiter.

    A document that ends with the delimiter already is not given a second one.

    Attributes:
        name: the source's name in the mix.
        delimiter: the token after each document, or ``None``.
        kept: (D,) tokens of each document without its delimiter.
        ends: (D + 1,) running sum of the delimited lengths.
        part_first: (P + 1,) first document of each part of a file.
        dtype: the smallest integer type that holds the tokens of all files.
        index: where everything lies, and which files were skipped.
    """

    def __init__(
        self, name: str, place: Place, format_: Format, index: SourceIndex, delimiter: int | None, cache: DiskCache
    ) -> None:
        self.name = name
        self.place = place
        self.format = format_
        self.index = index = _select(index, place)
        self.delimiter = index.delimiter if delimiter is None else delimiter
        closed = index.last == self.delimiter if self.delimiter is not None else np.zeros(len(index.last), dtype=bool)
        lengths = index.lengths - closed
        chosen = lengths > 0
        self.kept: Int64 = lengths[chosen]
        self.ends: Int64 = np.concatenate([[0], np.cumsum(self.kept + (self.delimiter is not None))]).astype(np.int64)
        self.part_first: Int64 = np.concatenate([[0], np.cumsum(chosen)])[index.part_first].astype(np.int64)
        self.dtype: np.dtype[Any] = np.result_type(*(index.dtypes or ("uint16",)))
        if self.delimiter is not None and self.delimiter > np.iinfo(self.dtype).max:
            self.dtype = np.dtype(np.int64)
        self._positions: Int64 = index.positions[chosen]
        self._cache = cache
        self._tokens: dict[int, Tokens] = {}
        self._start = np.zeros(len(index.part_file), dtype=np.int64)
        if self.is_remote and not format_.decodes_parts:  # a fetched part holds its own stretch of the file only
            first = index.positions[np.minimum(index.part_first[:-1], len(index.positions) - 1)]
            self._start = first if len(index.positions) else self._start

    @property
    def is_remote(self) -> bool:
        """Whether the files come over a network."""
        return isinstance(self.place, RemotePlace)

    @property
    def num_tokens(self) -> int:
        """Tokens with their delimiters."""
        return int(self.ends[-1])

    @property
    def num_documents(self) -> int:
        """Documents with at least one token."""
        return len(self.kept)

    @cached_property
    def fingerprint(self) -> tuple[int | str, ...]:
        """Files, documents, tokens, and digests of the file names and of the document lengths, in order.

        The folder is left out: data may be moved.
        """
        names = hashlib.blake2b("\n".join(self.index.names).encode(), digest_size=4).hexdigest()
        shape = hashlib.blake2b(self.ends.tobytes() + self.part_first.tobytes(), digest_size=4).hexdigest()
        return len(self.index.names), self.num_documents, self.num_tokens, names, shape

    def fill(self, pieces: Pieces, rows: Int64, out: Tokens) -> None:
        """Copy pieces of documents into ``out`` (N, L + 1); ``rows`` says which row each asked window is."""
        width, flat = out.shape[1], out.reshape(-1)
        place = rows[pieces.row] * width + pieces.column
        stop = pieces.start + pieces.size
        kept = self.kept[pieces.document]
        parts = np.searchsorted(self.part_first, pieces.document, side="right") - 1
        begin = self._positions[pieces.document] + pieces.start - self._start[parts]
        counts = np.minimum(stop, kept) - pieces.start
        tokens = self._open(np.unique(parts))
        for part, first, count, target in zip(
            parts.tolist(), begin.tolist(), counts.tolist(), place.tolist(), strict=True
        ):
            flat[target : target + count] = tokens[part][first : first + count]
        if self.delimiter is not None:
            flat[(place + pieces.size - 1)[stop > kept]] = self.delimiter

    def part_tokens(self, part: int) -> Tokens:
        """Return the tokens of all documents of one part of a file, as they lie there."""
        inside = slice(self.index.part_first[part], self.index.part_first[part + 1])
        starts = self.index.positions[inside] - self._start[part]
        stops = starts + self.index.lengths[inside]
        held = self._open(np.array([part]))[part]
        breaks = np.flatnonzero(starts[1:] != stops[:-1]) + 1  # between documents there may be what are no tokens
        runs = zip(starts[np.r_[0, breaks]][: len(starts)], stops[np.r_[breaks - 1, -1]][: len(starts)], strict=True)
        return np.concatenate([held[:0], *(held[start:stop] for start, stop in runs)])

    def _open(self, parts: Int64) -> dict[int, Tokens]:
        """Return the arrays of all open parts, after opening those of ``parts`` that are not."""
        missing = [part for part in parts.tolist() if part not in self._tokens]
        if not missing:
            return self._tokens
        if self.is_remote or self.format.decodes_parts:
            if len(self._tokens) * _mean_part_bytes(self) > self._cache.limit_bytes:
                self._tokens = {part: self._tokens[part] for part in parts.tolist() if part in self._tokens}
            with ThreadPoolExecutor(max_workers=_FETCHES_AT_ONCE) as pool:
                self._tokens.update(zip(missing, pool.map(self._cached, missing), strict=True))
        else:
            for file in np.unique(self.index.part_file[missing]).tolist():
                mapped = self.format.open(self.place.path(self.index.names[file]), 0)
                self._tokens.update((part, mapped) for part in np.flatnonzero(self.index.part_file == file).tolist())
        return self._tokens

    def _cached(self, part: int) -> Tokens:
        """Return one part that has to be fetched or decoded, from the cache folder."""
        file = int(self.index.part_file[part])
        name, dtype = self.index.names[file], self.index.dtypes[file]

        def produce(target: Path) -> None:
            if self.format.decodes_parts:
                whole = self.place.kept(name) if isinstance(self.place, RemotePlace) else self.place.path(name)
                self.format.open(whole, int(self.index.part_number[part])).astype(dtype).tofile(target)
            elif isinstance(self.place, RemotePlace):
                inside = slice(self.index.part_first[part], self.index.part_first[part + 1])
                stop = int((self.index.positions[inside] + self.index.lengths[inside]).max(initial=0))
                size, offset = np.dtype(dtype).itemsize, int(self.index.file_offset_bytes[file])
                start = int(self._start[part])
                target.write_bytes(self.place.read(name, offset + start * size, offset + stop * size))

        key = f"{self.place.describe(name)}/{self.place.signature(name)}/{part}"
        return self._cache.fetch(key, produce, lambda path: map_tokens(path, dtype))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokens": {}}


def _mean_part_bytes(source: Source) -> float:
    return source.num_tokens * source.dtype.itemsize / max(len(source.index.part_file), 1)


def _select(index: SourceIndex, place: Place) -> SourceIndex:
    """Keep the rows that a Hugging Face ``datasets`` folder selects, in the order of its files."""
    files = selected_rows(place)
    if not files or not isinstance(place, LocalPlace):
        return index
    chosen: list[Int64] = []
    for file in files:
        with pa.memory_map(str(place.root / file)) as source:
            chosen.append(pa.ipc.open_stream(source).read_all().column(0).to_numpy().astype(np.int64))
    rows = np.sort(np.concatenate(chosen))
    per_document = {name: getattr(index, name)[rows] for name in ("lengths", "positions", "first", "last")}
    return replace(index, part_first=np.searchsorted(rows, index.part_first), **per_document)
