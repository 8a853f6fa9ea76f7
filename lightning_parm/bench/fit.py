"""A fit that is timed: a GPT on random tokens, by a Trainer that does nothing but train."""

from __future__ import annotations

import logging
import time
import warnings
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

from lightning_parm.models import GPT


class StepRecord(L.Callback):
    """Ends of steps by the clock and by the CPU's, and every loss, of this rank."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.cpu_ends: list[float] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, _: Any, __: Any, outputs: Any, *___: Any) -> None:
        """Write down a step."""
        self.losses.append(float(outputs["loss"]))
        self.ends.append(time.perf_counter())
        self.cpu_ends.append(time.process_time())


def timed_fit(
    strategy: Any,
    model: dict[str, Any],
    tokens: torch.Tensor,
    batch_size: int,
    num_nodes: int = 1,
    use_distributed_sampler: bool = True,
) -> tuple[GPT, StepRecord]:
    """Train a GPT for an epoch on ranks that torchrun, or something that sets the same variables, has started.

    Args:
        strategy: The Trainer's.
        model: Arguments of :class:`~lightning_parm.models.GPT`; every fit starts from the same weights.
        tokens: ``(sequences, L + 1)``.
        batch_size: Sequences of each data-parallel rank.
        num_nodes: Nodes among which the ranks are spread evenly.
        use_distributed_sampler: Whether ranks share ``tokens``; if not, they are this rank's own.
    """
    for name in ("lightning.pytorch", "lightning.fabric"):  # which tell of every Trainer that it is made
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".*(treespec, LeafSpec|does not have many workers|have no `val_dataloader`).*")
    samples: Any = [{"input_ids": row[:-1], "labels": row[1:]} for row in tokens]
    loader: Any = torch.utils.data.DataLoader(samples, batch_size=batch_size)
    environment, record = TorchElasticEnvironment(), StepRecord()
    L.seed_everything(0, verbose=False)
    module = GPT(**model)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=environment.world_size() // num_nodes,
        num_nodes=num_nodes,
        strategy=strategy,
        plugins=[environment],
        use_distributed_sampler=use_distributed_sampler,
        max_epochs=1,
        callbacks=[record],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    return module, record
