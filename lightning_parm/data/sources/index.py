"""The documents of all files of a source, found once, in parallel, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightning_parm.data.sources.format import BadFile, FileIndex, Format, Int64

PART_TOKENS = 1 << 22
"""Documents are shuffled within parts of about this many tokens, and parts among each other: reads stay close
together on disks and networks, and a remote part is fetched once an epoch. A constant: it is part of the order."""


@dataclass(frozen=True)
class SourceIndex:
    """Where every document of a source lies.

    Attributes:
        names: (F,) files, relative to the source's folder, in order.
        dtypes: (F,) integer type of each file's tokens.
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
    part_file: Int64
    part_number: Int64
    part_first: Int64
    lengths: Int64
    positions: Int64
    first: Int64
    last: Int64
    delimiter: int | None
    skipped: tuple[tuple[str, str], ...]


def build_index(
    name: str, root: Path, files: Sequence[Path], format_: Format, delimiter: int | None, bad_files: str
) -> SourceIndex:
    """Look into all files, eight at a time.

    Raises:
        ValueError: a file cannot be read and ``bad_files`` is ``"raise"``, or the files name different delimiters.
    """
    with ThreadPoolExecutor(max_workers=8) as pool:
        found = list(pool.map(lambda file: _look(file, format_, delimiter), files))
    names = [file.relative_to(root).as_posix() for file in files]
    skipped = [(name_, str(error)) for name_, error in zip(names, found, strict=True) if isinstance(error, BadFile)]
    if skipped and bad_files == "raise":
        raise ValueError(
            f"Source {name!r}: {root / skipped[0][0]} {skipped[0][1]}"
            f"{f' ({len(skipped)} such files)' if len(skipped) > 1 else ''}. Mend or remove it, or pass "
            f'bad_files="skip" to train without.'
        )
    good = [(name_, entry) for name_, entry in zip(names, found, strict=True) if not isinstance(entry, BadFile)]
    said = {entry.index.delimiter for _, entry in good if len(entry.index.lengths)} - {None}
    if len(said) > 1:
        raise ValueError(
            f"Source {name!r}: its files name different delimiters ({sorted(said, key=str)}), so they were written "
            f"with different tokenizers. Make a source of each, or give delimiter=... if the token ids do agree."
        )
    return _join(good, next(iter(said), None), tuple(skipped))


@dataclass(frozen=True)
class _Entry:
    index: FileIndex
    bounds: Int64
    first: Int64
    last: Int64


def _look(file: Path, format_: Format, delimiter: int | None) -> _Entry | BadFile:
    try:
        index = format_.index(file, delimiter)
        bounds = _cut(index.lengths) if index.parts is None else index.parts
        first, last = np.full((2, len(index.lengths)), -1, dtype=np.int64)
        for part in range(len(bounds) - 1) if format_.decodes_parts else [0]:
            inside = np.arange(bounds[part], bounds[part + 1]) if format_.decodes_parts else slice(None)
            tokens = format_.open(file, part)
            starts, stops = index.positions[inside], index.positions[inside] + index.lengths[inside]
            if stops.max(initial=0) > len(tokens):
                return BadFile(f"is truncated: its documents need {stops.max()} tokens and it holds {len(tokens)}")
            some = stops > starts
            edges = np.full((2, len(starts)), -1, dtype=np.int64)
            edges[0, some], edges[1, some] = tokens[starts[some]], tokens[stops[some] - 1]
            first[inside], last[inside] = edges
        return _Entry(index, bounds, first, last)
    except BadFile as error:
        return error


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
    decoded = [
        np.arange(n) if entry.index.parts is not None else np.zeros(n) for n, entry in zip(parts, entries, strict=True)
    ]
    none = [np.empty(0, dtype=np.int64)]

    def joined(arrays: list[Int64]) -> Int64:
        return np.concatenate(none + arrays).astype(np.int64)

    return SourceIndex(
        names=tuple(name for name, _ in good),
        dtypes=tuple(entry.index.dtype for entry in entries),
        part_file=np.repeat(np.arange(len(entries)), parts),
        part_number=joined(decoded),
        part_first=joined(
            [e.bounds[:-1] + first for e, first in zip(entries, documents, strict=False)] + [documents[-1:]]
        ),
        lengths=joined([entry.index.lengths for entry in entries]),
        positions=joined([entry.index.positions for entry in entries]),
        first=joined([entry.first for entry in entries]),
        last=joined([entry.last for entry in entries]),
        delimiter=delimiter,
        skipped=skipped,
    )
