"""Speed of the token loader beside its peers, on the same tokens in the same run."""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from lightning_parm.bench.peers import Batches, Packed, delivered, peers
from lightning_parm.data import TokenLoader


def loader(
    tokens: int = 100_000_000,
    mean_length: int = 600,
    sequence_length: int = 4096,
    batch_size: int = 8,
    num_workers: int = 2,
    rounds: int = 3,
    seconds: float = 2.0,
    files: int = 2000,
    folder: str | None = None,
) -> dict[str, Any]:
    """Measure tokens a second of the loader and of what else is installed, and the loader's set-up, resume and memory.

    Contestants take turns, and the median of their rounds counts, because machines are shared. All read the same
    tokens from a warm page cache, in batches of as many; the mixing and shuffling of ours is on.

    Args:
        tokens: tokens in the corpus, in two sources.
        mean_length: mean length of a document, in tokens.
        sequence_length: tokens a sample.
        batch_size: samples a batch.
        num_workers: workers of the second half of the contest.
        rounds: how often each contestant runs.
        seconds: how long a round is.
        files: files of the set-up measurement, of 100 documents each.
        folder: where to write the corpus; by default a temporary folder, removed afterwards.
    """
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(folder or temporary)
        sources = _write_corpus(root, tokens, mean_length)
        options: dict[str, Any] = {"cache_folder": str(root / "cache"), "weights": {"a": 0.6, "b": 0.4}}
        shape = (sequence_length, batch_size)
        ours = {
            f"lightning_parm, {n} workers": _ours(sources, *shape, n, options) for n in dict.fromkeys((0, num_workers))
        }
        contestants, skipped = peers(Packed(root / "flat.bin", sequence_length), batch_size, num_workers, root)
        rates, failed = _race({**ours, **contestants}, sequence_length * batch_size, rounds, seconds)
        names = list(ours)
        plain = rates["torch DataLoader over a memmap, 0 workers"]
        with_workers = [rate for name, rate in rates.items() if name not in ours and f", {num_workers} workers" in name]
        return {
            "tokens": tokens,
            "tokens_per_second": rates,
            "skipped": skipped | failed,
            "ratio_to_plain_memmap": round(rates[names[0]] / plain, 2),
            "ratio_to_best_peer_with_workers": round(rates[names[-1]] / max(with_workers), 2) if with_workers else None,
            "resume": _resume(sources, *shape, num_workers, options),
            "set_up": _set_up(root / "many", files),
            "memory": _memory(sources, *shape, options),
        }


def _write_corpus(root: Path, tokens: int, mean_length: int) -> dict[str, str]:
    rng = np.random.default_rng(0)
    sources = {}
    with (_made(root) / "flat.bin").open("wb") as flat:
        for name, share in (("a", 0.7), ("b", 0.3)):
            lengths = 1 + rng.exponential(mean_length, int(tokens * share / mean_length)).astype(np.int64)
            values = rng.integers(1, 50_000, int(lengths.sum()), dtype=np.uint16)
            values.tofile(flat)
            _write_arrow(_made(root / name) / "0.arrow", values, lengths)
            sources[name] = str(root / name)
    return sources


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write_arrow(path: Path, values: Any, lengths: Any) -> None:
    schema = pa.schema([pa.field("tokens", pa.list_(pa.uint16()))], metadata={"delimiter": "0"})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        for start in range(0, len(lengths), 1000):
            stop = min(start + 1000, len(lengths))
            chunk = pa.array(values[bounds[start] : bounds[stop]])
            offsets = pa.array((bounds[start : stop + 1] - bounds[start]).astype(np.int32))
            writer.write_batch(pa.record_batch([pa.ListArray.from_arrays(offsets, chunk)], schema=schema))


def _ours(sources: dict[str, str], length: int, batch_size: int, workers: int, options: dict[str, Any]) -> Batches:
    def batches() -> Iterator[Any]:
        stream = TokenLoader(sources, length, batch_size, num_workers=workers, **options)
        while True:
            yield stream.next_batch()

    return batches


