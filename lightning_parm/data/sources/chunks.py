"""Token chunks written by litdata and by MosaicML streaming, read where they lie when they are not compressed."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from lightning_parm.data.sources.format import BadFile, FileIndex, Int64, Tokens, map_tokens


class LitdataFormat:
    """litdata chunks of a ``TokensLoader``: a table of offsets, then the tokens of one item after another."""

    name = "litdata"
    decodes_parts = False
    # litdata's table of torch types; several numbers mean the same type.
    _DTYPES = {9: "uint8", 10: "int8", 11: "int16", 12: "int16", 13: "int32", 14: "int32", 15: "int64", 16: "int64"}  # noqa: RUF012

    def matches(self, path: Path) -> bool:
        """Say whether the file is a chunk named in the ``index.json`` beside it."""
        return any(chunk.get("filename") == path.name for chunk in _read_json(path.parent).get("chunks", []))

    def index(self, path: Path, delimiter: int | None) -> FileIndex:
        """Read the table of offsets."""
        dtype, bounds = self._dtype(path), _offsets(path)
        return _contiguous(bounds, dtype)

    def open(self, path: Path, part: int) -> Tokens:
        """Map what follows the table."""
        return map_tokens(path, self._dtype(path), int(_offsets(path)[0]))

    def _dtype(self, path: Path) -> np.dtype[Any]:
        config = _read_json(path.parent).get("config", {})
        if config.get("item_loader") != "TokensLoader" or config.get("compression") or config.get("encryption"):
            raise BadFile(
                f"is not plain tokens: item_loader={config.get('item_loader')}, "
                f"compression={config.get('compression')}, encryption={config.get('encryption')}; write it again with "
                f"litdata's TokensLoader and without compression"
            )
        kind = str((config.get("data_format") or ["?"])[0])
        code = kind.removeprefix("no_header_tensor:").removeprefix("no_header_numpy:")
        if kind.startswith("no_header_tensor:") and code.isdigit() and int(code) in self._DTYPES:
            return np.dtype(self._DTYPES[int(code)])
        raise BadFile(f"holds {kind}, not integer tensors without headers")


class MdsFormat:
    """MosaicML shards with a column of token arrays of fixed size, such as ``ndarray:uint16:4096``."""

    name = "mds"
    decodes_parts = False

    def matches(self, path: Path) -> bool:
        """Say whether the file is a shard named in the ``index.json`` beside it."""
        return _shard(path) is not None

    def index(self, path: Path, delimiter: int | None) -> FileIndex:
        """Read the table of offsets; every sample is one document."""
        dtype, before, size = self._column(path)
        starts = _offsets(path)[:-1] + before
        if len(starts) and np.any((starts - starts[0]) % dtype.itemsize):
            raise BadFile(f"has samples that do not start at whole {dtype} tokens because of its other columns")
        base = int(starts[0]) if len(starts) else 0
        return FileIndex(
            np.full(len(starts), size // dtype.itemsize),
            (starts - base) // dtype.itemsize,
            dtype.name,
            offset_bytes=base,
        )

    def open(self, path: Path, part: int) -> Tokens:
        """Map the file from its first sample's tokens on."""
        dtype, before, _ = self._column(path)
        return map_tokens(path, dtype, int(_offsets(path)[0]) + before)

    def _column(self, path: Path) -> tuple[np.dtype[Any], int, int]:
        """Return the type of the tokens, the bytes before them in a sample, and their bytes."""
        shard = _shard(path) or {}
        if shard.get("compression") or shard.get("zip_data"):
            raise BadFile(f"is compressed with {shard.get('compression')}; write it again without")
        before, variable = 0, 4 * sum(size is None for size in shard["column_sizes"])
        for encoding, size in zip(shard["column_encodings"], shard["column_sizes"], strict=True):
            kind, *details = encoding.split(":")
            if kind == "ndarray" and len(details) == 2 and size and np.dtype(details[0]).kind in "ui":
                return np.dtype(details[0]), variable + before, int(size)
            if size is None:
                break
            before += int(size)
        raise BadFile(
            f"has no column of token arrays of a fixed size before its variable columns: {shard['column_encodings']}"
        )


def _read_json(folder: Path) -> dict[str, Any]:
    path = folder / "index.json"
    return _parse(path, path.stat().st_mtime_ns) if path.is_file() else {}


@lru_cache(maxsize=16)
def _parse(path: Path, changed: int) -> dict[str, Any]:
    """Parse an ``index.json`` once for all the files that it names."""
    try:
        read: dict[str, Any] = json.loads(path.read_text())
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}


def _shard(path: Path) -> dict[str, Any] | None:
    shards = _read_json(path.parent).get("shards", [])
    return next((shard for shard in shards if shard.get("raw_data", {}).get("basename") == path.name), None)


def _offsets(path: Path) -> Int64:
    """Return where the items of a chunk start, in bytes: both formats begin with their number and a table."""
    count = np.fromfile(path, dtype=np.uint32, count=1)
    bounds = np.fromfile(path, dtype=np.uint32, count=int(count[0]) + 1, offset=4) if len(count) else count
    if not len(count) or len(bounds) != int(count[0]) + 1 or bounds[-1] > path.stat().st_size:
        raise BadFile("is truncated: its table of offsets points past its end")
    return bounds.astype(np.int64)


def _contiguous(bounds: Int64, dtype: np.dtype[Any]) -> FileIndex:
    places = (bounds - bounds[0]) // dtype.itemsize
    return FileIndex(np.diff(places), places[:-1], dtype.name, offset_bytes=int(bounds[0]))
