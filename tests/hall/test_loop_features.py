"""What Lightning's loops offer works under ``parm``, the same on every rank: limits, stops, searches, logs."""

import csv
import json
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from distributed import run_command, run_ranks
from hall.models import RecordingGPT, small_gpt
from hall.trainers import OrderedTokens, RandomTokens, make_trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_parm import ParmStrategy

# Lightning's advice on runs this small is not under test; ranks inherit the filter.
pytestmark = pytest.mark.filterwarnings("ignore")

EP2 = {"expert_parallel_size": 2}
MP2 = {"tensor_parallel_size": 2, "expert_parallel_size": 1, "expert_shard_size": 2}
BATCHES = 8


class Tokens(OrderedTokens):
    """Eight batches to train on, four to evaluate, and a count of how often the loader was made."""

    def __init__(self) -> None:
        super().__init__(length=8 * BATCHES, global_batch=8)
        self.loaders = 0

    def train_dataloader(self) -> DataLoader:
        self.loaders += 1
        return super().train_dataloader()

    def val_dataloader(self) -> DataLoader:
        replicas = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
        sampler = DistributedSampler(RandomTokens(32), **replicas, shuffle=False)
        return DataLoader(RandomTokens(32), batch_size=8 // replicas["num_replicas"], sampler=sampler)

    test_dataloader = predict_dataloader = val_dataloader


class Counts(L.Callback):
    """How many batches of each kind ran, and how many validations."""

    def __init__(self) -> None:
        self.train = self.sanity = self.validation = self.validations = self.test = self.predict = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.train += 1

    def on_validation_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.sanity += trainer.sanity_checking
        self.validation += not trainer.sanity_checking

    def on_validation_end(self, trainer: L.Trainer, _: Any) -> None:
        self.validations += not trainer.sanity_checking

    def on_test_batch_end(self, *_: Any) -> None:
        self.test += 1

    def on_predict_batch_end(self, *_: Any) -> None:
        self.predict += 1


def fitted(
    rank: int, world_size: int, sizes: dict[str, Any], *callbacks: L.Callback, model: Any = None, **options: Any
) -> tuple[L.Trainer, Any, Counts, Tokens]:
    counts, data = Counts(), Tokens()
    model = small_gpt() if model is None else model
    defaults = {"max_epochs": 1, "num_sanity_val_steps": 0, "limit_val_batches": 1}
    if not options.get("barebones"):
        defaults["callbacks"] = [counts, *callbacks]
    trainer = make_trainer(rank, world_size, ParmStrategy(**sizes), **{**defaults, **options})
    trainer.fit(model, data)
    return trainer, model, counts, data


def same_on_two_ranks(function: Callable[..., Any], *args: Any) -> Any:
    first, second = run_ranks(2, function, *args)
    assert first == second
    return first


def test_limits_intervals_and_checks() -> None:
    def rank_main(rank: int, world_size: int) -> dict[str, tuple[int, ...]]:
        def counted(**options: Any) -> tuple[int, ...]:
            trainer, _, counts, data = fitted(rank, world_size, EP2, **options)
            return trainer.global_step, counts.validations, counts.validation, counts.sanity, data.loaders

        return {
            "an epoch": counted(),
            "sanity": counted(num_sanity_val_steps=2, limit_val_batches=1.0),
            "dev": counted(fast_dev_run=3),
            "limits": counted(limit_train_batches=3, limit_val_batches=0.5),
            "overfit": counted(overfit_batches=2, max_epochs=2),
            "interval": counted(val_check_interval=2),
            "share": counted(val_check_interval=0.5),
            "epochs": counted(check_val_every_n_epoch=2, max_epochs=4),
            "reload": counted(reload_dataloaders_every_n_epochs=2, max_epochs=4),
            "no time": counted(max_time=timedelta(0)),
            "anomalies": counted(detect_anomaly=True),
        }

    # steps, validations, validation batches, sanity batches, train loaders made
    assert same_on_two_ranks(rank_main) == {
        "an epoch": (8, 1, 1, 0, 1),
        "sanity": (8, 1, 4, 2, 1),
        "dev": (3, 1, 3, 0, 1),
        "limits": (3, 1, 2, 0, 1),
        "overfit": (4, 2, 4, 0, 1),  # Lightning validates on the same batches
        "interval": (8, 4, 4, 0, 1),
        "share": (8, 2, 2, 0, 1),
        "epochs": (32, 2, 2, 0, 1),
        "reload": (32, 4, 4, 0, 2),
        "no time": (0, 0, 0, 0, 1),
        "anomalies": (8, 1, 1, 0, 1),
    }


def test_barebones_trains_the_same_numbers() -> None:
    def rank_main(rank: int, world_size: int, barebones: bool) -> list[float]:
        return fitted(rank, world_size, EP2, barebones=barebones)[1].losses

    assert same_on_two_ranks(rank_main, True) == same_on_two_ranks(rank_main, False)


@pytest.mark.parametrize("sizes", [EP2, MP2], ids=["ep2", "mp2"])
def test_evaluation_equals_one_process(sizes: dict[str, Any]) -> None:
    def evaluated(trainer: L.Trainer) -> tuple[float, float, Tensor]:
        model, data = small_gpt(torch.float64), Tokens()
        (validated,) = trainer.validate(model, data, verbose=False)
        (tested,) = trainer.test(model, data, verbose=False)
        predicted = trainer.predict(model, data)
        return validated["val_loss"], tested["test_loss"], torch.cat(predicted)

    def rank_main(rank: int, world_size: int) -> tuple[float, float, Tensor]:
        return evaluated(make_trainer(rank, world_size, ParmStrategy(**sizes)))

    val_loss, test_loss, predicted = evaluated(make_trainer(0, 1))
    results = run_ranks(2, rank_main)
    for ours in results:
        assert ours[0] == pytest.approx(val_loss, abs=1e-6)
        assert ours[1] == pytest.approx(test_loss, abs=1e-6)
    if sizes is MP2:
        assert torch.equal(results[0][2], predicted)
        assert torch.equal(results[1][2], predicted)
    else:
        assert torch.equal(torch.stack([each[2] for each in results], dim=1).flatten(0, 1), predicted)


@pytest.mark.parametrize("sizes", [EP2, MP2], ids=["ep2", "mp2"])
def test_decisions_are_made_by_all_ranks_together(sizes: dict[str, Any], tmp_path: Path) -> None:
    class Watched(RecordingGPT):
        def on_validation_epoch_end(self) -> None:
            self.log("falls", 3.0 - self.current_epoch, sync_dist=True)
            self.log("rises", float(self.current_epoch), sync_dist=True)
            # Differs between ranks, as a metric that was not synchronised does.
            self.log("own", float(self.current_epoch * (self.trainer.global_rank == 1)))

    def rank_main(rank: int, world_size: int) -> list[Any]:
        keep = ModelCheckpoint(tmp_path, filename="{epoch}", monitor="falls", save_top_k=1)
        stop = EarlyStopping("rises", mode="min", patience=2)
        model = small_gpt(cls=Watched)
        options = {"max_epochs": 9, "limit_train_batches": 1, "enable_checkpointing": True}
        trainer, *_ = fitted(rank, world_size, sizes, keep, stop, model=model, **options)
        own = EarlyStopping("own", mode="min", patience=2)
        model = small_gpt(cls=Watched)
        other, *_ = fitted(rank, world_size, sizes, own, model=model, max_epochs=9, limit_train_batches=1)
        decide = trainer.strategy.reduce_boolean_decision
        votes = [decide(rank == 0), decide(True), decide(rank == 0, all=False), decide(False, all=False)]
        return [trainer.current_epoch, other.current_epoch, keep.best_model_path, votes]

    stopped, own_stopped, best, votes = same_on_two_ranks(rank_main)
    assert (stopped, own_stopped) == (3, 3)
    assert best == str(tmp_path / "epoch=2.ckpt"), "the monitored value fell in every epoch"
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["epoch=2.ckpt"]
    assert votes == [False, True, True, False]


def test_loggers_and_bars_are_rank_zeros(tmp_path: Path) -> None:
    def rank_main(rank: int, world_size: int) -> tuple[Any, ...]:
        loggers = [CSVLogger(tmp_path, "csv"), TensorBoardLogger(tmp_path, "board")]
        bar = TQDMProgressBar()
        options = {"logger": loggers, "log_every_n_steps": 2, "enable_progress_bar": True}
        fitted(rank, world_size, EP2, LearningRateMonitor("step"), bar, **options)
        rich = RichProgressBar(leave=True)
        fitted(rank, world_size, EP2, rich, enable_progress_bar=True)
        shown = [task.total for task in rich.progress.tasks] if rich.progress is not None else None
        return (bar.is_disabled, bar.train_progress_bar.total, bar.train_progress_bar.n), rich.is_enabled, shown

    (bar, enabled, shown), (other_bar, other_enabled, other_shown) = run_ranks(2, rank_main)
    assert bar == (False, BATCHES, BATCHES)
    assert enabled
    assert shown[0] == BATCHES
    assert other_bar[0], "the second rank draws nothing"
    assert (other_enabled, other_shown) == (False, None)
    assert [path.name for path in (tmp_path / "csv").iterdir()] == ["version_0"]
    with (tmp_path / "csv" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    rates = [float(row[key]) for row in rows for key in row if key.startswith("lr-AdamW") and row[key]]
    assert max(rates) == pytest.approx(0.02)
    assert len([row for row in rows if row["train_loss"]]) == BATCHES // 2
    assert len(list((tmp_path / "board" / "version_0").glob("events.*"))) == 1


def test_the_learning_rate_finder_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    def rank_main(rank: int, world_size: int) -> tuple[float, bool, list[float]]:
        model = small_gpt(torch.float64)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        trainer = make_trainer(rank, world_size, ParmStrategy(**EP2), max_epochs=3, default_root_dir=tmp_path)
        found = Tuner(trainer).lr_find(model, Tokens(), num_training=20, update_attr=True)
        equal = all(torch.equal(p, _cut(before[name], p, rank)) for name, p in model.named_parameters())
        suggested = found.suggestion()
        assert model.learning_rate == suggested
        with pytest.raises(ValueError, match="not supported with distributed strategies"):
            Tuner(trainer).scale_batch_size(model, datamodule=Tokens())
        model.losses.clear()
        trainer.fit(model, Tokens())
        return suggested, equal, model.losses

    suggested, equal, losses = same_on_two_ranks(rank_main)
    assert 1e-8 < suggested < 1
    assert equal
    assert len(losses) == 3 * BATCHES
    assert not list(tmp_path.glob(".lr_find*")), "its checkpoint is removed"


def _cut(whole: Tensor, like: Tensor, rank: int) -> Tensor:
    return whole if whole.shape == like.shape else whole.chunk(2)[rank]


def test_profilers_name_what_runs(tmp_path: Path) -> None:
    def rank_main(rank: int, world_size: int) -> tuple[int, set[str]]:
        simple, *_ = fitted(rank, world_size, EP2, profiler="simple", limit_train_batches=2)
        advanced = AdvancedProfiler(tmp_path, "advanced")
        fitted(rank, world_size, EP2, profiler=advanced, limit_train_batches=2)
        schedule = torch.profiler.schedule(wait=0, warmup=0, active=2)
        profiler = PyTorchProfiler(schedule=schedule, export_to_chrome=False)
        fitted(rank, world_size, EP2, profiler=profiler, limit_train_batches=2, limit_val_batches=0)
        key = "[Strategy]ParmStrategy.training_step"
        names = {event.name for event in profiler.function_events}
        return len(simple.profiler.recorded_durations[key]), names

    for rank, (steps, names) in enumerate(run_ranks(2, rank_main)):
        assert steps == 2
        report = (tmp_path / f"fit-advanced-{rank}.txt").read_text()
        assert "all_to_all" in report
        # torch itself names every collective, by what it is and by its backend
        assert {"c10d::alltoall_base_", "c10d::allreduce_", "gloo:all_to_all", "gloo:all_reduce"} <= names


def test_an_interrupt_ends_in_order() -> None:
    class Interrupted(RecordingGPT):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                raise KeyboardInterrupt

    def rank_main(rank: int, world_size: int) -> tuple[int, bool]:
        model = small_gpt(cls=Interrupted)
        with pytest.raises(SystemExit, match="1"):
            fitted(rank, world_size, EP2, model=model)
        hooks = any(p._post_accumulate_grad_hooks for p in model.parameters())
        plain = RecordingGPT.on_train_batch_start
        Interrupted.on_train_batch_start = plain
        fitted(rank, world_size, EP2, model=model)
        return len(model.losses), hooks

    assert same_on_two_ranks(rank_main) == (2 + BATCHES, False)


def block_trained(rank: int, world_size: int, compiles: bool) -> tuple[list[float], list[str]]:
    # Parts and not the LightningModule: dynamo cannot trace Lightning's `self.log`, under any strategy.
    model: Any = small_gpt(torch.float64, num_layers=1)
    if compiles:
        model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    trainer, *_ = fitted(rank, world_size, EP2, model=model, limit_train_batches=2, limit_val_batches=0)
    whole = trainer.strategy.whole_state_dict()
    return model.losses, [name for name, value in whole.items() if "experts" in name and len(value) == 4]


def test_a_compiled_block_trains_the_same_numbers() -> None:
    # In a process of its own: in a fork of one that has run other tests, Python's garbage collector now and then
    # crashes in the compiled run (SIGSEGV; torch 2.13, Python 3.11).
    script = f"""
import json, sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
import torch, torch._dynamo
torch.set_num_threads(1)
from distributed import run_command, run_ranks
from hall.test_loop_features import block_trained
sys.stdout.write(json.dumps(run_ranks(2, block_trained, True, timeout=150)))
"""
    result = run_command([sys.executable, "-X", "faulthandler", "-c", script])
    assert result.returncode == 0, result.stderr
    expected, plain_names = run_ranks(2, block_trained, False)[0]
    (losses, names), (of_second, _) = json.loads(result.stdout)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-12)
    assert of_second == losses
    assert all("_orig_mod." in name for name in names)
    assert [name.replace("_orig_mod.", "") for name in names] == plain_names
    assert len(names) == 2
