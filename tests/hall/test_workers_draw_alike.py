"""Workers of tensor-parallel peers augment alike, and those of data-parallel ranks do not."""

import random
from typing import Any

import lightning as L
import pytest
import torch
from distributed import run_ranks
from hall.test_fabric import make_fabric
from hall.trainers import make_trainer
from torch.utils.data import DataLoader, Dataset

from lightning_parm import ParmStrategy
from lightning_parm.parallel.workers import seed_workers

MP2 = {"tensor_parallel_size": 2}


class Augmented(Dataset):
    """Each sample is what the worker draws for it."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([random.random(), float(torch.rand(()))], dtype=torch.float64)


class Recorder(L.LightningModule):
    """Learns nothing and keeps its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.seen: list[Any] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen += batch.tolist()
        return (batch * self.weight).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:.*has no tensor_parallel_plan")
def test_peers_draw_the_same_and_replicas_do_not() -> None:
    def rank_main(rank: int, world_size: int, loop: str) -> Any:
        L.seed_everything(3, workers=True, verbose=False)
        loader = DataLoader(Augmented(), batch_size=2, num_workers=1)
        if loop == "trainer":
            model = Recorder()
            make_trainer(rank, world_size, ParmStrategy(**MP2), max_steps=3).fit(model, loader)
            return model.seen
        fabric = make_fabric(rank, world_size, MP2)
        return [row for batch in fabric.setup_dataloaders(loader) for row in batch.tolist()]

    for loop in ("trainer", "fabric"):
        first, second, third, fourth = run_ranks(4, rank_main, loop)
        assert len(first) > 2
        assert first == second
        assert third == fourth
        assert not any(row in first for row in third)


def test_a_users_own_function_stays() -> None:
    def own(worker_id: int) -> None: ...

    loader = DataLoader(Augmented(), num_workers=1, worker_init_fn=own)
    assert seed_workers(loader, 1).worker_init_fn is own
