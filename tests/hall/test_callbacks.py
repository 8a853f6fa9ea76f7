"""The monitors log right numbers, cost one reduction a log interval, and leave other modules alone."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from data.corpora import numbered_documents, write_arrow
from distributed import run_ranks
from hall.models import small_gpt
from hall.trainers import RandomTokens, make_trainer
from lightning.pytorch.loggers import Logger
from torch.utils.data import DataLoader

from lightning_parm import ParmStrategy, TokenDataModule, callbacks
from lightning_parm.callbacks import DataMonitor, ExpertLoadMonitor, ThroughputMonitor

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.*:FutureWarning",
    "ignore:.*many workers.*",
    "ignore:.*`log_every_n_steps`",
    "ignore:Total length",
)


class Memory(Logger):
    """Keeps what is logged."""

    name, version = "memory", "0"

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append({**metrics, "step": step or 0})

    def of(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if name in row]


class Counts(L.Callback):
    """Adds up the layers' counts by hand, batch by batch."""

    def __init__(self) -> None:
        self.batches: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        self.batches.append(torch.stack([block.feed_forward.tokens_per_expert for block in pl_module.blocks]))


def trainer_with(*monitors: L.Callback, rank: int = 0, world_size: int = 1, **options: Any) -> tuple[L.Trainer, Memory]:
    memory = Memory()
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    options = {"logger": memory, "callbacks": list(monitors), "max_epochs": 1, **quiet, **options}
    if world_size > 1:
        return make_trainer(rank, world_size, **options), memory
    return L.Trainer(accelerator="cpu", devices=1, **options), memory


