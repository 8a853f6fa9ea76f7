"""Parquet with a column of token lists; one row group is decoded at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lightning_parm.data.sources.arrow import is_list, token_column
from lightning_parm.data.sources.format import BadFile, FileIndex, Int64, Tokens, read_magic


class ParquetFormat:
    """Parquet files whose rows are documents: a list of integers in each.

    A row group is read as a whole, so documents are shuffled within row groups and row groups among each other.
    """

    name = "parquet"
    decodes_parts = True

    def matches(self, path: Path) -> bool:
        """Say whether the file starts with Parquet's magic bytes or is named as one."""
        return path.suffix == ".parquet" or read_magic(path, 4) == b"PAR1"

    def index(self, path: Path, delimiter: int | None) -> FileIndex:
        """Read the list offsets of every row group."""
        try:
            with pq.ParquetFile(path) as file:
                column, dtype = _column(file)
                groups = [_flat(file, group, column)[1] for group in range(file.num_row_groups)]
        except (pa.ArrowInvalid, OSError) as error:
            raise BadFile(f"is not a complete Parquet file ({error})") from None
        lengths = [np.diff(bounds) for bounds in groups]
        none = [np.empty(0, dtype=np.int64)]
        return FileIndex(
            lengths=np.concatenate(none + lengths),
            positions=np.concatenate(none + [bounds[:-1] for bounds in groups]),
            dtype=dtype.name,
            parts=np.cumsum([0] + [len(group) for group in lengths]),
        )

    def open(self, path: Path, part: int) -> Tokens:
        """Decode row group ``part``."""
        with pq.ParquetFile(path) as file:
            return _flat(file, part, _column(file)[0])[0]


def _column(file: Any) -> tuple[str, np.dtype[Any]]:
    schema = file.schema_arrow
    column = token_column(schema)
    kind = schema.field(column).type
    if not is_list(kind):
        raise BadFile(f"has one integer a row in column {column!r}, not a list of tokens a document")
    return column, np.dtype(kind.value_type.to_pandas_dtype())


def _flat(file: Any, group: int, column: str) -> tuple[Tokens, Int64]:
    """Return the tokens of a row group end to end, and the bounds of its documents."""
    rows = file.read_row_group(group, columns=[column]).column(0).combine_chunks()
    if isinstance(rows, pa.ChunkedArray):
        rows = pa.concat_arrays(rows.chunks) if rows.num_chunks else pa.array([], type=rows.type)
    if rows.null_count:
        raise BadFile(f"has {rows.null_count} rows without a value in column {column!r}")
    values = rows.flatten()
    if values.null_count:
        raise BadFile(f"has {values.null_count} tokens without a value in column {column!r}")
    if pa.types.is_fixed_size_list(rows.type):
        bounds = np.arange(len(rows) + 1, dtype=np.int64) * rows.type.list_size
    else:
        bounds = rows.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
        bounds -= bounds[0] if len(bounds) else 0
    return values.to_numpy(zero_copy_only=False), bounds
