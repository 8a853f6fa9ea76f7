"""Speed of the token loader beside its peers, on the same tokens in the same run."""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_parm.data import TokenLoader, open_sources

Batches = Callable[[], Iterator[Any]]


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
    """Measure tokens a second, set-up, resume and memory of the loader and of what else is installed.

    Contestants take turns, and the median of their rounds counts, because machines are shared. All read the same
    tokens from a warm page cache; the mixing and shuffling of ours is on.

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
        memory = _memory(
            sources, sequence_length, batch_size, options
        )  # first, while nothing else has grown the process
        flat = root / "flat.bin"
        shape = (sequence_length, batch_size)
        ours = {
            f"lightning_parm, {n} workers": _ours(sources, *shape, n, options) for n in dict.fromkeys((0, num_workers))
        }
        contestants, skipped = _peers(flat, *shape, num_workers, root)
        rates = _race({**ours, **contestants}, sequence_length * batch_size, rounds, seconds)
        names = list(ours)
        plain = rates["torch DataLoader over a memmap, 0 workers"]
        with_workers = [rate for name, rate in rates.items() if name not in ours and f", {num_workers} workers" in name]
        return {
            "tokens": tokens,
            "tokens_per_second": rates,
            "skipped": skipped,
            "ratio_to_plain_memmap": round(rates[names[0]] / plain, 2),
            "ratio_to_best_peer_with_workers": round(rates[names[-1]] / max(with_workers), 2) if with_workers else None,
            "resume": _resume(sources, *shape, num_workers, options),
            "set_up": _set_up(root / "many", files),
            "anonymous_memory_bytes": memory,
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


class _Packed(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """What a careful user writes by hand: windows of one flat file."""

    def __init__(self, flat: Path, length: int) -> None:
        self.tokens = np.memmap(flat, dtype=np.uint16, mode="r")
        self.length = length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.length
        window = torch.from_numpy(self.tokens[start : start + self.length + 1].astype(np.int64))
        return window[:-1], window[1:]


def _peers(
    flat: Path, length: int, batch_size: int, workers: int, root: Path
) -> tuple[dict[str, Batches], dict[str, str]]:
    """Return the peers that are installed, ready to run, and why the others are not."""
    packed = _Packed(flat, length)

    def plain(num_workers: int) -> Batches:
        return lambda: _for_ever(DataLoader(packed, batch_size, shuffle=True, num_workers=num_workers))

    contestants = {f"torch DataLoader over a memmap, {n} workers": plain(n) for n in dict.fromkeys((0, workers))}
    skipped = {}
    for name, package, prepare in (
        (f"torchdata StatefulDataLoader, {workers} workers", "torchdata", _torchdata),
        (f"torchdata.nodes, {workers} workers", "torchdata", _torchdata_nodes),
        (f"MosaicML streaming, {workers} workers", "streaming", _mosaic),
        (f"litdata, {workers} workers", "litdata", _litdata),
    ):
        if importlib.util.find_spec(package) is None:
            skipped[name] = f"{package} is not installed"
            continue
        try:
            contestants[name] = prepare(packed, batch_size, workers, root)
        except Exception as error:  # a peer that does not run here is a result, not a failure of ours
            skipped[name] = f"{type(error).__name__}: {error}"[:200]
    return contestants, skipped


def _torchdata(packed: _Packed, batch_size: int, workers: int, root: Path) -> Batches:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return lambda: _for_ever(StatefulDataLoader(packed, batch_size, shuffle=True, num_workers=workers))


def _torchdata_nodes(packed: _Packed, batch_size: int, workers: int, root: Path) -> Batches:
    from torch.utils.data import RandomSampler, default_collate
    from torchdata import nodes

    def batches() -> Iterator[Any]:
        sampled: Any = nodes.Batcher(nodes.SamplerWrapper(RandomSampler(packed)), batch_size)

        def read(indices: list[int]) -> Any:
            return default_collate([packed[index] for index in indices])

        return _for_ever(nodes.Loader(nodes.ParallelMapper(sampled, read, num_workers=workers, method="process")))

    return batches


def _mosaic(packed: _Packed, batch_size: int, workers: int, root: Path) -> Batches:
    from streaming import MDSWriter, StreamingDataset

    target = root / "mds"
    if not target.exists():
        with MDSWriter(out=str(target), columns={"tokens": f"ndarray:uint16:{packed.length}"}) as writer:
            for start in range(0, len(packed) * packed.length, packed.length):
                writer.write({"tokens": np.asarray(packed.tokens[start : start + packed.length])})

    def collate(rows: list[dict[str, Any]]) -> torch.Tensor:
        return torch.from_numpy(np.stack([row["tokens"] for row in rows]).astype(np.int64))

    def batches() -> Iterator[Any]:
        data = StreamingDataset(local=str(target), shuffle=True, batch_size=batch_size)
        return _for_ever(DataLoader(data, batch_size, num_workers=workers, collate_fn=collate))

    return batches


def _litdata(packed: _Packed, batch_size: int, workers: int, root: Path) -> Batches:
    import litdata
    from litdata.streaming.item_loader import TokensLoader

    target = root / "litdata"
    if not target.exists():
        size = packed.length * 64
        pieces = [int(start) for start in range(0, len(packed.tokens) - size, size)]

        def read(start: int) -> Iterator[torch.Tensor]:
            yield torch.from_numpy(packed.tokens[start : start + size].astype(np.int32))

        litdata.optimize(read, pieces, str(target), chunk_bytes="64MB", num_workers=1, item_loader=TokensLoader())

    def batches() -> Iterator[Any]:
        data = litdata.StreamingDataset(
            str(target), item_loader=TokensLoader(block_size=packed.length + 1), shuffle=True, drop_last=True
        )
        return _for_ever(litdata.StreamingDataLoader(data, batch_size=batch_size, num_workers=workers))

    return batches


def _for_ever(batches: Any) -> Iterator[Any]:
    while True:
        yield from batches


def _race(contestants: dict[str, Batches], tokens_a_batch: int, rounds: int, seconds: float) -> dict[str, float]:
    """Return the median of each contestant's rates, in tokens a second."""
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, start in contestants.items():
            stream = start()
            for _ in range(20):
                next(stream)
            count, began = 0, time.perf_counter()
            while time.perf_counter() - began < seconds:
                next(stream)
                count += 1
            rates[name].append(count * tokens_a_batch / (time.perf_counter() - began))
            del stream
    return {name: float(round(statistics.median(values))) for name, values in rates.items()}


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
    """Time to open many files of 100 documents, without and with a cached index."""
    lengths = np.full(100, 20)
    values = np.ones(2000, dtype=np.uint16)
    for number in range(files):
        _write_arrow(_made(root / "data") / f"{number:05}.arrow", values, lengths)
    times = []
    for _ in range(4):
        began = time.perf_counter()
        open_sources(str(root / "data"), cache_folder=str(root / "cache"))
        times.append(time.perf_counter() - began)
    warm = round(statistics.median(times[1:]), 3)
    return {"files": files, "documents": 100 * files, "cold_seconds": round(times[0], 3), "warm_seconds": warm}


def _memory(sources: dict[str, str], length: int, batch_size: int, options: dict[str, Any]) -> int | None:
    """Return how much memory of its own the process gains by opening the corpus and reading 500 batches."""
    before = _anonymous_bytes()
    stream = TokenLoader(sources, length, batch_size, **options)
    for _ in range(500):
        stream.next_batch()
    after = _anonymous_bytes()
    return None if before is None or after is None else max(0, after - before)


def _anonymous_bytes() -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), None)


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
        f"set-up of {set_up['files']:,} files, cold / warm", f"{set_up['cold_seconds']} / {set_up['warm_seconds']} s"
    )
    if result["anonymous_memory_bytes"] is not None:
        facts.add_row("memory above the imports", f"{result['anonymous_memory_bytes'] / 1e6:.0f} MB")
    return Group(race, facts, *(f"skipped {name}: {reason}" for name, reason in result["skipped"].items()))