def batches(count: int, batch_size: int = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader(RandomTokens(count * batch_size, **options), batch_size=batch_size, num_workers=0)


def test_expert_load_of_each_interval_and_of_the_run() -> None:
    counts, monitor = Counts(), ExpertLoadMonitor(per_layer=True)
    trainer, memory = trainer_with(counts, monitor, log_every_n_steps=3)
    trainer.fit(small_gpt(), batches(7))
    intervals = [torch.stack(counts.batches[i : i + 3]).sum(0) for i in (0, 3)]
    utilisation = torch.stack([c / c.mean(-1, keepdim=True) for c in intervals])
    assert memory.of("moe/load_max_over_mean") == pytest.approx(utilisation.amax(-1).mean(-1).tolist())
    assert memory.of("moe/maxvio") == pytest.approx((utilisation.amax(-1).amax(-1) - 1).tolist())
    assert memory.of("moe/dead_experts") == (utilisation == 0).sum((1, 2)).tolist()
    for layer in (0, 1):
        logged = memory.of(f"moe/load_max_over_mean/blocks.{layer}.feed_forward")
        assert logged == pytest.approx(utilisation[:, layer].amax(-1).tolist())
    assert monitor.total is not None
    torch.testing.assert_close(monitor.total.counts.float(), sum(intervals))


def test_expert_load_goes_on_counting_from_a_checkpoint(tmp_path: Path) -> None:
    first = ExpertLoadMonitor()
    trainer, _ = trainer_with(first, log_every_n_steps=2)
    trainer.fit(small_gpt(), batches(4))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["callbacks"]["ExpertLoadMonitor"]
    assert saved["blocks.1.feed_forward"]["tokens_per_expert"] == first.total.counts[1].tolist()
    second = ExpertLoadMonitor()
    trainer, _ = trainer_with(second, log_every_n_steps=2, max_epochs=2)
    trainer.fit(small_gpt(), batches(4), ckpt_path=str(tmp_path / "a.ckpt"))
    tokens = 8 * 2 * 8 * 2  # batches, samples of each, tokens of each, experts of each
    assert second.total.counts.sum(-1).tolist() == [tokens, tokens]


def test_expert_load_under_accumulation_counts_every_micro_batch() -> None:
    counts, monitor = Counts(), ExpertLoadMonitor()
    trainer, memory = trainer_with(counts, monitor, log_every_n_steps=2, accumulate_grad_batches=3)
    trainer.fit(small_gpt(), batches(12))
    assert len(memory.of("moe/maxvio")) == 2
    torch.testing.assert_close(monitor.total.counts.float(), torch.stack(counts.batches).sum(0))


@pytest.mark.parametrize("sizes", [None, {"tensor_parallel_size": 2}, {"expert_parallel_size": 2}])
def test_dropped_choices_and_losses_are_means_over_layers_batches_and_ranks(sizes: dict[str, Any] | None) -> None:
    class Losses(L.Callback):
        def __init__(self) -> None:
            self.rows: list[list[float]] = []

        def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
            layers = [block.feed_forward for block in pl_module.blocks]
            self.rows += [[float(x) for x in (m.dropped_share, m.balance_loss, m.z_loss)] for m in layers]
            for layer in layers:
                weighted = 0.01 * layer.balance_loss + 0.001 * layer.z_loss
                torch.testing.assert_close(layer.auxiliary_loss.detach(), weighted)

    def rank_main(rank: int, world_size: int) -> tuple[list[list[float]], list[dict[str, float]]]:
        losses = Losses()
        strategy = {} if sizes is None else {"strategy": ParmStrategy(**sizes)}
        monitors = (losses, ExpertLoadMonitor())
        trainer, memory = trainer_with(*monitors, rank=rank, world_size=world_size, log_every_n_steps=4, **strategy)
        model = {"capacity_factor": 0.5, "balance_loss_weight": 0.01, "z_loss_weight": 0.001}
        trainer.fit(small_gpt(**model), batches(4))
        return losses.rows, memory.rows

    ranks = [rank_main(0, 1)] if sizes is None else run_ranks(2, rank_main)
    expected = torch.tensor([rows for rows, _ in ranks]).mean((0, 1))
    assert float(expected[0]) > 0.2
    (logged,) = (row for row in ranks[0][1] if "moe/z_loss" in row)
    names = ("moe/dropped_frac", "moe/balance_loss", "moe/z_loss")
    assert [logged[name] for name in names] == pytest.approx(expected.tolist(), rel=1e-5)


def test_one_layer_and_no_layer() -> None:
    trainer, memory = trainer_with(ExpertLoadMonitor(per_layer=True), log_every_n_steps=1)
    trainer.fit(small_gpt(num_layers=1), batches(2))
    assert len(memory.of("moe/load_max_over_mean/blocks.0.feed_forward")) == 2
    dense = ExpertLoadMonitor()
    trainer, memory = trainer_with(dense, log_every_n_steps=1)
    trainer.fit(small_gpt(num_experts=0), batches(2))
    assert len(memory.of("train_loss")) == 2
    assert not [name for row in memory.rows for name in row if name.startswith("moe/")]
    assert dense.state_dict() == {}


def on_ranks(rank: int, world_size: int, folder: str, size: int) -> dict[str, Any]:
    calls: list[str] = []
    reduce = callbacks.dist.all_reduce
    callbacks.dist.all_reduce = lambda *args, **options: calls.append("reduce") or reduce(*args, **options)
    inside: list[int] = []
    monitor, load_step = ExpertLoadMonitor(), ExpertLoadMonitor.on_train_batch_end

    def counted(self: ExpertLoadMonitor, *args: Any) -> None:
        before = len(calls)
        load_step(self, *args)
        inside.append(len(calls) - before)

    ExpertLoadMonitor.on_train_batch_end = counted  # type: ignore[method-assign]
    monitors = (monitor, ThroughputMonitor(), DataMonitor(record_samples=True))
    strategy = ParmStrategy(tensor_parallel_size=size)
    options = {"strategy": strategy, "log_every_n_steps": 2, "max_steps": 4, "default_root_dir": folder}
    trainer, memory = trainer_with(*monitors, rank=rank, world_size=world_size, **options)
    data = TokenDataModule(f"{folder}/*.arrow", sequence_length=8, batch_size=3, num_logical_shards=4)
    begin = time.perf_counter()
    trainer.fit(small_gpt(vocab_size=600), data)
    speeds = memory.of("throughput/tokens_per_second")
    return {
        "counts": monitor.total.counts.tolist(),
        "reductions": inside,
        "speeds": speeds,
        "seconds": time.perf_counter() - begin,
        "replica": trainer.strategy.distributed_sampler_kwargs,
    }


@pytest.mark.parametrize("size", [1, 2])
def test_several_ranks(tmp_path: Path, size: int) -> None:
    write_arrow(tmp_path / "a.arrow", numbered_documents([40] * 12))
    results = run_ranks(2, on_ranks, str(tmp_path), size)
    routed = 4 * 3 * 8 * 2 * (2 // size)  # batches, samples, tokens of each, experts of each, data-parallel ranks
    for rank, result in enumerate(results):
        assert [sum(layer) for layer in result["counts"]] == [routed, routed]
        assert result["counts"] == results[0]["counts"]
        assert result["reductions"] == [0, 1, 0, 1], "one reduction a log interval, for all layers"
        # Both intervals lie within the measured time, so neither can have been slower than this.
        assert all(speed >= 2 * 3 * 8 * (2 // size) / result["seconds"] for speed in result["speeds"])
        lines = (tmp_path / "samples" / f"rank-{rank:05d}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        replica, count = result["replica"]["rank"], result["replica"]["num_replicas"]
        assert [row["batch"] for row in rows] == [0, 1, 2, 3]
        assert {row["data_parallel_rank"] for row in rows} == {replica}
        starts = [3 * (count * batch + replica) for batch in range(4)]
        assert [row["sample_index"] for row in rows] == [list(range(start, start + 3)) for start in starts]
    assert results[0]["speeds"] or results[1]["speeds"]


class Slow(RandomTokens):
    """Takes a while to give a sample."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(0.02)
        return super().__getitem__(index)


def test_throughput_and_waiting() -> None:
    begin = time.perf_counter()
    trainer, memory = trainer_with(ThroughputMonitor(), log_every_n_steps=4)
    profiler = trainer.profiler
    trainer.fit(small_gpt(), DataLoader(Slow(16), batch_size=2, num_workers=0))
    seconds = time.perf_counter() - begin
    speeds, waits = memory.of("throughput/tokens_per_second"), memory.of("data/wait_s")
    assert len(speeds) == len(waits) == 2
    for speed, wait, fraction in zip(speeds, waits, memory.of("data/wait_frac"), strict=True):
        assert 8 * 0.02 <= wait <= seconds
        assert fraction == pytest.approx(wait / (4 * 2 * 8 / speed), rel=1e-4)
        assert 0 < fraction <= 1
    assert sum(4 * 2 * 8 / speed for speed in speeds) <= seconds
    assert "start" not in vars(profiler), "the profiler has its own methods back"
    assert "stop" not in vars(profiler)


def test_validation_is_not_training_time() -> None:
    trainer, memory = trainer_with(
        ThroughputMonitor(), log_every_n_steps=1, val_check_interval=1, num_sanity_val_steps=0
    )
    trainer.fit(small_gpt(), batches(3), DataLoader(Slow(20), batch_size=2, num_workers=0))
    seconds = [2 * 8 / speed for speed in memory.of("throughput/tokens_per_second")]
    assert len(seconds) == 3
    assert max(seconds[1:]) < 20 * 0.02, "a validation of 0.4 s lies between any two steps"


def test_throughput_needs_the_tensor_of_tokens() -> None:
    trainer, _ = trainer_with(ThroughputMonitor(key="tokens"))
    with pytest.raises(ValueError, match=r"batch\['tokens'\], but the batch has the keys \['input_ids', 'labels'\]"):
        trainer.fit(small_gpt(), batches(1))
    assert "start" not in vars(trainer.profiler)


def test_data_mix(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_arrow(tmp_path / name / "x.arrow", numbered_documents([50] * 20))
    trainer, memory = trainer_with(DataMonitor(), log_every_n_steps=4, max_steps=12)
    sources = {name: str(tmp_path / name) for name in ("a", "b")}
    data = TokenDataModule(sources, 8, 4, weights={"a": 3, "b": 1}, num_logical_shards=8)
    trainer.fit(small_gpt(vocab_size=1200), data)
    assert [x + y for x, y in zip(memory.of("data/samples/a"), memory.of("data/samples/b"), strict=True)] == [
        16,
        32,
        48,
    ]
    assert memory.of("data/samples/a")[-1] == data.samples_per_source()["a"] == pytest.approx(36, abs=2)
    assert memory.of("data/mix_actual/a")[-1] == pytest.approx(memory.of("data/samples/a")[-1] / 48)
    assert memory.of("data/mix_target/a") == [0.75] * 3
    assert memory.of("data/mix_target/b") == [0.25] * 3
    assert data.weights_per_source() == {"a": 3.0, "b": 1.0}
    assert memory.of("data/epoch/a") == sorted(memory.of("data/epoch/a"))
    assert memory.of("data/epoch/a")[-1] == pytest.approx(data.epochs_per_source()["a"])


def test_data_monitor_without_our_data_module() -> None:
    trainer, memory = trainer_with(DataMonitor(), log_every_n_steps=1)
    trainer.fit(small_gpt(), batches(2))
    assert len(memory.of("train_loss")) == 2
    assert not [name for row in memory.rows for name in row if name.startswith("data/")]
