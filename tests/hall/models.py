"""Small models for Trainer tests."""

from __future__ import annotations

from typing import Any

import torch
from lightning import seed_everything
from torch import Tensor

from lightning_parm import ParmStrategy
from lightning_parm.models import GPT


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
        super().on_before_optimizer_step(optimizer)
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        strategy = self.trainer.strategy
        norm = strategy.grad_norm() if isinstance(strategy, ParmStrategy) else torch.nn.utils.get_total_norm(grads)
        self.norms.append(float(norm))


def small_gpt(
    dtype: torch.dtype = torch.float32, cls: type[RecordingGPT] = RecordingGPT, **options: Any
) -> RecordingGPT:
    """Two MoE blocks of four experts over 32 tokens; the same weights in every process."""
    seed_everything(7, verbose=False)
    sizes = {"vocab_size": 32, "num_layers": 2, "num_heads": 2, "model_dim": 16, "hidden_dim": 32, "num_experts": 4}
    off = {"balance_loss_weight": 0.0, "z_loss_weight": 0.0}  # losses of a token set are not averages of its parts
    return cls(**{**sizes, **off, "learning_rate": 0.02, "warmup_steps": 2, **options}).to(dtype)
