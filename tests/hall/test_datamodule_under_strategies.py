"""Under ddp and parm, tensor-parallel peers read the same and data-parallel ranks disjoint samples, also on resume."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from data.corpora import numbered_documents, random_lengths, write_arrow
from distributed import run_ranks
from hall.trainers import make_trainer

from lightning_parm import ParmStrategy, TokenDataModule

FILTERS = ["ignore:.*LeafSpec.*:FutureWarning", "ignore:.*callbacks used to create the checkpoint"]
pytestmark = pytest.mark.filterwarnings(*FILTERS, "ignore:.*tensor_parallel_plan")


class Recorder(pl.LightningModule):
    """Learns nothing and writes down which samples it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[list[int]] = []
        self.evaluated: list[int] = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch["sample_index"].tolist())
        return self.weight.sum() * 0

    def validation_step(self, batch, batch_idx):
        self.evaluated += batch["sample_index"].tolist()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    write_arrow(folder / "web" / "0.arrow", numbered_documents(random_lengths(0, 60, 30)), delimiter=0)
    write_arrow(folder / "held out" / "0.arrow", numbered_documents([100] * 5), delimiter=0)
    return str(folder)


def fit(
    rank: int, world: int, folder: str, strategy: Any, batch_size: int, saved: str, resume: bool, steps: int
) -> Any:
    """Train one of the ranks; return what it saw, evaluated, and the state it would save."""
    if isinstance(strategy, dict):
        strategy = ParmStrategy(**strategy)
    data = TokenDataModule(
        f"{folder}/web", 16, batch_size, validation=f"{folder}/held out", cache_folder=f"{folder}/cache"
    )
    checkpoints = pl.callbacks.ModelCheckpoint(saved, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    options: dict[str, Any] = {"max_epochs": -1, "max_steps": steps, "num_sanity_val_steps": 0}
    if resume:
        options |= {"limit_val_batches": 0.0}
    else:
        options |= {"enable_checkpointing": True, "callbacks": [checkpoints], "val_check_interval": 2}
    trainer = make_trainer(rank, world, strategy, **options)
    module = Recorder()
    trainer.fit(module, data, ckpt_path=f"{saved}/step=2.ckpt" if resume else None)
    return module.seen, module.evaluated, data.state_dict()


MP = {"tensor_parallel_size": 2, "expert_parallel_size": 1, "expert_shard_size": 1}


@pytest.mark.parametrize(
    ("strategy", "world", "replicas", "again"),
    [("ddp", 2, 2, ("ddp", 1)), (MP, 4, 2, ({}, 3)), ({"save_distributed_checkpoint": False}, 2, 2, ("ddp", 3))],
    ids=["ddp, then one rank of it", "parm with tensor parallelism, then parm on three", "parm, then ddp on three"],
)
def test_the_sequence_goes_on_under_another_strategy_and_size(tmp_path, folder, strategy, world, replicas, again):
    results = run_ranks(world, fit, folder, strategy, 3, str(tmp_path), False, 3)
    peers = world // replicas
    for rank, (seen, _, state) in enumerate(results):
        replica = rank // peers
        assert seen == [[step * 3 * replicas + replica * 3 + i for i in range(3)] for step in range(3)]
        assert state == results[0][2]
    evaluated = sorted(sample for _, samples, _ in results[::peers] for sample in samples)
    assert evaluated == list(range(-(-504 // 16)))
    other, size = again
    resumed = run_ranks(size, fit, folder, other, 2, str(tmp_path), True, 5)
    consumed = sorted(sample for seen, _, _ in resumed for batch in seen for sample in batch)
    assert consumed == list(range(6 * replicas, 6 * replicas + 3 * 2 * size))
