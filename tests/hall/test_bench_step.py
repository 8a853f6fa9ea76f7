"""The benchmark of a dense step trains the same under both strategies and reports medians."""

import json
import sys

import pytest
from distributed import run_command

from lightning_parm.bench.step import render, step

TINY = ["--num-layers=1", "--model-dim=16", "--hidden-dim=16", "--vocab-size=32", "--sequence-length=8"]


def test_one_command_times_both_strategies_in_turns() -> None:
    result = run_command(
        [sys.executable, "-m", "lightning_parm", "bench", "step", *TINY, "--steps=5", "--rounds=2", "--json"],
        fresh=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.survivors == []
    measured = json.loads(result.stdout)
    assert [row["strategy"] for row in measured["strategies"]] == ["ddp", "parm"]
    for row in measured["strategies"]:
        lowest, highest = row["round_ms"]
        assert 0 < lowest <= highest
        assert 0 < row["median_ms"] < 1e5
        assert 0 < row["cpu_ms"] < 1e5
    assert measured["ratio"] > 0
    assert measured["cpu_ratio"] > 0
    assert measured["loss_difference"] == 0, "both strategies compute the same numbers, bit by bit"
    table = render(measured)
    assert table.row_count == 2
    assert f"{measured['ratio']:.3f} times as long as ddp, and {measured['cpu_ratio']:.3f}" in str(table.caption)


def test_runs_too_short_to_time() -> None:
    with pytest.raises(ValueError, match=r"ranks=1 must be at least 2, steps=20 at least 5, and rounds=5 at least 1"):
        step(ranks=1)
