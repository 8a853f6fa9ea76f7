"""The formats that are known, and opening the sources of a mix with them."""

from __future__ import annotations

import csv
import importlib
import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lightning_parm.data.sources.arrow import ArrowFormat
from lightning_parm.data.sources.cache import DEFAULT_LIMIT_BYTES, DiskCache, default_folder
from lightning_parm.data.sources.chunks import LitdataFormat, MdsFormat
from lightning_parm.data.sources.files import find_files, find_sources
from lightning_parm.data.sources.flat import LlmcFormat, NpyFormat, RawFormat
from lightning_parm.data.sources.format import Format
from lightning_parm.data.sources.index import Progress, find_index
from lightning_parm.data.sources.megatron import MegatronFormat
from lightning_parm.data.sources.parquet import ParquetFormat
from lightning_parm.data.sources.source import Source

log = logging.getLogger(__name__)

FORMATS: tuple[Format, ...] = (
    ArrowFormat(),
    ParquetFormat(),
    MdsFormat(),
    LitdataFormat(),
    MegatronFormat(),
    LlmcFormat(),
    NpyFormat(),
)


def open_sources(
    sources: str | Mapping[str, str],
    delimiter: int | None = None,
    bad_files: str = "raise",
    format: str | Format | None = None,
    dtype: str | None = None,
    cache_folder: str | None = None,
    cache_bytes: int = DEFAULT_LIMIT_BYTES,
    bos: int | None = None,
    min_document_length: int = 1,
    progress: Progress | None = None,
) -> list[Source]:
    """Find and index every source.

    Args:
        sources: a path (file, folder, pattern or URL), or ``{name: path}``. A single path is named ``"data"``; a folder
            whose sub-folders hold the token files is a mix of them.
        delimiter: token put between documents; ``None`` takes what the files say.
        bad_files: ``"raise"`` or ``"skip"``.
        format: name of a format, ``"package.module.Class"`` of one of yours, or an object of it; ``None`` detects it.
        dtype: integer type of raw files, which cannot say it themselves.
        cache_folder: where indices, fetched and decoded parts are kept; ``None`` is ``~/.cache/lightning_parm``.
        cache_bytes: limit of the fetched and decoded parts.
        bos: token put before every document that does not begin with it.
        min_document_length: documents of fewer tokens, delimiter and ``bos`` not counted, are left out.
        progress: called with the source's name, files looked at, and files in all.

    Raises:
        ValueError: there are no sources, one has no readable file, or the format is unknown.
    """
    if min_document_length < 1:
        raise ValueError(
            f"min_document_length={min_document_length} must be at least 1: empty documents are no samples."
        )
    for what, token in (("delimiter", delimiter), ("bos", bos)):
        if token is not None and token < 0:
            raise ValueError(f"{what}={token} is no token: ids count from 0, and None means none.")
    formats = _choose(format, dtype)
    named = find_sources(sources, formats) if isinstance(sources, str) else dict(sources)
    if not named:
        raise ValueError("sources is empty: give a path, or a dictionary from names to paths.")
    root = default_folder() if cache_folder is None else Path(cache_folder)
    cache = DiskCache(root / "_parts", cache_bytes)  # an underscore, because the root may lie among the data
    opened = []
    for name, path in named.items():
        place, found = find_files(path, name, formats, cache)
        index = find_index(name, place, found, delimiter, bad_files, root / "_index", progress)
        opened.append(Source(name, place, found, index, delimiter, cache, bos, min_document_length))
    if isinstance(sources, str) and "://" not in sources:
        _compare_counts(Path(sources), opened)
    return opened


def _choose(format_: str | Format | None, dtype: str | None) -> tuple[Format, ...]:
    known = {entry.name: entry for entry in FORMATS}
    if dtype is not None:
        known["raw"] = RawFormat(dtype)
    if format_ is None:
        return tuple(known.values())
    if not isinstance(format_, str):
        return (format_,)
    if format_ in known:
        return (known[format_],)
    module, _, name = format_.rpartition(".")
    try:
        return (getattr(importlib.import_module(module), name)(),)
    except (ImportError, AttributeError, ValueError):
        raise ValueError(
            f"format={format_!r} is neither one of {', '.join([*known])} (raw needs dtype=...) nor a class that can "
            f"be imported."
        ) from None


def _compare_counts(folder: Path, sources: list[Source]) -> None:
    """Compare fms-fsdp's table of counts, where there is one, with the files; the files are right."""
    for table in sorted((folder / "meta").glob("*.csv")):
        with table.open(newline="") as file:
            rows = {row.get("dataset/filename", ""): row for row in csv.DictReader(file)}
        for source in sources:
            files, documents = source.index.part_file, np.diff(source.index.part_first)
            counts = np.bincount(files, weights=documents, minlength=len(source.index.names)).astype(int)
            for name, count in zip(source.index.names, counts.tolist(), strict=True):
                said = rows.get(f"{source.name}/{name}", rows.get(f"/{source.name}/{name}", {})).get("documents")
                if said is not None and int(float(said)) != count:
                    log.warning(
                        "%s says %s documents for %s/%s, which has %d; the file is trusted, not the table.",
                        table,
                        said,
                        source.name,
                        name,
                        count,
                    )
