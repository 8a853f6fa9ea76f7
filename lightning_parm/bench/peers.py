"""The token loaders that ours races with: each reads the same tokens, in batches of the same size."""

from __future__ import annotations

import importlib.util
import multiprocessing
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, default_collate

Batches = Callable[[], Iterator[Any]]


class Packed(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """What a careful user writes by hand: windows of one flat file of uint16."""

    def __init__(self, flat: Path, length: int) -> None:
        self.flat = flat
        self.tokens = np.memmap(flat, dtype=np.uint16, mode="r")
        self.length = length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = torch.from_numpy(self.window(index).astype(np.int64))
        return window[:-1], window[1:]

    def window(self, index: int) -> Any:
        """Return L + 1 tokens."""
        start = index * self.length
        return self.tokens[start : start + self.length + 1]


def peers(packed: Packed, batch_size: int, workers: int, folder: Path) -> tuple[dict[str, Batches], dict[str, str]]:
    """Return the loaders that are installed, ready to run, and why the others are not.

    Args:
        packed: the tokens.
        batch_size: B, windows a batch.
        workers: processes that read ahead, of all but the first.
        folder: where formats of the peers' own are written, once.
    """

    def plain(num_workers: int) -> Batches:
        return lambda: _for_ever(DataLoader(packed, batch_size, shuffle=True, num_workers=num_workers))

    contestants = {f"torch DataLoader over a memmap, {n} workers": plain(n) for n in dict.fromkeys((0, workers))}
    skipped = {}
    for label, package, prepare in (
        ("torchdata StatefulDataLoader", "torchdata", _stateful),
        ("torchdata.nodes", "torchdata", _nodes),
        ("MosaicML streaming", "streaming", _mosaic),
        ("litdata", "litdata", _litdata),
    ):
        name = f"{label}, {workers} workers"
        if importlib.util.find_spec(package) is None:
            skipped[name] = f"{package} is not installed"
            continue
        try:
            contestants[name] = prepare(packed, batch_size, workers, folder)
        except Exception as error:  # a peer that does not run here is a result, not a failure of ours
            skipped[name] = f"{type(error).__name__}: {error}"[:200]
    return contestants, skipped


def delivered(batch: Any) -> int:
    """Return how many tokens a batch gives a model to read: each row holds one more, the last label.

    >>> delivered(torch.zeros(8, 17)), delivered([torch.zeros(8, 16), torch.zeros(8, 16)])
    (128, 128)
    """
    if isinstance(batch, dict):
        return int(batch["input_ids"].numel())
    if isinstance(batch, torch.Tensor):
        return int(batch[:, 1:].numel())
    return int(batch[0].numel())


def _stateful(packed: Packed, batch_size: int, workers: int, folder: Path) -> Batches:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return lambda: _for_ever(StatefulDataLoader(packed, batch_size, shuffle=True, num_workers=workers))


def _nodes(packed: Packed, batch_size: int, workers: int, folder: Path) -> Batches:
    from torchdata import nodes

    def batches() -> Iterator[Any]:
        sampled: Any = nodes.Batcher(nodes.SamplerWrapper(RandomSampler(packed)), batch_size)
        read = partial(_collated, packed)
        return _for_ever(nodes.Loader(nodes.ParallelMapper(sampled, read, num_workers=workers, method="process")))

    return batches


def _collated(packed: Packed, indices: list[int]) -> Any:
    return default_collate([packed[index] for index in indices])


def _mosaic(packed: Packed, batch_size: int, workers: int, folder: Path) -> Batches:
    from streaming import StreamingDataset

    shards = _written(folder / "mds", _write_mds, packed.flat, packed.length)

    def batches() -> Iterator[Any]:
        data = StreamingDataset(local=str(shards), shuffle=True, batch_size=batch_size)
        return _for_ever(DataLoader(data, batch_size, num_workers=workers, collate_fn=_stacked))

    return batches


def _stacked(rows: list[dict[str, Any]]) -> torch.Tensor:
    return torch.from_numpy(np.stack([row["tokens"] for row in rows]).astype(np.int64))


def _write_mds(target: Path, flat: Path, length: int) -> None:
    from streaming import MDSWriter

    packed = Packed(flat, length)
    with MDSWriter(out=str(target), columns={"tokens": f"ndarray:uint16:{length + 1}"}) as writer:
        for index in range(len(packed)):
            writer.write({"tokens": np.asarray(packed.window(index))})


def _litdata(packed: Packed, batch_size: int, workers: int, folder: Path) -> Batches:
    import litdata
    from litdata.streaming.item_loader import TokensLoader

    chunks = _written(folder / "litdata", _write_litdata, packed.flat, packed.length)

    def batches() -> Iterator[Any]:
        blocks = TokensLoader(block_size=packed.length + 1)
        data = litdata.StreamingDataset(str(chunks), item_loader=blocks, shuffle=True, drop_last=True)
        return _for_ever(litdata.StreamingDataLoader(data, batch_size=batch_size, num_workers=workers))

    return batches


def _write_litdata(target: Path, flat: Path, length: int) -> None:
    import litdata
    from litdata.streaming.item_loader import TokensLoader

    size = (length + 1) * 64
    starts = range(0, len(Packed(flat, length).tokens) - size, size)
    litdata.optimize(
        fn=partial(_document, flat, size),
        inputs=list(starts),
        output_dir=str(target),
        chunk_bytes="64MB",
        num_workers=1,
        item_loader=TokensLoader(),
    )


def _document(flat: Path, size: int, start: int) -> Iterator[torch.Tensor]:
    yield torch.from_numpy(np.memmap(flat, dtype=np.uint16, mode="r")[start : start + size].astype(np.int32))


def _written(target: Path, write: Callable[[Path, Path, int], None], flat: Path, length: int) -> Path:
    """Return ``target`` after another process has written it: litdata changes how its process starts others."""
    if not target.exists():
        partial_ = target.with_name(f"{target.name}.partial")
        shutil.rmtree(partial_, ignore_errors=True)
        process = multiprocessing.get_context("spawn").Process(target=write, args=(partial_, flat, length))
        process.start()
        process.join()
        if process.exitcode != 0:
            raise RuntimeError(f"writing {target} ended with {process.exitcode}")
        partial_.rename(target)
    return target


def _for_ever(batches: Any) -> Iterator[Any]:
    while True:
        yield from batches
