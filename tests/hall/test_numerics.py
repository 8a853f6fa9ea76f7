"""Whatever a Trainer does to gradients, weights and learning rates, several ranks do as one process does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from distributed import run_ranks
from hall.models import RecordingGPT, small_gpt
from hall.trainers import OrderedTokens, RandomTokens, make_trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric

from lightning_parm import ParmStrategy
from lightning_parm.parallel.gradients import AgreedGradScaler

MP2 = {"tensor_parallel_size": 2, "expert_parallel_size": 2, "expert_shard_size": 1}
EP2 = {"expert_parallel_size": 2}
EP2_SHARD = {**EP2, "data_parallel": "shard"}


class Scheduled(RecordingGPT):
    """A learning rate that falls where the validation loss does not."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class ByEpoch(RecordingGPT):
    """Fused kernels take parameters that lie on the same ranks: one group for each way."""

    def configure_optimizers(self) -> Any:
        groups: dict[Any, list[nn.Parameter]] = {}
        for parameter in self.parameters():
            groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        optimizer = torch.optim.AdamW([{"params": group} for group in groups.values()], lr=0.02, fused=True)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class PartlyTrained(RecordingGPT):
    """A frozen embedding, a frozen expert matrix, and a parameter that nothing uses."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.unused = nn.Parameter(torch.ones(3))
        self.embedding.weight.requires_grad_(False)
        self.blocks[0].feed_forward.experts.w_in.requires_grad_(False)


class Averaged(RecordingGPT):
    """Adds the validation losses, under EMA those of the averaged weights, to the list of losses."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits = self.forward(batch["input_ids"])  # past the hooks of a call, as steps may
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("val_loss", loss, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.losses.append(float(self.trainer.callback_metrics["val_loss"]))


class AveragedByEpoch(Averaged, ByEpoch):
    """SWA wants a rate by epochs."""


def swa() -> list[L.Callback]:
    return [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1)]


def ema() -> list[L.Callback]:
    return [EMAWeightAveraging(decay=0.5)]


#: Name -> model class, Trainer options, callbacks; three batches an epoch leave a tail under accumulation by two.
CASES: dict[str, tuple[type[RecordingGPT], dict[str, Any], Callable[[], list[L.Callback]]]] = {
    "clip by value": (RecordingGPT, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, list),
    "uneven tail": (RecordingGPT, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}, list),
    "plateau": (Scheduled, {}, list),
    "epochs, fused": (ByEpoch, {}, list),
    "frozen and unused": (PartlyTrained, {"gradient_clip_val": 0.5}, list),
    "ema": (Averaged, {}, ema),
    "swa": (AveragedByEpoch, {}, swa),
}


def run_cases(rank: int, world_size: int, sizes: dict[str, Any] | None, names: list[str]) -> dict[str, Any]:
    results = {}
    for name in names:
        cls, options, callbacks = CASES[name]
        strategy = "auto" if sizes is None else ParmStrategy(**sizes)
        trainer = make_trainer(
            rank, world_size, strategy, max_epochs=2, callbacks=callbacks(), num_sanity_val_steps=0, **options
        )
        model = small_gpt(torch.float64, cls=cls)
        data = OrderedTokens(24, 8)
        data.val_dataloader = lambda: DataLoader(RandomTokens(4), batch_size=4)  # the same on all ranks
        trainer.fit(model, data)
        norm = model.norm.weight
        rates = {group["lr"] for group in trainer.optimizers[0].param_groups}
        weight = (norm.full_tensor() if isinstance(norm, DTensor) else norm).detach()
        results[name] = [model.losses, model.norms, sorted(rates), weight]
    return results


@pytest.mark.parametrize(
    ("world_size", "sizes"), [(4, MP2), (2, {**EP2, "data_parallel": "shard"})], ids=["mp2-ep2", "sharded"]
)
def test_training_is_that_of_one_process(world_size: int, sizes: dict[str, Any]) -> None:
    names = list(CASES)
    expected = run_cases(0, 1, None, names)
    assert expected["plateau"][2] != [0.1], "the rate must have fallen for the case to mean anything"
    for ours in run_ranks(world_size, run_cases, sizes, names, timeout=120.0):
        for name in names:
            torch.testing.assert_close(
                ours[name], expected[name], rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )


