"""The benchmark of the loader: who does not run or delivers less is told, not timed."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch

from lightning_parm.bench import peers
from lightning_parm.bench.loader import loader, render


def shortened(packed, batch_size, workers, folder):
    return lambda: iter(lambda: torch.zeros(batch_size, packed.length), None)


def broken(packed, batch_size, workers, folder):
    raise OSError("no space left")


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_small_race(monkeypatch):
    rich = pytest.importorskip("rich.console")
    pytest.importorskip("torchdata")
    monkeypatch.setattr(peers, "_stateful", shortened)
    monkeypatch.setattr(peers, "_nodes", broken)
    result = loader(
        tokens=200_000, mean_length=50, sequence_length=64, batch_size=4, num_workers=1, rounds=1, seconds=0.05, files=3
    )
    rates = result["tokens_per_second"]
    assert set(rates) == {
        f"{name}, {workers} workers"
        for name in ("lightning_parm", "torch DataLoader over a memmap")
        for workers in (0, 1)
    }
    assert min(rates.values()) > 0
    assert result["skipped"]["torchdata StatefulDataLoader, 1 workers"] == (
        "RuntimeError: a batch of 252 tokens where 256 were asked for"
    )
    assert result["skipped"]["torchdata.nodes, 1 workers"] == "OSError: no space left"
    assert result["set_up"]["warm_seconds"] > 0
    assert 0 <= result["memory"]["anonymous"] < 100e6
    console = rich.Console(record=True, width=150, file=io.StringIO())
    console.print(render(result))
    text = console.export_text()
    assert "anonymous memory above the imports" in text
    assert "skipped torchdata.nodes, 1 workers: OSError: no space left" in text


def test_the_peers_tokens_are_those_of_the_file(tmp_path):
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "flat.bin")
    packed = peers.Packed(tmp_path / "flat.bin", 64)
    inputs, labels = packed[3]
    assert inputs.tolist() == list(range(192, 256))
    assert labels.tolist() == list(range(193, 257))
    assert len(packed) == 15
    assert peers.delivered({"input_ids": inputs}) == peers.delivered([inputs]) == 64
