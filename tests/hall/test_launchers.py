"""Real launchers: each starts its ranks, trains the same numbers, and ends all of them when one fails."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from datetime import timedelta
import lightning as L
from hall.models import RecordingGPT, small_gpt
from hall.trainers import OrderedTokens
from lightning_parm import ParmStrategy
import lightning_parm.strategy

class Model(RecordingGPT):
    def on_train_batch_start(self, batch, batch_idx):
        if {fail} and self.trainer.global_rank == 1 and batch_idx == 1:
            raise ValueError("rank 1 fails on purpose")
    def on_train_end(self):
        with open(f"{folder}/{{self.trainer.global_rank}}.json", "w") as file:
            json.dump(self.losses, file)

if __name__ == "__main__":
    model = small_gpt(cls=Model)
    strategy = ParmStrategy(start_method={start_method!r}, timeout=timedelta(seconds=30), calibrate=False)
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_steps=3,
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        use_distributed_sampler=False)
    trainer.fit(model, OrderedTokens(24, 8))
    weights = model.blocks[0].feed_forward.experts.w_out
    print("EXPERTS", weights.shape[0], float(weights.sum()) if {start_method!r} != "popen" else 0.0)
"""


def launch(
    folder: Path, start_method: str = "popen", prefix: tuple[str, ...] = (), fail: bool = False
) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    tests = str(Path(__file__).parent.parent)
    script.write_text(SCRIPT.format(folder=folder, tests=tests, fail=fail, start_method=start_method))
    command = [sys.executable, *prefix, str(script)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )


def losses(folder: Path) -> list[list[float]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def by_popen(tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    folder = tmp_path_factory.mktemp("popen")
    result = launch(folder)
    assert result.returncode == 0, result.stderr
    assert "EXPERTS 2" in result.stdout, "each of two ranks holds two of four experts"
    return losses(folder)


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_spawned_and_forked_ranks_train_the_same_and_return_whole_weights(
    start_method: str, tmp_path: Path, by_popen: list[list[float]]
) -> None:
    result = launch(tmp_path, start_method)
    assert result.returncode == 0, result.stderr
    assert losses(tmp_path) == by_popen
    assert "EXPERTS 4" in result.stdout


def test_torchrun(tmp_path: Path, by_popen: list[list[float]]) -> None:
    result = launch(tmp_path, prefix=("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"))
    assert result.returncode == 0, result.stderr
    assert losses(tmp_path) == by_popen


def test_an_exception_on_one_rank_ends_all_with_its_traceback(tmp_path: Path) -> None:
    started = time.monotonic()
    result = launch(tmp_path, fail=True)
    assert result.returncode != 0
    assert "ValueError: rank 1 fails on purpose" in result.stderr
    assert time.monotonic() - started < 150
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False)
    assert left.stdout == "", "no child is left behind"