def _race(
    contestants: dict[str, Batches], tokens_a_batch: int, rounds: int, seconds: float
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the median of each contestant's rates, in tokens a second, and why some have none."""
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    failed: dict[str, str] = {}
    for _ in range(rounds):
        for name, start in contestants.items():
            if name in failed:
                continue
            try:
                rates[name].append(_rate(start(), tokens_a_batch, seconds))
            except Exception as error:  # a peer that does not run here is a result, not a failure of ours
                if "lightning_parm" in name:
                    raise
                failed[name] = f"{type(error).__name__}: {error}"[:200]
    return {name: float(round(statistics.median(rates[name]))) for name in contestants if name not in failed}, failed


def _rate(stream: Iterator[Any], tokens_a_batch: int, seconds: float) -> float:
    for _ in range(20):
        found = delivered(next(stream))
        if found != tokens_a_batch:
            raise RuntimeError(f"a batch of {found} tokens where {tokens_a_batch} were asked for")
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        next(stream)
        count += 1
    return count * tokens_a_batch / (time.perf_counter() - began)


def _resume(
    sources: dict[str, str], length: int, batch_size: int, workers: int, options: dict[str, Any]
) -> dict[str, float]:
    """Time from a checkpoint in the middle of 2.4 million samples to the first batch, on other ranks and workers."""
    state = TokenLoader(sources, length, batch_size, 1, 4, **options).state_dict(samples=1_200_000)
    measured = {}
    for count in dict.fromkeys((0, workers)):
        times = []
        for _ in range(5):
            stream = TokenLoader(sources, length, batch_size, 2, 3, num_workers=count, **options)
            began = time.perf_counter()
            stream.load_state_dict(state)
            stream.next_batch()
            times.append(time.perf_counter() - began)
        measured[f"first_batch_seconds_{count}_workers"] = round(statistics.median(times), 4)
    return measured


def _set_up(root: Path, files: int) -> dict[str, float]:
    """Time until the first batch from many files of 100 documents, without and with a kept index."""
    lengths = np.full(100, 20)
    values = np.ones(2000, dtype=np.uint16)
    for number in range(files):
        _write_arrow(_made(root / "data") / f"{number:05}.arrow", values, lengths)
    times = []
    for _ in range(6):
        began = time.perf_counter()
        TokenLoader(str(root / "data"), 1024, 8, cache_folder=str(root / "cache")).next_batch()
        times.append(time.perf_counter() - began)
    warm = round(statistics.median(times[1:]), 3)
    return {"files": files, "documents": 100 * files, "cold_seconds": round(times[0], 3), "warm_seconds": warm}


def _memory(sources: dict[str, str], length: int, batch_size: int, options: dict[str, Any]) -> dict[str, int] | None:
    """Return by how many bytes a process grows that opens the corpus and reads one epoch, above its imports.

    ``anonymous`` is its own memory. ``mapped`` is pages of the files, which the system takes back when it needs them.
    """
    context = multiprocessing.get_context("spawn")
    result, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_read_an_epoch, args=(theirs, sources, length, batch_size, options))
    process.start()
    theirs.close()
    try:
        grown: dict[str, int] | None = result.recv()
    finally:
        process.join()
    return grown


def _read_an_epoch(result: Any, sources: dict[str, str], length: int, batch_size: int, options: dict[str, Any]) -> None:
    before = _resident_bytes()
    stream = TokenLoader(sources, length, batch_size, **options)
    for _ in stream:
        pass
    after = _resident_bytes()  # while the stream still holds what it holds
    result.send({name: max(0, after[name] - size) for name, size in before.items()} or None)


def _resident_bytes() -> dict[str, int]:
    """Return this process's memory by kind, or nothing where the system does not say it."""
    kinds = {"RssAnon": "anonymous", "RssFile": "mapped"}
    try:
        lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    except OSError:
        return {}
    return {kinds[words[0][:-1]]: int(words[1]) * 1024 for words in lines if words and words[0][:-1] in kinds}


def render(result: dict[str, Any]) -> Any:
    """Return rich tables of what :func:`loader` measured."""
    from rich.console import Group
    from rich.table import Table

    race = Table(title=f"Token loaders, {result['tokens']:,} tokens, page cache warm")
    race.add_column("loader")
    race.add_column("million tokens/s", justify="right")
    for name, rate in sorted(result["tokens_per_second"].items(), key=lambda item: -item[1]):
        race.add_row(name, f"{rate / 1e6:,.0f}")
    facts = Table(title="And besides", show_header=False)
    facts.add_row("ours to a plain DataLoader over a memmap, no workers", f"{result['ratio_to_plain_memmap']} x")
    facts.add_row("ours to the best peer with workers", f"{result['ratio_to_best_peer_with_workers']} x")
    for name, value in result["resume"].items():
        facts.add_row(f"resume: {name.replace('_', ' ')}", f"{value * 1000:.1f} ms")
    set_up = result["set_up"]
    facts.add_row(
        f"first batch of {set_up['files']:,} files, index to be made / made",
        f"{set_up['cold_seconds']} / {set_up['warm_seconds']} s",
    )
    for name, size in (result["memory"] or {}).items():
        facts.add_row(f"{name} memory above the imports, over an epoch", f"{size / 1e6:.0f} MB")
    return Group(race, facts, *(f"skipped {name}: {reason}" for name, reason in result["skipped"].items()))
