"""What is in a folder of tokens: formats, documents, lengths, and how far training on it can scale."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_parm.data.shards import count_shards
from lightning_parm.data.sources.registry import open_sources
from lightning_parm.data.sources.source import Source

_SCANNED_TOKENS = 1 << 28


def inspect(
    path: str,
    sequence_length: int = 2048,
    num_logical_shards: int = 1024,
    delimiter: int | None = None,
    format: str | None = None,
    dtype: str | None = None,
    plot: str | None = None,
    cache_folder: str | None = None,
) -> dict[str, Any]:
    """Look into token data without changing it.

    Args:
        path: a file, folder, pattern or URL; a folder of folders is a mix with a source for each.
        sequence_length: tokens a sample, for counting windows and logical shards.
        num_logical_shards: what training would be given.
        delimiter: token between documents, where the files do not say it.
        format: name of the format, where it cannot be detected.
        dtype: integer type of raw files.
        plot: file to draw the histogram of document lengths into (needs matplotlib).
        cache_folder: where the index is kept; by default ~/.cache/lightning_parm.

    Returns:
        ``sources``, a list with one entry a source, and their ``tokens`` and ``documents`` in all.

    Raises:
        ValueError: nothing readable is at ``path``.
    """
    sources = open_sources(path, delimiter, "skip", format, dtype, cache_folder)
    described = [_describe(source, sequence_length, num_logical_shards) for source in sources]
    if plot is not None:
        _draw(described, plot)
    return {
        "path": path,
        "sequence_length": sequence_length,
        "tokens": sum(entry["tokens"] for entry in described),
        "documents": sum(entry["documents"] for entry in described),
        "sources": described,
    }


def _describe(source: Source, sequence_length: int, num_logical_shards: int) -> dict[str, Any]:
    shards = count_shards(source.num_tokens, sequence_length, num_logical_shards)
    lengths = source.kept
    largest, delimiters, scanned = _scan(source)
    edges = 2 ** np.arange(0, int(lengths.max(initial=1)).bit_length() + 1)
    return {
        "name": source.name,
        "format": source.format.name,
        "files": len(source.index.names),
        "skipped": [list(entry) for entry in source.index.skipped],
        "documents": source.num_documents,
        "empty_documents": len(source.index.lengths) - source.num_documents,
        "tokens": source.num_tokens,
        "dtype": "/".join(dict.fromkeys(source.index.dtypes)),
        "delimiter": source.delimiter,
        "delimiter_share": round(delimiters / max(scanned, 1), 6),
        "largest_id": largest,
        "scanned_tokens": scanned,
        "lengths": {
            "min": int(lengths.min(initial=0) if not len(lengths) else lengths.min()),
            "median": float(np.median(lengths)) if len(lengths) else 0.0,
            "mean": round(float(lengths.mean()), 1) if len(lengths) else 0.0,
            "max": int(lengths.max(initial=0)),
        },
        "histogram": {"edges": edges.tolist(), "counts": np.histogram(lengths, edges)[0].tolist()},
        "windows": max(0, (source.num_tokens - 1) // sequence_length),
        "logical_shards": shards,
        "largest_data_parallel_size": shards,
    }


def _scan(source: Source) -> tuple[int, int, int]:
    """Return the largest id, the delimiters as they will be served, and the tokens looked at (all, or an even part)."""
    parts = len(source.index.part_file)
    step = -(-source.num_tokens // _SCANNED_TOKENS)
    largest = -1 if source.delimiter is None or not source.num_documents else source.delimiter
    inner, scanned, documents = 0, 0, 0
    for part in range(0, parts, max(step, 1)):
        tokens = source.part_tokens(part)
        count = int(source.part_first[part + 1] - source.part_first[part])
        if not len(tokens) or not count:
            continue
        largest = max(largest, int(tokens.max()))
        documents += count
        scanned += int(source.ends[source.part_first[part + 1]] - source.ends[source.part_first[part]])
        if source.delimiter is not None:
            closed = source.index.last[source.index.part_first[part] : source.index.part_first[part + 1]]
            inner += int((tokens == source.delimiter).sum()) - int((closed == source.delimiter).sum())
    return largest, inner + documents * (source.delimiter is not None), scanned


def render(result: dict[str, Any]) -> Any:
    """Return rich tables of what :func:`inspect` found."""
    from rich.console import Group
    from rich.table import Table

    overview = Table(title=f"{result['path']}: {result['tokens']:,} tokens in {result['documents']:,} documents")
    for column in ("source", "format", "files", "documents", "tokens", "type", "largest id", "delimiter", "share"):
        overview.add_column(column, justify="left" if column in ("source", "format", "type") else "right")
    scale = Table(title=f"Training with sequence_length={result['sequence_length']:,}")
    for column in ("source", "windows an epoch", "logical shards", "largest useful data-parallel size"):
        scale.add_column(column, justify="left" if column == "source" else "right")
    histogram = Table(title="Document lengths in tokens")
    for column in ("source", "min", "median", "mean", "max", "from 1, 2, 4, 8, ... tokens on"):
        histogram.add_column(column, justify="right" if column in ("min", "median", "mean", "max") else "left")
    notes = []
    for entry in result["sources"]:
        numbers = [f"{entry[key]:,}" for key in ("files", "documents", "tokens")]
        delimiter = "none" if entry["delimiter"] is None else str(entry["delimiter"])
        share = f"{entry['delimiter_share']:.2%}"
        overview.add_row(
            entry["name"], entry["format"], *numbers, entry["dtype"], f"{entry['largest_id']:,}", delimiter, share
        )
        scale.add_row(
            entry["name"], *(f"{entry[k]:,}" for k in ("windows", "logical_shards", "largest_data_parallel_size"))
        )
        lengths = entry["lengths"]
        texts = [f"{lengths[key]:,.0f}" for key in ("min", "median", "mean", "max")]
        histogram.add_row(entry["name"], *texts, _bars(entry["histogram"]["counts"]))
        notes += [f"skipped {entry['name']}/{name}, which {reason}" for name, reason in entry["skipped"]]
        if entry["empty_documents"]:
            notes.append(f"{entry['name']}: {entry['empty_documents']:,} empty documents are left out")
    return Group(overview, scale, histogram, *notes)


def _bars(counts: list[int]) -> str:
    """Return counts as a line of bars.

    >>> _bars([0, 1, 4, 8])
    ' ▁▄█'
    """
    highest = max(counts, default=0) or 1
    return "".join(" ▁▂▃▄▅▆▇█"[-(-8 * count // highest)] for count in counts)


def _draw(described: list[dict[str, Any]], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for entry in described:
        axes.stairs(entry["histogram"]["counts"], entry["histogram"]["edges"], label=entry["name"], linewidth=2)
    axes.set(xscale="log", xlabel="document length (tokens)", ylabel="documents")
    axes.legend()
    figure.savefig(path)
