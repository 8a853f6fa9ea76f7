"""Arrow IPC files and streams: a list column of tokens, or one record batch a document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from lightning_parm.data.sources.format import BadFile, FileIndex, Int64, Tokens, map_tokens, read_magic

_SUFFIXES = (".arrow", ".feather", ".ipc")
_COLUMNS = ("tokens", "input_ids", "token_ids", "ids", "text_ids")


class ArrowFormat:
    """Arrow IPC, the file and the stream layout, read where it lies: only list offsets are looked at, never a token.

    A list column holds one document a row (what ``lightning-parm tokenize`` and Hugging Face ``datasets`` write). A
    plain integer column holds one document a record batch (what IBM's fms-fsdp reads).
    """

    name = "arrow"
    decodes_parts = False

    def matches(self, path: Path) -> bool:
        """Say whether the name ends as Arrow files do or the file starts with Arrow's magic bytes."""
        return path.suffix in _SUFFIXES or read_magic(path, 6) == b"ARROW1"

    def index(self, path: Path, delimiter: int | None) -> FileIndex:
        """Read the offsets of all record batches; the tokens' addresses are turned into places in the file."""
        if path.stat().st_size == 0:
            raise BadFile("is empty (0 bytes)")
        with pa.memory_map(str(path)) as source:
            whole = source.read_buffer()
            try:
                is_file = whole[:6].to_pybytes() == b"ARROW1"
                reader = pa.ipc.open_file(whole) if is_file else pa.ipc.open_stream(whole)
                batches = [reader.get_batch(i) for i in range(reader.num_record_batches)] if is_file else list(reader)
            except (pa.ArrowInvalid, OSError) as error:
                raise BadFile(f"is not a complete Arrow file ({error})") from None
            column = token_column(reader.schema)
            field = reader.schema.field(column)
            values_type = field.type.value_type if is_list(field.type) else field.type
            dtype = np.dtype(values_type.to_pandas_dtype())
            lengths, positions = [], []
            for batch in batches:
                batch_lengths, batch_positions = _locate(batch.column(column), whole, dtype.itemsize)
                lengths.append(batch_lengths)
                positions.append(batch_positions)
        metadata = reader.schema.metadata or {}
        said = metadata.get(b"delimiter", b"").decode()
        empty = [np.empty(0, dtype=np.int64)]
        return FileIndex(
            lengths=np.concatenate(lengths or empty),
            positions=np.concatenate(positions or empty),
            dtype=dtype.name,
            delimiter=int(said) if said.lstrip("-").isdigit() else None,
        )

    def open(self, path: Path, part: int) -> Tokens:
        """Map the whole file as tokens: Arrow aligns every buffer to 8 bytes, so documents start at whole tokens."""
        with pa.memory_map(str(path)) as source:
            whole = source.read_buffer()
            is_file = whole[:6].to_pybytes() == b"ARROW1"
            schema = (pa.ipc.open_file(whole) if is_file else pa.ipc.open_stream(whole)).schema
        type_ = schema.field(token_column(schema)).type
        return map_tokens(path, (type_.value_type if is_list(type_) else type_).to_pandas_dtype())


def is_list(type_: Any) -> bool:
    """Say whether an Arrow type is a list of any kind."""
    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_))


def token_column(schema: Any) -> str:
    """Return the column that holds tokens: a well-known name, else the only column of integers or lists of them."""
    candidates = [
        field.name
        for field in schema
        if pa.types.is_integer(field.type) or (is_list(field.type) and pa.types.is_integer(field.type.value_type))
    ]
    known = [name for name in _COLUMNS if name in candidates]
    if known:
        return known[0]
    if len(candidates) != 1:
        raise BadFile(
            f"has no column of tokens: expected one of {', '.join(_COLUMNS)}, found "
            f"{', '.join(f'{f.name} ({f.type})' for f in schema) or 'no column'}"
        )
    return str(candidates[0])


def _locate(column: Any, whole: Any, itemsize: int) -> tuple[Int64, Int64]:
    """Return the lengths of a record batch's documents and where they start in the file, in tokens."""
    if column.null_count:
        raise BadFile(f"has {column.null_count} rows without a value in its column of tokens")
    if not is_list(column.type):
        values, bounds = column, np.array([0, len(column)], dtype=np.int64)
    elif pa.types.is_fixed_size_list(column.type):
        size = column.type.list_size
        values = column.values
        bounds = (column.offset + np.arange(len(column) + 1, dtype=np.int64)) * size
    else:
        values = column.values
        bounds = column.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    lengths = np.diff(bounds)
    buffer = values.buffers()[1]
    if buffer is None or not len(values):
        return lengths, np.zeros(len(lengths), dtype=np.int64)
    start = buffer.address - whole.address
    if not 0 <= start < whole.size:
        raise BadFile("has compressed buffers, which cannot be read in place; write it again without compression")
    return lengths, start // itemsize + values.offset + bounds[:-1]