class Overflowing(RecordingGPT):
    """On rank 1, an expert's gradient of the second step is infinite; the scale of every step is kept."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.scales: list[float] = []
        self.norms_of_weights: list[float] = []

    def on_after_backward(self) -> None:
        if self.trainer.global_step == 1 and self.trainer.global_rank == 1 and self.trainer.fit_loop.batch_idx == 1:
            grad = self.blocks[0].feed_forward.experts.w_in.grad
            (grad.to_local() if isinstance(grad, DTensor) else grad).view(-1)[0] = float("inf")

    def on_train_batch_end(self, *_: Any) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())
        weight = self.head.weight.detach()
        self.norms_of_weights.append(float((weight.full_tensor() if isinstance(weight, DTensor) else weight).norm()))


@pytest.mark.parametrize("sizes", [MP2, EP2_SHARD], ids=["mp2-ep2", "ep2-sharded"])
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_shrinks_one_scale(sizes: dict[str, Any]) -> None:
    def rank_main(rank: int, world_size: int) -> tuple[list[float], list[float]]:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)  # Lightning makes none on CPUs by itself
        trainer = make_trainer(rank, world_size, ParmStrategy(**sizes), max_steps=4)
        trainer.strategy.precision_plugin = MixedPrecision("16-mixed", "cpu", scaler)
        model = small_gpt(cls=Overflowing)
        trainer.fit(model, OrderedTokens(40, 8))
        return model.scales, model.norms_of_weights

    ranks = run_ranks(4, rank_main)
    assert all(scales[:4] == [64.0, 32.0, 32.0, 32.0] for scales, _ in ranks)
    for _, norms in ranks:
        assert norms == ranks[0][1]
        assert norms[0] == norms[1] != norms[2]


class Metering(RecordingGPT):
    """Counts and sums over a validation, through torchmetrics and through the module's own log."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sum, self.mean = SumMetric(), MeanMetric()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        values = batch["labels"].double()
        self.sum.update(values)
        self.mean.update(values)
        self.log("metric_sum", self.sum, on_epoch=True)
        self.log("metric_mean", self.mean, on_epoch=True)
        self.log("logged_sum", values.sum(), on_epoch=True, sync_dist=True, reduce_fx="sum")
        self.log("logged_mean", values.mean(), on_epoch=True, sync_dist=True)


