"""One long stream of tokens in a file: .npy, raw memory maps (nanoGPT, OLMo), llm.c and modded-nanogpt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lightning_parm.data.sources.format import BadFile, FileIndex, Int64, Tokens, map_tokens, read_magic

_SCAN = 1 << 22


class NpyFormat:
    """numpy's own files: one dimension is a stream of tokens, two dimensions are one document a row."""

    name = "npy"
    decodes_parts = False

    def matches(self, path: Path) -> bool:
        """Say whether the file starts with numpy's magic bytes (OLMo's ".npy" files do not: they are raw)."""
        return read_magic(path, 6) == b"\x93NUMPY"

    def index(self, path: Path, delimiter: int | None) -> FileIndex:
        """Split at the delimiter, or take the rows of a matrix as documents."""
        array = self._load(path)
        if array.ndim == 2:
            count, size = array.shape
            return FileIndex(
                np.full(count, size), np.arange(count) * size, array.dtype.name, offset_bytes=_offset_bytes(array)
            )
        return split_at(array, delimiter, _offset_bytes(array))

    def open(self, path: Path, part: int) -> Tokens:
        """Map the file."""
        flat: Tokens = self._load(path).reshape(-1)
        return flat

    def _load(self, path: Path) -> Any:
        try:
            array = np.load(path, mmap_mode="r")
        except ValueError as error:
            raise BadFile(f"is not a complete .npy file ({error})") from None
        if array.dtype.kind not in "ui" or array.ndim not in (1, 2) or not array.flags.c_contiguous:
            raise BadFile(f"holds {array.dtype} of shape {array.shape}, not integers in one or two dimensions")
        return array


class LlmcFormat:
    """The .bin files of llm.c and modded-nanogpt: a header of 256 int32, then uint16 (GPT-2) or uint32 (Llama 3)."""

    name = "llmc"
    decodes_parts = False
    _DTYPES = {20240520: "uint16", 20240801: "uint32"}  # noqa: RUF012 - constant

    def matches(self, path: Path) -> bool:
        """Say whether the file starts with one of the two magic numbers."""
        magic = read_magic(path, 4)
        return len(magic) == 4 and int.from_bytes(magic, "little") in self._DTYPES

    def index(self, path: Path, delimiter: int | None) -> FileIndex:
        """Check the header's count and split at the delimiter."""
        header = np.fromfile(path, dtype=np.int32, count=256)
        tokens = self.open(path, 0)
        if len(header) < 256 or header[2] != len(tokens):
            raise BadFile(f"is truncated: its header says {header[2]} tokens and it holds {len(tokens)}")
        return split_at(tokens, delimiter, 1024)

    def open(self, path: Path, part: int) -> Tokens:
        """Map what follows the header."""
        return map_tokens(path, self._DTYPES[int.from_bytes(read_magic(path, 4), "little")], 1024)


class RawFormat:
    """Nothing but integers, as nanoGPT and OLMo write them; the file cannot say of which type, so the user must.

    Args:
        dtype: numpy name of the integer type, such as ``"uint16"``.
    """

    name = "raw"
    decodes_parts = False

    def __init__(self, dtype: str) -> None:
        if np.dtype(dtype).kind not in "ui":
            raise ValueError(f"dtype={dtype!r} is not an integer type, such as 'uint16' or 'uint32'.")
        self.dtype = np.dtype(dtype)

    def matches(self, path: Path) -> bool:
        """Say yes to what is usually raw: .bin, .npy without numpy's magic bytes, .raw, .tokens, .u16 and .u32."""
        return path.suffix in (".bin", ".npy", ".raw", ".tokens", ".u16", ".u32")

    def index(self, path: Path, delimiter: int | None) -> FileIndex:
        """Split at the delimiter."""
        size = path.stat().st_size
        if size % self.dtype.itemsize:
            raise BadFile(f"has {size} bytes, which is no whole number of {self.dtype} tokens")
        return split_at(self.open(path, 0), delimiter, 0)

    def open(self, path: Path, part: int) -> Tokens:
        """Map the file."""
        return map_tokens(path, self.dtype)


def split_at(tokens: Tokens, delimiter: int | None, offset_bytes: int) -> FileIndex:
    """Return the documents of one long stream; each ends with its delimiter, which belongs to it.

    Without a delimiter the file is one document.

    >>> index = split_at(np.array([5, 6, 0, 7, 0, 8], dtype=np.uint16), 0, 0)
    >>> index.lengths.tolist(), index.positions.tolist()
    ([3, 2, 1], [0, 3, 5])
    """
    ends: list[Int64] = []
    if delimiter is not None:
        for start in range(0, len(tokens), _SCAN):
            ends.append(np.flatnonzero(tokens[start : start + _SCAN] == delimiter) + start + 1)
    bounds = np.concatenate([np.zeros(1, dtype=np.int64), *ends])
    if bounds[-1] != len(tokens):
        bounds = np.append(bounds, len(tokens))
    return FileIndex(np.diff(bounds), bounds[:-1], tokens.dtype.name, offset_bytes=offset_bytes)


def _offset_bytes(array: Any) -> int:
    return int(getattr(array, "offset", 0))
