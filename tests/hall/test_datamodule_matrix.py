"""A resumed run sees what the whole one saw: in every way a loop can be cut, under every strategy, with workers."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from data.corpora import numbered_documents, random_lengths, write_arrow
from distributed import run_ranks
from hall.trainers import make_trainer

from lightning_parm import ParmStrategy, TokenDataModule

FILTERS = ["ignore:.*LeafSpec.*:FutureWarning", "ignore:.*callbacks used to create the checkpoint"]
pytestmark = pytest.mark.filterwarnings(*FILTERS, "ignore:.*does not have many workers")

EVERY_BATCH: dict[str, Any] = {"every_n_train_steps": 1}
AT_FIVE: dict[str, Any] = {"every_n_train_steps": 5}
EPOCH_ENDS: dict[str, Any] = {"every_n_epochs": 1, "save_on_train_epoch_end": True}
UNSIZED: dict[str, Any] = {"sized": False}
CUT: dict[str, Any] = {"limit_train_batches": 6}

#: What is saved when, the data module's options, the Trainer's options, and the step to resume from; an epoch of one
#: rank has 16 batches and of two ranks 8.
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int]] = {
    "in an epoch": (AT_FIVE, {}, {"max_epochs": 2}, 5),
    "at the end of a whole epoch": (EPOCH_ENDS, {}, {"max_epochs": 3}, -1),
    "in an epoch that is cut": (AT_FIVE, {}, {**CUT, "max_epochs": 2}, 5),
    "by steps": (AT_FIVE, {}, {"max_steps": 11, "max_epochs": -1}, 5),
    "without a length, by steps": (AT_FIVE, UNSIZED, {"max_steps": 11, "max_epochs": 1}, 5),
    "without a length, cut": (AT_FIVE, UNSIZED, {**CUT, "max_epochs": 2}, 5),
    "without a length, at the end of a cut epoch": (EPOCH_ENDS, UNSIZED, {**CUT, "max_epochs": 3}, 6),
    "the same, by steps and epochs": (EPOCH_ENDS, UNSIZED, {**CUT, "max_steps": 12, "max_epochs": 2}, 6),
    "the same, by steps": (EPOCH_ENDS, UNSIZED, {**CUT, "max_steps": 18, "max_epochs": -1}, 6),
    "at the end of a cut epoch": (EPOCH_ENDS, {}, {**CUT, "max_epochs": 3}, 6),
    "at the end of a cut epoch, by steps": (EPOCH_ENDS, {}, {**CUT, "max_steps": 18, "max_epochs": -1}, 6),
    "when the optimizer asks for the steps": (AT_FIVE, {"ask": True}, {"max_epochs": 2}, 5),
    "between validations": (AT_FIVE, {"validate": True}, {"val_check_interval": 0.25, "max_epochs": 2}, 5),
    "between accumulated steps": (EVERY_BATCH, {}, {"accumulate_grad_batches": 2, "max_steps": 6}, 2),
}


class Witness(pl.LightningModule):
    """Learns nothing and writes down what it was given, and when."""

    def __init__(self, ask: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.ask = ask
        self.train_seen: list[tuple[int, int, list[int]]] = []
        self.validated: list[int] = []

    def training_step(self, batch, batch_idx):
        self.train_seen.append((self.current_epoch, batch_idx, batch["sample_index"].tolist()))
        return self.weight.sum() * 0

    def validation_step(self, batch, batch_idx):
        pass

    def on_validation_epoch_end(self):
        self.validated.append(self.trainer.fit_loop.epoch_loop.batch_progress.total.processed)

    def configure_optimizers(self):
        assert not self.ask or self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run_rows(
    rank: int, world: int, folder: str, strategy: str, num_workers: int, names: list[str], work: str
) -> dict[str, Any]:
    """Run rows, whole and from their checkpoints; return what the two saw on this rank."""
    results = {}
    for name in names:
        every, given, limits, step = ROWS[name]
        options = dict(given)
        ask, validate = options.pop("ask", False), options.pop("validate", False)
        validation = f"{folder}/held out" if validate else None
        saved = Path(work) / name
        runs: list[Any] = []
        for checkpoint in (None, saved):
            data = TokenDataModule(
                f"{folder}/web",
                16,
                8,
                num_workers=num_workers,
                validation=validation,
                cache_folder=f"{folder}/cache",
                **options,
            )
            saver = pl.callbacks.ModelCheckpoint(saved, filename="{step}", save_top_k=-1, **every)
            chosen: Any = ParmStrategy(save_distributed_checkpoint=False) if strategy == "parm" else strategy
            more = {"enable_checkpointing": True, "callbacks": [saver]} if checkpoint is None else {}
            trainer = make_trainer(rank, world, chosen, num_sanity_val_steps=0, **limits, **more)
            module = Witness(ask)
            path = saved / f"step={step if step > 0 else 16 // world}.ckpt"
            trainer.fit(module, data, ckpt_path=path if checkpoint else None)
            assert not multiprocessing.active_children()  # the data module outlives the fit, its workers do not
            runs.append((module.train_seen, module.validated, data.state_dict()["samples"]))
        results[name] = runs
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make a small corpus: an epoch of 128 windows of 16."""
    folder = tmp_path_factory.mktemp("corpus")
    write_arrow(folder / "web" / "0.arrow", numbered_documents([*random_lengths(0, 60, 30), 100]), delimiter=0)
    write_arrow(folder / "held out" / "0.arrow", numbered_documents([100] * 2), delimiter=0)
    return str(folder)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("strategy", "world"), [("auto", 1), ("ddp", 2), ("parm", 2)])
def test_every_row(tmp_path, folder, strategy, world, num_workers):
    # half of the rows with workers and half without, the other halves under ddp, so that every row meets both
    names = list(ROWS)[(num_workers > 0) ^ (strategy == "ddp") :: 2]
    ranks = run_ranks(world, run_rows, folder, strategy, num_workers, names, str(tmp_path), timeout=280)
    for rank, results in enumerate(ranks):
        for name in names:
            _, _, limits, step = ROWS[name]
            (whole, validated, position), (resumed, validated_again, position_again) = results[name]
            consumed = (step if step > 0 else 16 // world) * limits.get("accumulate_grad_batches", 1)
            expected = [[(batch * world + rank) * 8 + i for i in range(8)] for batch in range(len(whole))]
            assert [samples for _, _, samples in whole] == expected, name
            assert resumed == whole[consumed:] != [], name  # epochs and batch numbers too
            assert position_again == position == len(whole) * 8 * world, name
            # Lightning does not make up for a validation that was due in the very batch of the checkpoint.
            assert validated_again == [batch for batch in validated if batch > consumed], name
