"""Megatron-LM's indexed data sets: tokens in a .bin, documents in the .idx beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lightning_parm.data.sources.format import BadFile, FileIndex, Tokens, map_tokens, read_magic

_MAGIC = b"MMIDIDX\x00\x00"
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


class MegatronFormat:
    """A document may be several sequences long; the .idx says where documents start, and they are read as a whole."""

    name = "megatron"
    decodes_parts = False

    def matches(self, path: Path) -> bool:
        """Say whether it is a .bin with an .idx of Megatron's beside it."""
        beside = path.with_suffix(".idx")
        return path.suffix == ".bin" and beside.is_file() and read_magic(beside, 9) == _MAGIC

    def index(self, path: Path, delimiter: int | None) -> FileIndex:
        """Read the .idx."""
        raw = path.with_suffix(".idx").read_bytes()
        dtype = self._dtype(raw)
        num_sequences, num_documents = np.frombuffer(raw, dtype=np.uint64, count=2, offset=18).astype(int).tolist()
        if len(raw) < 34 + 12 * num_sequences + 8 * num_documents:
            raise BadFile(f"has a truncated .idx: {len(raw)} bytes for {num_sequences} sequences")
        sizes = np.frombuffer(raw, dtype=np.int32, count=num_sequences, offset=34).astype(np.int64)
        pointers = np.frombuffer(raw, dtype=np.int64, count=num_sequences, offset=34 + 4 * num_sequences)
        bounds = np.frombuffer(raw, dtype=np.int64, count=num_documents, offset=34 + 12 * num_sequences)
        starts = pointers // dtype.itemsize
        ends = np.concatenate([[0], np.cumsum(sizes)])
        if not np.array_equal(starts, ends[:-1]):
            raise BadFile("has sequences in another order than its .idx; only data written in one go can be read")
        return FileIndex(np.diff(ends[bounds]), ends[bounds[:-1]], dtype.name)

    def open(self, path: Path, part: int) -> Tokens:
        """Map the .bin."""
        return map_tokens(path, self._dtype(read_magic(path.with_suffix(".idx"), 18)))

    def _dtype(self, raw: bytes) -> np.dtype[np.integer]:
        version, code = int.from_bytes(raw[9:17], "little"), raw[17] if len(raw) > 17 else 0
        if version != 1 or code not in _DTYPES:
            raise BadFile(f"has an .idx of version {version} with type code {code}; known are version 1, codes 1-5, 8")
        return np.dtype(_DTYPES[code])
