"""What a token format must tell: where the documents of one file lie. Everything else is done once for all formats."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Tokens = npt.NDArray[Any]


class BadFile(ValueError):
    """A file that claims a format but cannot be read as it; the message says why, the reader adds the name."""


@dataclass(frozen=True)
class FileIndex:
    """Where the documents of one file lie.

    Attributes:
        lengths: (D,) tokens of each document, in the order of the file; 0 is allowed.
        positions: (D,) place of each document's first token in the array that :meth:`Format.open` returns.
        dtype: numpy name of the tokens' integer type.
        parts: (P + 1,) document numbers where the file may be cut into parts that are read together, or ``None``.
            A format whose :meth:`Format.open` decodes one part at a time (a Parquet row group) must give them, and
            counts ``positions`` from the start of the part.
        delimiter: id of the token between documents where the file says so, else ``None``.
        offset_bytes: byte of the file at which position 0 is, for reading parts of remote files.
    """

    lengths: Int64
    positions: Int64
    dtype: str
    parts: Int64 | None = None
    delimiter: int | None = None
    offset_bytes: int = 0


class Format(Protocol):
    """A token format. A class with these three methods and two attributes is all that a new format needs.

    Attributes:
        name: how users name it.
        decodes_parts: ``False`` when a file can be mapped into memory as one array, ``True`` when :meth:`open` has to
            decode (its result is then kept in memory, bounded).
    """

    name: str
    decodes_parts: bool

    def matches(self, path: Path) -> bool:
        """Say whether the file is of this format, from its name and its first bytes only."""
        ...

    def index(self, path: Path, delimiter: int | None) -> FileIndex:
        """Find the documents of a file.

        Args:
            path: the file.
            delimiter: the token between documents, which formats that are one long stream of tokens look for.

        Raises:
            BadFile: the file is truncated or not what it claims to be.
        """
        ...

    def open(self, path: Path, part: int) -> Tokens:
        """Return the file's tokens as one flat array, memory-mapped, or those of one part where parts are decoded."""
        ...


def map_tokens(path: Path, dtype: npt.DTypeLike, offset_bytes: int = 0) -> Tokens:
    """Return the integers of a file from ``offset_bytes`` on as a read-only array in mapped memory, without copying."""
    size = path.stat().st_size - offset_bytes
    count = max(size, 0) // np.dtype(dtype).itemsize
    if not count:
        return np.empty(0, dtype=dtype)
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset_bytes, shape=(count,)))


def read_magic(path: Path, size: int) -> bytes:
    """Return the first ``size`` bytes of a file, or fewer where it is shorter."""
    with path.open("rb") as file:
        return file.read(size)
