"""Real launchers: each starts its ranks, trains the same numbers, and ends all of them when one fails."""

import json
import re
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import Finished, run_command, run_ranks
from hall.models import small_gpt
from hall.trainers import OrderedTokens, make_trainer

from lightning_parm import ParmStrategy

SCRIPT = """
import json, os, signal, sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from datetime import timedelta
import lightning as L
from hall.models import RecordingGPT, small_gpt
from hall.trainers import OrderedTokens
from lightning_parm import ParmStrategy

class Model(RecordingGPT):
    def on_train_batch_start(self, batch, batch_idx):
        if {fails!r} and self.trainer.global_rank == {failing_rank} and batch_idx == 1:
            if {fails!r} == "ValueError":
                raise ValueError("a rank fails on purpose")
            os.kill(os.getpid(), getattr(signal, {fails!r}))
    def on_train_end(self):
        with open(f"{folder}/{{self.trainer.global_rank}}.json", "w") as file:
            json.dump(self.losses, file)

if __name__ == "__main__":
    model = small_gpt(torch.float64, cls=Model)
    for fit in range({fits}):
        strategy = ParmStrategy(start_method={start_method!r}, timeout=timedelta(seconds=60), calibrate=False)
        trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices={devices}, num_nodes={nodes}, max_steps=3,
            logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
            use_distributed_sampler=False)
        trainer.fit(model, OrderedTokens(24, 8))
        weights = model.blocks[0].feed_forward.experts.w_out
        total = float(weights.detach().sum()) if {start_method!r} != "popen" else 0.0
        sys.stdout.write(f"EXPERTS {{weights.shape[0]}} {{total}}\\n")  # at once, for ranks share the pipe
"""
TORCHRUN = ("-m", "torch.distributed.run")
#: What Lightning and torch say of themselves whatever the strategy.
ACCEPTED = re.compile(
    "does not have many workers|treespec, LeafSpec|Redirects are currently not supported|multi-threaded, use of fork"
)


def launch(
    folder: Path,
    prefix: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
    fresh: bool = True,
    **settings: Any,
) -> Finished:
    defaults = {
        "start_method": "popen",
        "fails": "",
        "failing_rank": 1,
        "fits": 2,
        "devices": 2,
        "nodes": 1,
        "timeout": 60,
    }
    script = folder / f"train{(environment or {}).get('SLURM_PROCID', '')}.py"
    tests = str(Path(__file__).parent.parent)
    script.write_text(SCRIPT.format(folder=folder, tests=tests, **{**defaults, **settings}))
    result = run_command([sys.executable, *prefix, str(script)], environment=environment, timeout=200, fresh=fresh)
    assert result.survivors == [], "no child is left behind"
    return result


def warnings_of(result: Finished) -> list[str]:
    lines = result.stderr.splitlines()
    return [line for line in lines if re.search("[wW]arning", line) and not ACCEPTED.search(line)]


