"""The position in Lightning's checkpoint is what the training loop consumed, in every way Lightning can stop and go."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from data.corpora import numbered_documents, random_lengths, write_arrow

from lightning_parm.datamodule import TokenDataModule

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.*:FutureWarning", "ignore:.*callbacks used to create the checkpoint"
)


class Recorder(pl.LightningModule):
    """Learns nothing and writes down which samples it saw."""

    def __init__(self, ask_for_total_steps: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[int] = []
        self.ask_for_total_steps = ask_for_total_steps

    def training_step(self, batch, batch_idx):
        self.seen += batch["sample_index"].tolist()
        return (self.weight * batch["input_ids"].float().mean() * 0).sum()

    def validation_step(self, batch, batch_idx):
        pass

    def test_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        if self.ask_for_total_steps:
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    write_arrow(folder / "web" / "0.arrow", numbered_documents(random_lengths(0, 60, 30)), delimiter=0)
    write_arrow(folder / "held out" / "0.arrow", numbered_documents([100] * 5), delimiter=0)
    return folder


def data(folder, batch_size=4, **options):
    return TokenDataModule(str(folder / "web"), 16, batch_size, **options)


def trainer(tmp_path, *callbacks, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(accelerator="cpu", callbacks=list(callbacks), default_root_dir=tmp_path, **{**quiet, **options})


def saver(tmp_path, **options):
    return pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **options)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_resumed_run_continues_at_the_next_sample(tmp_path, folder, num_workers):
    trainer(tmp_path, saver(tmp_path, every_n_train_steps=5), max_steps=7).fit(
        Recorder(), data(folder, num_workers=num_workers)
    )
    module = Recorder()
    trainer(tmp_path, max_steps=11).fit(module, data(folder, batch_size=2), ckpt_path=tmp_path / "step=5.ckpt")
    assert module.seen == list(range(20, 32))
