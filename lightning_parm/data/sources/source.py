"""One named data set of a mix: its documents, and reading stretches of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_parm.data.sources.files import find_files
from lightning_parm.data.sources.format import Format, Int64, Tokens
from lightning_parm.data.sources.index import SourceIndex, build_index
from lightning_parm.data.windows import Pieces


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
    """

    def __init__(self, name: str, root: Path, format_: Format, index: SourceIndex, delimiter: int | None) -> None:
        self.name = name
        self.root = root
        self.format = format_
        self.index = index
        self.delimiter = index.delimiter if delimiter is None else delimiter
        closed = index.last == self.delimiter if self.delimiter is not None else np.zeros(len(index.last), dtype=bool)
        lengths = index.lengths - closed
        chosen = lengths > 0
        self.kept: Int64 = lengths[chosen]
        self.ends: Int64 = np.concatenate([[0], np.cumsum(self.kept + (self.delimiter is not None))]).astype(np.int64)
        self.part_first: Int64 = np.concatenate([[0], np.cumsum(chosen)])[index.part_first].astype(np.int64)
        self._positions: Int64 = index.positions[chosen]
        self._tokens: list[Tokens | None] = [None] * len(index.part_file)
        self.dtype: np.dtype[Any] = np.result_type(*(index.dtypes or ("uint16",)))
        if self.delimiter is not None and self.delimiter > np.iinfo(self.dtype).max:
            self.dtype = np.dtype(np.int64)

    @classmethod
    def find(
        cls, name: str, path: str, formats: Sequence[Format], delimiter: int | None = None, bad_files: str = "raise"
    ) -> Source:
        """Find a source's files and index them.

        Raises:
            ValueError: nothing readable is at ``path``; the message says what is.
        """
        root, files, format_ = find_files(path, name, formats)
        return cls(name, root, format_, build_index(name, root, files, format_, delimiter, bad_files), delimiter)

    @property
    def num_tokens(self) -> int:
        """Tokens with their delimiters."""
        return int(self.ends[-1])

    @property
    def num_documents(self) -> int:
        """Documents with at least one token."""
        return len(self.kept)

    def fingerprint(self) -> list[int | str]:
        """Return files, documents, tokens, and digests of the file names and of the document lengths, in order.

        The folder is left out: data may be moved.
        """
        names = hashlib.blake2b("\n".join(self.index.names).encode(), digest_size=4).hexdigest()
        shape = hashlib.blake2b(self.ends.tobytes() + self.part_first.tobytes(), digest_size=4).hexdigest()
        return [len(self.index.names), self.num_documents, self.num_tokens, names, shape]

    def fill(self, pieces: Pieces, rows: Int64, out: Tokens) -> None:
        """Copy pieces of documents into ``out`` (N, L + 1); ``rows`` says which row each asked window is."""
        width, flat = out.shape[1], out.reshape(-1)
        place = rows[pieces.row] * width + pieces.column
        stop = pieces.start + pieces.size
        kept = self.kept[pieces.document]
        begin = self._positions[pieces.document] + pieces.start
        counts = np.minimum(stop, kept) - pieces.start
        parts = np.searchsorted(self.part_first, pieces.document, side="right") - 1
        tokens = self._tokens
        for part, first, count, target in zip(
            parts.tolist(), begin.tolist(), counts.tolist(), place.tolist(), strict=True
        ):
            held = tokens[part]
            if held is None:
                held = self._open(part)
            flat[target : target + count] = held[first : first + count]
        if self.delimiter is not None:
            closing = stop > kept
            flat[(place + pieces.size - 1)[closing]] = self.delimiter

    def _open(self, part: int) -> Tokens:
        file = int(self.index.part_file[part])
        held = self.format.open(self.root / self.index.names[file], int(self.index.part_number[part]))
        for other in np.flatnonzero(self.index.part_file == file).tolist() if not self.format.decodes_parts else [part]:
            self._tokens[other] = held
        return held

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokens": [None] * len(self._tokens)}
