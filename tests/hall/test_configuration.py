"""The strategy is chosen by environment, YAML, command line or Hydra, and a saved configuration runs again the same."""

import sys
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import yaml
from data.corpora import write_arrow
from distributed import run_ranks
from hall.models import RecordingGPT
from hall.trainers import OrderedTokens
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lightning.pytorch.cli import LightningCLI

from lightning_parm import ParmStrategy, TokenDataModule
from lightning_parm.models import GPT

# What Lightning and jsonargparse say of each other is not under test.
pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = {"vocab_size": 32, "num_layers": 1, "num_heads": 2, "model_dim": 16, "hidden_dim": 32, "num_experts": 4}
QUIET = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_progress_bar": False, "max_steps": 3}
QUIET |= {"enable_model_summary": False, "enable_checkpointing": False, "use_distributed_sampler": False}


def test_the_environment_names_the_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_STRATEGY", "parm_s2")
    strategy = L.Trainer(accelerator="cpu", devices=2, logger=False).strategy
    assert isinstance(strategy, ParmStrategy)
    assert strategy.schedule == "s2"


def parsed(*arguments: str) -> ParmStrategy:
    """The strategy of a LightningCLI that is given these arguments and runs nothing."""
    cli = LightningCLI(GPT, OrderedTokens, run=False, args=list(arguments), save_config_callback=None)
    strategy = cli.trainer.strategy
    assert isinstance(strategy, ParmStrategy)
    return strategy


def needed(folder: Path, **trainer: Any) -> str:
    """A configuration with everything but a strategy, or with one."""
    config = {"model": SMALL, "data": {"length": 24, "global_batch": 8}, "trainer": {**QUIET, **trainer}}
    (folder / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return f"--config={folder / 'run.yaml'}"


def test_yaml_names_the_class_or_the_registered_name(tmp_path: Path) -> None:
    sizes = {"tensor_parallel_size": 2, "schedule": "s1", "chunks": 2, "save_distributed_checkpoint": False}
    strategy = parsed(needed(tmp_path, strategy={"class_path": "lightning_parm.ParmStrategy", "init_args": sizes}))
    assert (strategy.tensor_parallel_size, strategy.schedule, strategy.chunks) == (2, "s1", 2)
    assert strategy.expert_parallel_size == "auto"
    assert parsed(needed(tmp_path, strategy="parm_s2")).schedule == "s2"


@pytest.mark.parametrize("name", ["lightning_parm.ParmStrategy", "ParmStrategy"])
def test_arguments_of_the_strategy_on_the_command_line(name: str, tmp_path: Path) -> None:
    nested = ("tensor_parallel_size=2", "expert_shard_size=1", "schedule=s1", "timeout=0:05:00")
    options = (f"--trainer.strategy={name}", *(f"--trainer.strategy.{each}" for each in nested))
    strategy = parsed(needed(tmp_path), *options)
    assert (strategy.tensor_parallel_size, strategy.expert_shard_size, strategy.schedule) == (2, 1, "s1")
    assert strategy._timeout is not None
    assert strategy._timeout.total_seconds() == 300


def test_a_value_that_does_not_exist_and_sizes_that_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "--trainer.strategy=lightning_parm.ParmStrategy"
    with pytest.raises(SystemExit, match="2"):
        parsed(needed(tmp_path), name, "--trainer.strategy.transport=three_hop")
    assert "three_hop" in capsys.readouterr().err
    with pytest.raises(ValueError, match="tensor_parallel_size=3 does not divide the 2 ranks"):
        parsed(needed(tmp_path), name, "--trainer.strategy.tensor_parallel_size=3")


def test_a_saved_configuration_runs_again_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "log"}}
    environment = {"class_path": "hall.trainers.ForkedEnvironment", "init_args": {"rank": 0, "world_size": 2}}
    strategy = {"class_path": "lightning_parm.ParmStrategy", "init_args": {"expert_parallel_size": 2}}
    config = needed(tmp_path, strategy=strategy, logger=logger, plugins=environment)

    def rank_main(rank: int, world_size: int, config: str, *more: str) -> list[float]:
        own = (f"--trainer.plugins.rank={rank}", "--trainer.strategy.calibrate=false")
        monkeypatch.setattr(sys, "argv", ["train.py"])
        cli = LightningCLI(RecordingGPT, OrderedTokens, args=["fit", config, *own, *more])
        return cli.model.losses

    first = run_ranks(2, rank_main, config, "--seed_everything=11")
    saved = tmp_path / "log" / "lightning_logs" / "version_0" / "config.yaml"
    assert yaml.safe_load(saved.read_text())["trainer"]["strategy"]["class_path"] == "lightning_parm.ParmStrategy"
    again = run_ranks(2, rank_main, f"--config={saved}")
    assert again == first
    assert len(set(first[0])) == 3


def test_hydra_builds_everything_from_plain_values(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    documents = [random.integers(0, 32, 50).astype(np.uint16) for _ in range(20)]
    for source in ("code", "prose"):
        write_arrow(tmp_path / "tokens" / source / "0.arrow", documents)
    sources = {source: str(tmp_path / "tokens" / source) for source in ("code", "prose")}
    config = {
        "model": {"_target_": "lightning_parm.models.GPT", **SMALL},
        "data": {
            "_target_": "lightning_parm.TokenDataModule",
            "sources": sources,
            "weights": [[0, {"code": 1, "prose": 0}], [800, {"code": 0, "prose": 1}]],
            "sequence_length": 8,
            "batch_size": 4,
            "cache_folder": str(tmp_path / "cache"),
        },
        "trainer": {
            "_target_": "lightning.Trainer",
            "strategy": {"_target_": "lightning_parm.ParmStrategy", "tensor_parallel_size": 2, "calibrate": False},
            "plugins": [{"_target_": "hall.trainers.ForkedEnvironment", "rank": "???", "world_size": 2}],
            **QUIET,
        },
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")

    def rank_main(rank: int, world_size: int) -> tuple[int, float]:
        with initialize_config_dir(str(tmp_path), version_base=None):
            built = compose("run", overrides=[f"trainer.plugins.0.rank={rank}"])
        torch.manual_seed(0)
        trainer, data = instantiate(built.trainer), instantiate(built.data)
        assert isinstance(data, TokenDataModule)
        trainer.fit(instantiate(built.model), data)
        trainer.save_checkpoint(tmp_path / "hydra.ckpt")
        return trainer.global_step, float(trainer.callback_metrics["train_loss"])

    first, second = run_ranks(2, rank_main)
    assert first == second
    assert first[0] == 3
    # Nothing of the configuration's own types is in the checkpoint.
    torch.load(tmp_path / "hydra.ckpt" / "meta.pt", weights_only=True)