def test_metrics_count_the_batches_of_tensor_parallel_peers_once() -> None:
    def rank_main(rank: int, world_size: int, sizes: dict[str, Any] | None) -> dict[str, float]:
        trainer = make_trainer(rank, world_size, "auto" if sizes is None else ParmStrategy(**sizes))
        replicas = world_size // (sizes or {}).get("tensor_parallel_size", 1)
        own = range(rank * replicas // world_size, 8, replicas)
        data = DataLoader(RandomTokens(8), batch_size=2, sampler=own)
        (result,) = trainer.validate(small_gpt(cls=Metering), data, verbose=False)
        return result

    expected = rank_main(0, 1, None)
    for world_size, sizes in ((4, MP2), (2, {"tensor_parallel_size": 2})):
        for ours in run_ranks(world_size, rank_main, sizes):
            assert ours == pytest.approx(expected, rel=1e-6)


class Pieces(RecordingGPT):
    """One process that weighs the batches of three and one sequences as two ranks do: by their means."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.trainer.world_size > 1:
            return super().training_step(batch, batch_idx)
        parts = [{name: value[index] for name, value in batch.items()} for index in (slice(3), slice(3, None))]
        loss = torch.stack([self._loss(part) for part in parts]).mean()
        self.losses.append(float(loss.detach()))
        return loss


def test_ranks_with_batches_of_different_sizes_average_their_means() -> None:
    def rank_main(rank: int, world_size: int, sizes: dict[str, Any] | None = None) -> list[float]:
        trainer = make_trainer(rank, world_size, "auto" if sizes is None else ParmStrategy(**sizes), max_epochs=1)
        model = small_gpt(torch.float64, cls=Pieces)
        batches = [list(range(4 * step, 4 * step + 4)) for step in range(4)]
        own = batches if world_size == 1 else [b[:3] if rank == 0 else b[3:] for b in batches]
        trainer.fit(model, DataLoader(RandomTokens(16), batch_sampler=own))
        return model.losses

    expected = rank_main(0, 1)
    for sizes in (EP2, {"expert_parallel_size": 1, "data_parallel": "shard"}):
        for ours in run_ranks(2, rank_main, sizes):
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)


def test_bfloat16_stays_near_the_same_run_in_one_process() -> None:
    def rank_main(rank: int, world_size: int, sizes: dict[str, Any] | None = None) -> list[float]:
        losses = []
        for precision in ("bf16-mixed", "bf16-true"):
            strategy = "auto" if sizes is None else ParmStrategy(**sizes)
            model = small_gpt()
            options = {"precision": precision, "max_steps": 4, "gradient_clip_val": 0.5}
            make_trainer(rank, world_size, strategy, **options).fit(model, OrderedTokens(32, 8))
            losses += model.losses
        return losses

    expected = rank_main(0, 1)
    for sizes in (MP2, EP2_SHARD):
        for ours in run_ranks(4, rank_main, sizes):
            torch.testing.assert_close(ours[:4], expected[:4], rtol=0, atol=0.02)
            torch.testing.assert_close(ours[4:], expected[4:], rtol=0, atol=0.1)  # both in steps of 2^-8 and more


def test_kernels_and_scalers_say_what_they_cannot_take() -> None:
    def rank_main(rank: int, world_size: int) -> str:
        class Fused(RecordingGPT):
            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.AdamW(self.parameters(), fused=True)

        trainer = make_trainer(rank, world_size, ParmStrategy(tensor_parallel_size=2), max_steps=1)
        with pytest.raises(ValueError, match="fused=True in group 0 of AdamW, whose parameters are spread") as caught:
            trainer.fit(small_gpt(cls=Fused), OrderedTokens(8, 8))
        return str(caught.value)

    assert "in 2 ways" in run_ranks(2, rank_main)[0]
    layer = nn.Linear(2, 2).half()
    layer.weight.grad = torch.ones(2, 2, dtype=torch.half)
    scaler = AgreedGradScaler(torch.amp.GradScaler("cpu"), "cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match="The gradients to unscale are float16"):
        scaler.unscale_(torch.optim.SGD(layer.parameters(), lr=0.1))


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_averaged_weights_are_saved_whole_and_go_on_at_other_sizes(tmp_path: Path) -> None:
    def rank_main(
        rank: int, world_size: int, sizes: dict[str, Any] | None, epochs: int, resume: str | None, save: str
    ) -> list[float]:
        strategy = "auto" if sizes is None else ParmStrategy(**sizes)
        callbacks = [*ema(), ModelCheckpoint(tmp_path / save, filename="last", save_top_k=-1)]
        options = {"max_epochs": epochs, "callbacks": callbacks, "num_sanity_val_steps": 0}
        trainer = make_trainer(rank, world_size, strategy, enable_checkpointing=True, **options)
        model = small_gpt(torch.float64, cls=Averaged)
        data = OrderedTokens(16, 8)
        data.val_dataloader = lambda: DataLoader(RandomTokens(4), batch_size=4)
        trainer.fit(model, data, ckpt_path=None if resume is None else str(tmp_path / resume / "last.ckpt"))
        return model.losses

    expected = rank_main(0, 1, None, 2, None, "uninterrupted")
    one_file = {**EP2, "save_distributed_checkpoint": False}
    run_ranks(4, rank_main, MP2, 1, None, "directory")
    run_ranks(2, rank_main, one_file, 1, None, "file")
    for world_size, sizes, resume in ((4, {**EP2_SHARD}, "directory"), (2, EP2, "file"), (1, {}, "file")):
        for ours in run_ranks(world_size, rank_main, sizes, 2, resume, f"{resume}-{world_size}"):
            torch.testing.assert_close(ours, expected[3:], rtol=0, atol=1e-10)
