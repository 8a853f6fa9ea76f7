"""A run under ``parm`` equals the same run in one process: losses, gradients' norm, clipping, accumulation."""

from typing import Any

import pytest
import torch
from distributed import run_ranks
from hall.trainers import loader, make_trainer
from lightning import seed_everything
from torch import Tensor

from lightning_parm import ParmStrategy
from lightning_parm.models import GPT

GLOBAL_BATCH = 8


class RecordingGPT(GPT):
    """Keeps the loss of each micro-batch, averaged over ranks, and the gradient norm of each step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")))
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        strategy = self.trainer.strategy
        norm = strategy.grad_norm() if isinstance(strategy, ParmStrategy) else torch.nn.utils.get_total_norm(grads)
        self.norms.append(float(norm))


def small_gpt(dtype: torch.dtype = torch.float32, **options: Any) -> RecordingGPT:
    seed_everything(7, verbose=False)
    sizes = {"vocab_size": 32, "num_layers": 2, "num_heads": 2, "model_dim": 16, "hidden_dim": 32, "num_experts": 4}
    off = {"balance_loss_weight": 0.0, "z_loss_weight": 0.0}  # losses of a token set are not averages of its parts
    return RecordingGPT(**{**sizes, **off, "learning_rate": 0.02, "warmup_steps": 2, **options}).to(dtype)


def fit(
    rank: int, world_size: int, sizes: dict[str, Any] | None, steps: int, options: dict[str, Any], dtype: torch.dtype
) -> tuple[list[float], list[float]]:
    strategy = "auto" if sizes is None else ParmStrategy(**sizes)
    replicas = 1 if sizes is None else world_size // sizes.get("tensor_parallel_size", 1)
    trainer = make_trainer(rank, world_size, strategy, max_steps=steps, **options)
    model = small_gpt(dtype)
    trainer.fit(model, loader(80, GLOBAL_BATCH // replicas))
    return model.losses, model.norms


TOPOLOGIES = [
    (2, {"expert_parallel_size": 2}),
    (2, {"tensor_parallel_size": 2, "expert_parallel_size": 1, "expert_shard_size": 2}),
    (4, {"expert_parallel_size": 1, "expert_shard_size": 1}),
    (4, {"tensor_parallel_size": 2, "expert_parallel_size": 2, "expert_shard_size": 2}),
    (4, {"expert_parallel_size": 2, "expert_shard_size": 1}),
    (4, {"tensor_parallel_size": 2, "expert_parallel_size": 2, "expert_shard_size": 2, "schedule": "s1"}),
]
CLIP_AND_ACCUMULATE = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "max_epochs": -1}


@pytest.mark.parametrize(("world_size", "sizes"), TOPOLOGIES)
def test_float64_training_is_the_same_to_rounding(world_size: int, sizes: dict[str, Any]) -> None:
    expected = fit(0, 1, None, 6, CLIP_AND_ACCUMULATE, torch.float64)
    assert max(expected[1]) > 0.5, "the norms must be clipped for the test to mean anything"
    for losses, norms in run_ranks(world_size, fit, sizes, 6, CLIP_AND_ACCUMULATE, torch.float64):
        torch.testing.assert_close(losses, expected[0], rtol=0, atol=1e-10)
        torch.testing.assert_close(norms, expected[1], rtol=0, atol=1e-10)


def test_float32_training_of_twenty_steps_on_four_ranks() -> None:
    sizes = {"tensor_parallel_size": 2, "expert_parallel_size": 2, "expert_shard_size": 2}
    expected, _ = fit(0, 1, None, 20, CLIP_AND_ACCUMULATE, torch.float32)
    assert expected[-1] < expected[0] - 0.2, "it must learn"
    for losses, _ in run_ranks(4, fit, sizes, 20, CLIP_AND_ACCUMULATE, torch.float32):
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-5)
