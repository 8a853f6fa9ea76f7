"""Trainers inside forked ranks: a whole fit on several ranks in about a second, without a launcher."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_parm import ParmStrategy


class ForkedEnvironment(ClusterEnvironment):
    """The ranks exist already and have a process group; Lightning only needs to know who is who."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self._rank, self._world_size = rank, world_size

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        return 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._world_size

    def set_world_size(self, size: int) -> None: ...

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None: ...

    def local_rank(self) -> int:
        return self._rank

    def node_rank(self) -> int:
        return 0


def make_trainer(
    rank: int, world_size: int, strategy: Any = "auto", calibrate: bool = False, **options: Any
) -> L.Trainer:
    """A quiet CPU Trainer for one of ``world_size`` forked ranks; measuring its links is asked for where it matters."""
    if isinstance(strategy, ParmStrategy):
        strategy.calibrate = calibrate
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet["enable_checkpointing"] = False
    return L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        plugins=[ForkedEnvironment(rank, world_size)],
        use_distributed_sampler=False,
        **{**quiet, **options},
    )


class RandomTokens(Dataset):
    """``length`` sequences of random tokens, the same in every process."""

    def __init__(self, length: int, sequence_length: int = 8, vocab_size: int = 32) -> None:
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(0, vocab_size, (length, sequence_length + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index, :-1], "labels": self.tokens[index, 1:]}


class OrderedTokens(L.LightningDataModule):
    """:class:`RandomTokens` in order: a global batch holds the same sequences on any number of data-parallel ranks."""

    def __init__(self, length: int, global_batch: int) -> None:
        super().__init__()
        self.dataset = RandomTokens(length)
        self.global_batch = global_batch

    def train_dataloader(self) -> DataLoader:
        replicas = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
        sampler = DistributedSampler(self.dataset, **replicas, shuffle=False)
        return DataLoader(self.dataset, batch_size=self.global_batch // replicas["num_replicas"], sampler=sampler)
