"""The documents of all files of a source, found once, in parallel, the same on every rank, and remembered."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pyarrow as pa

from lightning_parm.data.sources.format import BadFile, FileIndex, Format, Int64
from lightning_parm.data.sources.places import Place

log = logging.getLogger(__name__)

PART_TOKENS = 1 << 22
"""Documents are shuffled within parts of about this many tokens, and parts among each other: reads stay close
together on disks and networks, and a remote part is fetched once an epoch. A constant: it is part of the order."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class SourceIndex:
    """Where every document of a source lies.

    Attributes:
        names: (F,) files, relative to the source's folder, in order.
        dtypes: (F,) integer type of each file's tokens.
        file_offset_bytes: (F,) byte of each file at which position 0 is.
        part_file: (P,) file of each part.
        part_number: (P,) number of the part within its file, as :meth:`Format.open` counts (0 for mapped files).
        part_first: (P + 1,) first document of each part; the last entry is the number of documents.
        lengths: (D,) tokens of each document in the file.
        positions: (D,) place of each document's first token in its opened file or part.
        first: (D,) first token of each document, -1 where it has none.
        last: (D,) last token of each document, -1 where it has none.
        delimiter: the delimiter that the files name, if they do.
        skipped: files left out because they could not be read, each with the reason.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    file_offset_bytes: Int64
    part_file: Int64
    part_number: Int64
    part_first: Int64
    lengths: Int64
    positions: Int64
    first: Int64
    last: Int64
    delimiter: int | None
    skipped: tuple[tuple[str, str], ...]

    def save(self, path: Path) -> None:
        """Write the index as an Arrow file, one record batch an array, so that it can be mapped."""
        plain = {"names": self.names, "dtypes": self.dtypes, "delimiter": self.delimiter, "skipped": self.skipped}
        schema = pa.schema([pa.field("values", pa.int64())], metadata={"index": json.dumps(plain)})
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        with pa.OSFile(str(partial), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for name in _ARRAYS:
                writer.write_batch(pa.record_batch([pa.array(getattr(self, name), type=pa.int64())], schema=schema))
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> SourceIndex:
        """Map a saved index."""
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        plain = json.loads(reader.schema.metadata[b"index"])
        arrays = {name: reader.get_batch(i).column(0).to_numpy() for i, name in enumerate(_ARRAYS)}
        skipped = tuple((name, reason) for name, reason in plain["skipped"])
        return cls(
            tuple(plain["names"]), tuple(plain["dtypes"]), **arrays, delimiter=plain["delimiter"], skipped=skipped
        )


_ARRAYS = [field.name for field in fields(SourceIndex) if field.type == "Int64"]


def find_index(
    name: str,
    place: Place,
    format_: Format,
    delimiter: int | None,
    bad_files: str,
    folder: Path,
    progress: Progress | None = None,
) -> SourceIndex:
    """Return the index of a source, from ``folder`` when no file has changed since it was made.

    Raises:
        ValueError: a file cannot be read and ``bad_files`` is ``"raise"``, or the files name different delimiters.
    """
    if bad_files not in ("raise", "skip"):
        raise ValueError(f'bad_files={bad_files!r} must be "raise" or "skip".')
    signatures = _signatures(place)
    about = [type(format_).__qualname__, vars(format_) and str(vars(format_)), delimiter, PART_TOKENS]
    key = json.dumps([about, [place.describe(file) for file in place.names[:1]], place.names, signatures])
    path = folder / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.arrow"
    try:
        index = SourceIndex.load(path)
    except (OSError, pa.ArrowInvalid):
        index = _build(name, place, format_, delimiter, progress)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            index.save(path)
        except OSError as error:
            log.warning("The index of source %r is not kept, it will be made again: %s", name, error)
    if index.skipped:
        first, reason = index.skipped[0]
        others = f" ({len(index.skipped)} such files)" if len(index.skipped) > 1 else ""
        if bad_files == "raise":
            raise ValueError(
                f"Source {name!r}: {place.describe(first)} {reason}{others}. Mend or remove it, or pass "
                f'bad_files="skip" to train without.'
            )
        log.warning("Source %r: skipped %s, which %s%s", name, place.describe(first), reason, others)
    return index


def _signatures(place: Place) -> list[str]:
    """Return the signatures of all files; asked in a few threads, because a file system may be far away."""
    size = -(-len(place.names) // 16)
    groups = [place.names[start : start + size] for start in range(0, len(place.names), max(size, 1))]
    with ThreadPoolExecutor(max_workers=16) as pool:
        found = pool.map(lambda group: [place.signature(file) for file in group], groups)
        return [signature for group in found for signature in group]


def _build(name: str, place: Place, format_: Format, delimiter: int | None, progress: Progress | None) -> SourceIndex:
    def look(number: int) -> _Entry | BadFile:
        return _look(place, place.names[number], format_, delimiter)

    found = []
    try:
        with ThreadPoolExecutor(max_workers=8) as pool:
            for number, entry in enumerate(pool.map(look, range(len(place.names))), start=1):
                found.append(entry)
                if progress is not None:
                    progress(name, number, len(place.names))
    finally:
        place.release("")
    pairs = list(zip(place.names, found, strict=True))
    good = [(file, entry) for file, entry in pairs if not isinstance(entry, BadFile)]
    said = {entry.index.delimiter for _, entry in good if len(entry.index.lengths)} - {None}
    if len(said) > 1 and delimiter is None:
        raise ValueError(
            f"Source {name!r}: its files name different delimiters ({sorted(said, key=str)}), so they were written "
            f"with different tokenizers. Make a source of each, or give delimiter=... if the token ids do agree."
        )
    skipped = tuple((file, str(entry)) for file, entry in pairs if isinstance(entry, BadFile))
    return _join(good, next(iter(said), None), skipped)


@dataclass(frozen=True)
class _Entry:
    index: FileIndex
    bounds: Int64
    first: Int64
    last: Int64


def _look(place: Place, file: str, format_: Format, delimiter: int | None) -> _Entry | BadFile:
    try:
        path = place.path(file)
        index = format_.index(path, delimiter)
        bounds = _cut(index.lengths) if index.parts is None else index.parts
        first, last = np.full((2, len(index.lengths)), -1, dtype=np.int64)
        for part in range(len(bounds) - 1) if format_.decodes_parts else [0]:
            inside = slice(bounds[part], bounds[part + 1]) if format_.decodes_parts else slice(None)
            tokens = format_.open(path, part)
            starts, stops = index.positions[inside], index.positions[inside] + index.lengths[inside]
            if stops.max(initial=0) > len(tokens):
                return BadFile(f"is truncated: its documents need {stops.max()} tokens and it holds {len(tokens)}")
            some = stops > starts
            first[inside][some], last[inside][some] = tokens[starts[some]], tokens[stops[some] - 1]
        return _Entry(index, bounds, first, last)
    except BadFile as error:
        return error
    finally:
        place.release(file)


def _cut(lengths: Int64) -> Int64:
    """Return document numbers that cut a file into parts of about :data:`PART_TOKENS`."""
    if not len(lengths):
        return np.zeros(1, dtype=np.int64)
    part = (np.cumsum(lengths) - lengths) // PART_TOKENS
    return np.concatenate([[0], np.flatnonzero(np.diff(part)) + 1, [len(lengths)]]).astype(np.int64)


def _join(good: list[tuple[str, _Entry]], delimiter: int | None, skipped: tuple[tuple[str, str], ...]) -> SourceIndex:
    entries = [entry for _, entry in good]
    parts = np.array([len(entry.bounds) - 1 for entry in entries], dtype=np.int64)
    documents = np.cumsum([0] + [len(entry.index.lengths) for entry in entries])
    numbers = [np.arange(n) * (entry.index.parts is not None) for n, entry in zip(parts, entries, strict=True)]
    firsts = [entry.bounds[:-1] + before for entry, before in zip(entries, documents[:-1], strict=True)]

    def joined(arrays: list[Int64]) -> Int64:
        return np.concatenate([np.empty(0, dtype=np.int64), *arrays]).astype(np.int64)

    return SourceIndex(
        names=tuple(name for name, _ in good),
        dtypes=tuple(entry.index.dtype for entry in entries),
        file_offset_bytes=np.array([entry.index.offset_bytes for entry in entries], dtype=np.int64),
        part_file=np.repeat(np.arange(len(entries)), parts),
        part_number=joined(numbers),
        part_first=joined([*firsts, documents[-1:]]),
        lengths=joined([entry.index.lengths for entry in entries]),
        positions=joined([entry.index.positions for entry in entries]),
        first=joined([entry.first for entry in entries]),
        last=joined([entry.last for entry in entries]),
        delimiter=delimiter,
        skipped=skipped,
    )