def losses(folder: Path, ranks: int = 2) -> list[list[float]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def by_popen(tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    folder = tmp_path_factory.mktemp("popen")
    result = launch(folder)
    assert result.returncode == 0, result.stderr
    assert warnings_of(result) == []
    assert "EXPERTS 2" in result.stdout, "each of two ranks holds two of four experts"
    assert [len(each) for each in losses(folder)] == [6, 6], "two fits of three steps in each of the processes"
    return losses(folder)


def test_the_second_fit_of_a_process_goes_on_with_the_model(by_popen: list[list[float]]) -> None:
    model = small_gpt(torch.float64)
    for _ in range(2):
        make_trainer(0, 1, max_steps=3).fit(model, OrderedTokens(24, 8))
    torch.testing.assert_close(by_popen[0], model.losses, rtol=0, atol=1e-10)


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_spawned_and_forked_ranks_train_the_same_and_return_whole_weights(
    start_method: str, tmp_path: Path, by_popen: list[list[float]]
) -> None:
    result = launch(tmp_path, start_method=start_method, fits=1)
    assert result.returncode == 0, result.stderr
    assert warnings_of(result) == []
    assert "EXPERTS 4" in result.stdout
    assert losses(tmp_path) == [each[:3] for each in by_popen]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_torchrun(tmp_path: Path, by_popen: list[list[float]]) -> None:
    result = launch(tmp_path, (*TORCHRUN, "--standalone", "--nproc_per_node=2"))
    assert result.returncode == 0, result.stderr
    assert losses(tmp_path) == by_popen


def test_two_nodes_of_two_ranks_by_two_agents_of_torchrun(tmp_path: Path, by_popen: list[list[float]]) -> None:
    agents = (*TORCHRUN, "--nnodes=2", "--nproc_per_node=2", "--master_addr=127.0.0.1", f"--master_port={free_port()}")
    with ThreadPoolExecutor(2) as pool:
        nodes = [
            pool.submit(launch, tmp_path, (*agents, f"--node_rank={node}"), fresh=False, nodes=2, fits=1)
            for node in range(2)
        ]
        for node in nodes:
            assert node.result().returncode == 0, node.result().stderr
            assert "EXPERTS 1" in node.result().stdout
    for each in losses(tmp_path, 4):
        torch.testing.assert_close(each, by_popen[0][:3], rtol=0, atol=1e-10)


def test_tasks_of_slurm(tmp_path: Path, by_popen: list[list[float]]) -> None:
    job = {"SLURM_JOB_ID": "70001", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    job |= {"SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_NODELIST": "localhost", "MASTER_PORT": str(free_port())}
    with ThreadPoolExecutor(2) as pool:
        each_task = [{**job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
        tasks = [pool.submit(launch, tmp_path, (), environment, fresh=False) for environment in each_task]
        for task in tasks:
            assert task.result().returncode == 0, task.result().stderr
    assert losses(tmp_path) == by_popen


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_numbers_of_devices(devices: int, by_popen: list[list[float]]) -> None:
    def rank_main(rank: int, world_size: int) -> list[float]:
        model = small_gpt(torch.float64)
        make_trainer(rank, world_size, ParmStrategy(), max_steps=3).fit(model, OrderedTokens(24, 8))
        return model.losses

    for ours in run_ranks(devices, rank_main):
        torch.testing.assert_close(ours, by_popen[0][:3], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("fails", "failing_rank", "says"),
    [
        ("ValueError", 1, "ValueError: a rank fails on purpose"),
        ("SIGKILL", 0, "by peer"),
        ("SIGKILL", 1, "by peer"),
        ("SIGTERM", 0, "Received SIGTERM: 15"),
        ("SIGTERM", 1, "Received SIGTERM: 15"),
    ],
)
def test_the_end_of_one_rank_is_the_end_of_all(fails: str, failing_rank: int, says: str, tmp_path: Path) -> None:
    result = launch(tmp_path, fresh=fails == "ValueError", fails=fails, failing_rank=failing_rank, fits=1)
    assert says in result.stderr
    if fails == "SIGTERM":  # all ranks end after the same batch, which Lightning calls success
        assert result.returncode == 0
        assert "Traceback" not in result.stderr
    else:
        assert result.returncode != 0
    assert not list(tmp_path.glob("*.json")), "no rank went on to the end"


GARBAGE = """
import gc, tempfile
import torch.distributed as dist
import lightning as L
from lightning.fabric import Fabric
from lightning.pytorch.demos.boring_classes import BoringModel
import lightning_parm

def leave_a_group_as_garbage():
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
    kept = [dist.group.WORLD, dist.new_group([0])]
    kept.append(kept)
    dist.destroy_process_group()

class Collects(BoringModel):
    def on_train_start(self):
        gc.collect()

if __name__ == "__main__":
    gc.disable()
    leave_a_group_as_garbage()
    Fabric(accelerator="cpu", devices=2, strategy="parm_fork").launch(lambda fabric: gc.collect())
    leave_a_group_as_garbage()
    trainer = L.Trainer(strategy="parm_fork", accelerator="cpu", devices=2, max_steps=1, logger=False,
        limit_val_batches=0, enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False)
    trainer.fit(Collects())
"""


def test_forked_ranks_do_not_collect_what_an_earlier_run_has_left(tmp_path: Path) -> None:
    # a group has threads, which only the process that made it has: a rank that collects it dies
    (tmp_path / "script.py").write_text(GARBAGE)
    finished = run_command([sys.executable, str(tmp_path / "script.py")], cwd=tmp_path, timeout=120, fresh=False)
    assert finished.returncode == 0, finished.stderr
