"""One Arrow file of tokens: encoded from a shard of text, written whole or not at all, and able to say what it is."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lightning_parm.data.tokenize.text import Errors, Part, read
from lightning_parm.data.tokenize.tokenizer import TokenizerFacts, load_tokenizer

_ENCODE_BYTES = 2**18
_BATCH_TOKENS = 2**20


@dataclass(frozen=True)
class Recipe:
    """Everything but the text that decides what comes out: the tokenizer's JSON and how documents are read."""

    tokenizer: str
    facts: TokenizerFacts
    text_field: str
    errors: Errors

    def digest(self, shard: tuple[Part, ...]) -> str:
        """Name the result of ``shard``: it changes when a file's size or time, the tokenizer or an option changes."""
        stats = [Path(part.path).stat() for part in shard]
        files = [
            [os.path.realpath(part.path), stat.st_size, stat.st_mtime_ns]
            for part, stat in zip(shard, stats, strict=True)
        ]
        parts = [[part.format, part.start, part.stop] for part in shard]
        recipe = [asdict(self.facts), self.text_field, self.errors]
        return hashlib.sha256(json.dumps([files, parts, recipe]).encode("utf-8")).hexdigest()


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """Return the smallest type that holds the ids ``0 .. vocab_size - 1``."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def write_tokens(shard: tuple[Part, ...], recipe: Recipe, path: Path, report: Callable[[int], None]) -> None:
    """Encode the documents of ``shard`` into the Arrow file ``path``, which appears complete or not at all.

    Args:
        shard: The stretches of files to read, in order.
        recipe: The tokenizer and the way to read.
        path: The file to write: one column ``tokens``, a list of uint16 or uint32 a document, and metadata.
        report: Called with the number of text bytes done since the last call.
    """
    tokenizer = load_tokenizer(recipe.tokenizer)
    dtype = token_dtype(recipe.facts.vocab_size)
    counts = {"documents": 0, "empty_documents": 0, "skipped_documents": 0, "tokens": 0}
    columns: list[pa.Array] = []
    waiting: list[npt.NDArray[Any]] = []
    for texts in _texts(shard, recipe, counts, report):
        waiting += [
            np.array(encoding.ids, dtype) for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ]
        if sum(map(len, waiting)) >= _BATCH_TOKENS:
            columns.append(_column(waiting, dtype))
            waiting = []
    columns += [_column(waiting, dtype)] if waiting else []
    counts["documents"] = sum(map(len, columns))
    counts["tokens"] = sum(len(column.values) for column in columns)
    metadata = {
        "delimiter": str(recipe.facts.delimiter),
        "vocab_size": str(recipe.facts.vocab_size),
        "tokenizer_sha256": recipe.facts.sha256,
        "shard_sha256": recipe.digest(shard),
        **{name: str(count) for name, count in counts.items()},
    }
    schema = pa.schema([pa.field("tokens", pa.list_(pa.from_numpy_dtype(dtype)))], metadata=metadata)
    _write_whole(path, schema, columns)


def read_record(path: Path) -> dict[str, str]:
    """Return the metadata of a file of tokens; empty when it is no such file."""
    try:
        with pa.memory_map(str(path)) as file:
            metadata = pa.ipc.open_file(file).schema.metadata or {}
    except pa.ArrowInvalid:
        return {}
    return {key.decode(): value.decode() for key, value in metadata.items()}


def _texts(
    shard: tuple[Part, ...], recipe: Recipe, counts: dict[str, int], report: Callable[[int], None]
) -> Iterator[list[str]]:
    """Yield the non-empty documents in lists of about ``_ENCODE_BYTES``, counting those that are left out."""
    texts: list[str] = []
    size = 0
    for part in shard:
        # The text of a JSON line or a Parquet row is smaller or larger than what it takes on disk: a part counts in
        # full when it is done, and by the length of its text until then.
        left = part.num_bytes
        for text in read(part, recipe.text_field, recipe.errors):
            counts["skipped_documents"] += text is None
            counts["empty_documents"] += text == ""
            if not text:
                continue
            texts.append(text)
            size += len(text)
            if size >= _ENCODE_BYTES:
                yield texts
                done = min(size, left)
                left -= done
                report(done)
                texts, size = [], 0
        report(left)
    if texts:
        yield texts


def _column(documents: list[npt.NDArray[Any]], dtype: type[np.generic]) -> pa.Array:
    offsets = np.zeros(len(documents) + 1, np.int32)
    np.cumsum([len(tokens) for tokens in documents], out=offsets[1:])
    values = np.concatenate([np.empty(0, dtype), *documents])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def _write_whole(path: Path, schema: pa.Schema, columns: list[pa.Array]) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    try:
        with open(draft, "wb") as file:
            with pa.ipc.new_file(file, schema) as writer:
                for column in columns:
                    writer.write_batch(pa.record_batch([column], schema=schema))
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
