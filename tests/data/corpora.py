"""Small corpora on disk whose every token says which document and place it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa


def write_arrow(
    path: Path, documents: Sequence[np.ndarray], delimiter: int | None = None, rows_per_batch: int = 64
) -> Path:
    """Write one list row a document, as ``lightning-parm tokenize`` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    documents = list(documents)
    dtype = documents[0].dtype if documents else np.dtype(np.uint16)
    kind = pa.from_numpy_dtype(dtype)
    metadata = {} if delimiter is None else {"delimiter": str(delimiter)}
    schema = pa.schema([pa.field("tokens", pa.list_(kind))], metadata=metadata)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for start in range(0, len(documents), rows_per_batch):
            chunk = documents[start : start + rows_per_batch]
            offsets = np.cumsum([0] + [len(d) for d in chunk]).astype(np.int32)
            column = pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(chunk), type=kind))
            writer.write_batch(pa.record_batch([column], schema=schema))
    return path


def numbered_documents(lengths: Sequence[int], first: int = 1, dtype: str = "uint32") -> list[np.ndarray]:
    """Return documents whose tokens are 'first', 'first + 1', ... through all of them: each token is unique."""
    bounds = np.cumsum([first, *lengths])
    return [np.arange(a, b, dtype=dtype) for a, b in pairwise(bounds)]


def random_lengths(seed: int, count: int, mean: int) -> list[int]:
    """Return document lengths of a wide spread, none of them 0."""
    return (1 + np.random.default_rng(seed).exponential(mean - 1, count)).astype(int).tolist()
