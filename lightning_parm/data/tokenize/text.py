"""Documents as text: found in files, cut into shards by size, and read without losing track of file and line."""

from __future__ import annotations

import codecs
import glob
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

Errors = Literal["strict", "replace", "skip"]
_REMEDY = "Mend it, or pass errors='replace' or errors='skip'."
_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


@dataclass(frozen=True)
class Part:
    """A stretch of one file: a whole text file, the JSON lines that begin in a byte range, or Parquet row groups.

    ``start`` and ``stop`` count row groups in a Parquet file and bytes elsewhere; progress counts ``num_bytes``.
    """

    path: str
    format: str
    start: int
    stop: int
    num_bytes: int


def find_files(inputs: str | Sequence[str]) -> list[str]:
    """List the files behind paths, folders and glob patterns, in order and each one once.

    A folder gives every file below it, sorted by path, except hidden ones; names that begin with a dot are hidden.

    Raises:
        ValueError: An input matches nothing.
    """
    found: dict[str, str] = {}
    for name in [inputs] if isinstance(inputs, str) else inputs:
        path = Path(name).expanduser()
        if path.is_dir():
            below = (file for file in path.rglob("*") if file.is_file())
            files = [file for file in below if not any(p.startswith(".") for p in file.relative_to(path).parts)]
        elif path.is_file():
            files = [path]
        else:
            files = [file for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file()]
        if not files:
            kind = "is a folder without files" if path.is_dir() else "matches no file"
            raise ValueError(f"{name!r} {kind}: give a text, .jsonl or .parquet file, a folder, or a quoted pattern.")
        for file in sorted(files):
            found.setdefault(str(file.resolve()), str(file))
    return list(found.values())


def cut(files: Sequence[str], shard_bytes: int) -> list[tuple[Part, ...]]:
    """Cut files into shards of about ``shard_bytes``: large files are split, small neighbours share a shard.

    The cuts of one file do not depend on the others, and small files are grouped on a fixed grid of bytes, so editing
    one file leaves nearly every other shard as it was.
    """
    shards: list[tuple[Part, ...]] = []
    group: list[Part] = []
    cell, total = 0, 0
    for path in files:
        parts = _parts(path, shard_bytes)
        if len(parts) > 1:
            shards += [tuple(group)] if group else []
            shards += [(part,) for part in parts]
            group = []
            continue
        if group and total // shard_bytes != cell:
            shards.append(tuple(group))
            group = []
        cell = total // shard_bytes
        group += parts
        total += sum(part.num_bytes for part in parts)
    return [*shards, tuple(group)] if group else shards


def _parts(path: str, shard_bytes: int) -> list[Part]:
    kind = _SUFFIXES.get(Path(path).suffix.lower(), "text")
    size = Path(path).stat().st_size
    if kind == "text":
        return [Part(path, kind, 0, size, size)]
    if kind == "jsonl":
        return [
            Part(path, kind, start, min(size, start + shard_bytes), min(size - start, shard_bytes))
            for start in range(0, size, shard_bytes)
        ]
    parts: list[Part] = []
    start = num_bytes = 0
    with _open_parquet(path) as file:
        groups = file.metadata.num_row_groups
        for group in range(groups):
            num_bytes += file.metadata.row_group(group).total_byte_size
            if num_bytes >= shard_bytes or group == groups - 1:
                parts.append(Part(path, kind, start, group + 1, num_bytes))
                start, num_bytes = group + 1, 0
    return parts


def read(part: Part, text_field: str, errors: Errors) -> Iterator[str | None]:
    """Yield the documents of ``part`` in order; ``None`` stands for one left out by ``errors="skip"``.

    Raises:
        ValueError: A document cannot be read; the message names the file and the line (or row).
    """
    records = {"text": _whole_file, "jsonl": _lines, "parquet": _rows}[part.format]
    for position, raw in records(part, text_field):
        try:
            yield _field(raw, text_field, errors) if part.format == "jsonl" else _decode(raw, errors)
        except ValueError as error:
            if errors != "skip":
                raise ValueError(f"{_place(part, position, raw, error)}: {error}") from None
            yield None


def _whole_file(part: Part, text_field: str) -> Iterator[tuple[int, bytes]]:
    yield 0, Path(part.path).read_bytes()


def _lines(part: Part, text_field: str) -> Iterator[tuple[int, bytes]]:
    with open(part.path, "rb") as file:
        position = part.start
        if position:
            # A line belongs to the part in which it begins: the tail of one that began earlier is not ours.
            file.seek(position - 1)
            position += len(file.readline()) - 1
        while position < part.stop and (line := file.readline()):
            if line.strip():
                yield position, line
            position += len(line)


def _rows(part: Part, text_field: str) -> Iterator[tuple[int, bytes]]:
    with _open_parquet(part.path) as file:
        columns = file.schema_arrow.names
        if text_field not in columns:
            raise ValueError(f"{part.path}: no column {text_field!r}, but {columns}. Name it with text_field.")
        kind = file.schema_arrow.field(text_field).type
        if not (pa.types.is_large_string(kind) or pa.types.is_string(kind) or pa.types.is_binary(kind)):
            raise ValueError(
                f"{part.path}: column {text_field!r} holds {kind}, not text. Name another with text_field."
            )
        row = sum(file.metadata.row_group(group).num_rows for group in range(part.start))
        groups = range(part.start, part.stop)
        for batch in file.iter_batches(512, row_groups=groups, columns=[text_field], use_threads=False):
            # Arrow does not check that a string column is UTF-8; as bytes, a bad row can be found and named.
            for value in batch.column(0).cast(pa.large_binary()).to_pylist():
                row += 1
                yield row, value or b""


def _open_parquet(path: str) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, memory_map=True)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: not a whole Parquet file ({error}). Write it again or leave it out.") from None


def _decode(raw: bytes, errors: Errors) -> str:
    try:
        return raw.removeprefix(codecs.BOM_UTF8).decode("utf-8", "replace" if errors == "replace" else "strict")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte 0x{error.object[error.start]:02x} is not UTF-8 ({error.reason}). {_REMEDY}") from error


def _field(line: bytes, text_field: str, errors: Errors) -> str:
    try:
        record: Any = json.loads(_decode(line, errors))
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg}, column {error.colno}). Mend it, or pass errors='skip'.") from None
    if not isinstance(record, dict) or text_field not in record:
        has = f"the fields {sorted(record)}" if isinstance(record, dict) else f"a {type(record).__name__}"
        raise ValueError(f"no field {text_field!r}, but {has}. Name the field of the text with text_field.")
    text = "" if record[text_field] is None else record[text_field]
    if not isinstance(text, str):
        raise ValueError(
            f"the field {text_field!r} is a {type(text).__name__}, not text. Name another with text_field."
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # JSON's escapes can spell one half of a surrogate pair, which no encoding can hold.
        if errors != "replace":
            raise ValueError(f"{text[error.start]!a} is half a character. {_REMEDY}") from None
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _place(part: Part, position: int, raw: bytes, error: ValueError) -> str:
    if part.format == "parquet":
        return f"{part.path}: row {position}"
    if part.format == "text":
        cause = error.__cause__
        line = raw.count(b"\n", 0, cause.start) if isinstance(cause, UnicodeDecodeError) else 0
        return f"{part.path}:{line + 1}"
    line = 1
    with open(part.path, "rb") as file:
        while position > 0 and (block := file.read(min(position, 1 << 20))):
            line += block.count(b"\n")
            position -= len(block)
    return f"{part.path}:{line}"
