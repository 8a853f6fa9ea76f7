"""One named data set of a mix: its documents, and reading stretches of them."""

from __future__ import annotations

import base64
import hashlib
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lightning_parm.data.pieces import Pieces
from lightning_parm.data.sources.cache import DiskCache
from lightning_parm.data.sources.files import selected_rows
from lightning_parm.data.sources.format import Format, Int64, Tokens, map_tokens
from lightning_parm.data.sources.index import SourceIndex
from lightning_parm.data.sources.places import LocalPlace, Place, RemotePlace

log = logging.getLogger(__name__)

_FETCHES_AT_ONCE = 16


class Source:
    """The documents of a source as the loader sees them: without empty and short ones, each with what goes around it.

    A document that ends with the delimiter already is not given a second one, nor one that begins with ``bos``.

    Attributes:
        name: the source's name in the mix.
        delimiter: the token after each document, or ``None``.
        bos: the token before each document, or ``None``.
        kept: (D,) tokens of each document without delimiter and ``bos``.
        num_short: documents left out because they are shorter than ``min_document_length``, empty ones not counted.
        ends: (D + 1,) running sum of the delimited lengths: tokens kept, delimiter and ``bos``.
        part_first: (P + 1,) first document of each part of a file.
        dtype: the smallest integer type that holds the tokens of all files.
        index: where everything lies, and which files were skipped.
    """

    def __init__(
        self,
        name: str,
        place: Place,
        format_: Format,
        index: SourceIndex,
        delimiter: int | None,
        cache: DiskCache,
        bos: int | None = None,
        min_document_length: int = 1,
    ) -> None:
        self.name = name
        self.place = place
        self.format = format_
        self.index = index = _select(index, place)
        self.delimiter = index.delimiter if delimiter is None else delimiter
        self.bos = bos
        closed, opened = _is(self.delimiter, index.last), _is(bos, index.first)
        lengths = index.lengths - closed - opened
        chosen = lengths >= min_document_length
        self.kept: Int64 = lengths[chosen]
        self.num_short = int(np.count_nonzero(lengths > 0)) - len(self.kept)
        if self.num_short:
            log.info(
                "Source %r: left out %d of %d documents, which have fewer than min_document_length=%d tokens",
                name,
                self.num_short,
                len(index.lengths),
                min_document_length,
            )
        around = (self.delimiter is not None) + (bos is not None)
        self.ends: Int64 = np.concatenate([[0], np.cumsum(self.kept + around)]).astype(np.int64)
        self.part_first: Int64 = np.concatenate([[0], np.cumsum(chosen)])[index.part_first].astype(np.int64)
        self.dtype: np.dtype[Any] = np.result_type(*(index.dtypes or ("uint16",)))
        if max(self.delimiter or 0, bos or 0) > np.iinfo(self.dtype).max:
            self.dtype = np.dtype(np.int64)
        self._positions: Int64 = (index.positions + opened)[chosen]
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
        """Tokens with what is put between documents."""
        return int(self.ends[-1])

    @property
    def num_documents(self) -> int:
        """Documents that are long enough."""
        return len(self.kept)

    @cached_property
    def fingerprint(self) -> tuple[int | str, ...]:
        """Files, documents, tokens, digests of the file names and of the document lengths, in order, and the delimiter.

        The folder is left out: data may be moved. A delimiter of -1 is none.
        """
        names = _digest("\n".join(self.index.names).encode())
        shape = _digest(self.ends.tobytes() + self.part_first.tobytes())
        delimiter = -1 if self.delimiter is None else self.delimiter
        return len(self.index.names), self.num_documents, self.num_tokens, names, shape, delimiter

    def fill(self, pieces: Pieces, rows: Int64, out: Tokens) -> None:
        """Copy pieces of documents into ``out`` (N, L + 1); ``rows`` says which row each asked window is."""
        width, flat = out.shape[1], out.reshape(-1)
        place = rows[pieces.row] * width + pieces.column
        start, size, kept = pieces.start, pieces.size, self.kept[pieces.document]
        if self.bos is not None:
            opens = start == 0
            flat[place[opens]] = self.bos
            place, start, size = place + opens, start - 1 + opens, size - opens
        parts = np.searchsorted(self.part_first, pieces.document, side="right") - 1
        begin = self._positions[pieces.document] + start - self._start[parts]
        counts = np.minimum(start + size, kept) - start
        tokens = self._open(np.unique(parts))
        for part, first, count, target in zip(
            parts.tolist(), begin.tolist(), counts.tolist(), place.tolist(), strict=True
        ):
            flat[target : target + count] = tokens[part][first : first + count]
        if self.delimiter is not None:
            flat[(place + size - 1)[start + size > kept]] = self.delimiter

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


def _is(token: int | None, tokens: Int64) -> npt.NDArray[np.bool_]:
    return np.zeros(len(tokens), dtype=bool) if token is None else tokens == token


def _digest(content: bytes) -> str:
    """Return 32 bits in 5 characters."""
    return base64.b85encode(hashlib.blake2b(content, digest_size=4).digest()).decode()


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
