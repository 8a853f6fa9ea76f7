"""The position in Lightning's checkpoint is what the training loop consumed, in every way Lightning can stop and go."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from data.corpora import numbered_documents, random_lengths, write_arrow

from lightning_parm.datamodule import TokenDataModule
from lightning_parm.elastic import ElasticDataModule

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.*:FutureWarning",
    "ignore:.*callbacks used to create the checkpoint",
    "ignore:.*does not have many workers",
    "ignore:.*is smaller than the logging interval",
)


class Recorder(pl.LightningModule):
    """Learns nothing and writes down which samples it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[int] = []
        self.evaluated: list[int] = []
        self.epoch_ends: list[int] = []

    def training_step(self, batch, batch_idx):
        self.seen += batch["sample_index"].tolist() if isinstance(batch, dict) else batch.tolist()
        return self.weight.sum() * 0

    def on_train_epoch_end(self):
        self.epoch_ends.append(len(self.seen))

    def validation_step(self, batch, batch_idx):
        self.evaluated += batch["sample_index"].tolist()

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make a small corpus: an epoch of 128 windows of 16."""
    folder = tmp_path_factory.mktemp("corpus")
    write_arrow(folder / "web" / "0.arrow", numbered_documents([*random_lengths(0, 60, 30), 100]), delimiter=0)
    write_arrow(folder / "held out" / "0.arrow", numbered_documents([100] * 5), delimiter=0)
    return folder


def data(folder, batch_size=4, kind=TokenDataModule, **options):
    return kind(str(folder / "web"), 16, batch_size, cache_folder=str(folder / "cache"), **options)


def trainer(tmp_path, *callbacks, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": -1}
    options = {**quiet, "enable_checkpointing": bool(callbacks), **options}
    return pl.Trainer(accelerator="cpu", callbacks=list(callbacks), default_root_dir=tmp_path, **options)


def saver(tmp_path, **options):
    return pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **options)


def save_and_resume(tmp_path, folder, step, first, then, **resumed_data):
    """Train, then resume from the checkpoint of one step with another data module; return what the second run saw."""
    callback = saver(tmp_path, every_n_train_steps=step)
    trainer(tmp_path, callback, **first).fit(Recorder(), data(folder, **resumed_data.pop("data", {})))
    module = Recorder()
    trainer(tmp_path, **then).fit(module, data(folder, **resumed_data), ckpt_path=tmp_path / f"step={step}.ckpt")
    return module


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("sized", [True, False])
def test_mid_epoch_on_another_batch_size(tmp_path, folder, num_workers, sized):
    steps = {"max_steps": 7}, {"max_steps": 11}
    options = {"data": {"num_workers": num_workers, "sized": sized}, "batch_size": 2, "sized": sized}
    assert save_and_resume(tmp_path, folder, 5, *steps, **options).seen == list(range(20, 32))


def test_an_epoch_ends_where_it_would_have_after_a_rescale(tmp_path, folder):
    epoch = len(data(folder).train_dataloader()) * 4
    two_epochs = {"max_epochs": 2}
    module = save_and_resume(tmp_path, folder, 6, {"max_steps": 8}, two_epochs, batch_size=3)
    assert module.seen == list(range(24, 24 + len(module.seen)))
    first, second = module.epoch_ends
    assert abs(24 + first - epoch) <= 3
    assert abs(second - first - epoch) <= 3


def test_several_epochs_never_repeat_a_sample_and_know_their_length(tmp_path, folder):
    module, run = Recorder(), trainer(tmp_path, max_epochs=3)
    run.fit(module, data(folder))
    assert run.num_training_batches == 32
    assert module.epoch_ends == [128, 256, 384]
    assert module.seen == list(range(384))


def test_a_test_of_a_checkpoint_leaves_the_training_stream_alone(tmp_path, folder):
    module, tokens = Recorder(), data(folder, test=str(folder / "held out"))
    run = trainer(tmp_path, saver(tmp_path, every_n_train_steps=3), max_steps=6)
    run.fit(module, tokens)
    run.test(module, tokens, ckpt_path=tmp_path / "step=3.ckpt", verbose=False)
    assert module.evaluated == list(range(-(-504 // 16)))
    assert tokens.samples_per_source() == {"data": 24}


def test_validation_does_not_move_the_training_stream(tmp_path, folder):
    module, tokens = Recorder(), data(folder, validation=str(folder / "held out"))
    trainer(tmp_path, max_steps=8, val_check_interval=4, num_sanity_val_steps=1).fit(module, tokens)
    assert module.seen == list(range(32))
    assert module.evaluated == [0, 1, 2, 3] + 2 * list(range(32))


def test_a_second_fit_goes_on_and_a_new_trainer_starts_anew(tmp_path, folder):
    module, tokens = Recorder(), data(folder)
    run = trainer(tmp_path, max_steps=3)
    run.fit(module, tokens)
    run.fit_loop.epoch_loop.max_steps = 5
    run.fit(module, tokens)
    assert module.seen == list(range(20))
    trainer(tmp_path, max_steps=2).fit(module, tokens)
    assert module.seen[20:] == list(range(8))


class Mine(TokenDataModule):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch


def test_a_subclass_keeps_the_state(tmp_path, folder):
    module = save_and_resume(tmp_path, folder, 5, {"max_steps": 5}, {"max_steps": 7}, kind=Mine, data={"kind": Mine})
    assert module.seen == list(range(20, 28))


def test_another_class_is_told_that_its_position_is_not_in_the_checkpoint(tmp_path, folder):
    with pytest.warns(UserWarning, match="no position of a Mine, so the data goes on at sample 20"):
        module = save_and_resume(tmp_path, folder, 5, {"max_steps": 5}, {"max_steps": 7}, kind=Mine)
    assert module.seen == list(range(20, 28))


class ChangeTheMix(pl.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 4:
            trainer.datamodule.set_weights({"web": 0, "held out": 1})


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_callback_changes_the_mix_and_the_resumed_run_knows(tmp_path, folder, num_workers):
    def mixed():
        sources = {name: str(folder / name) for name in ("web", "held out")}
        return TokenDataModule(
            sources, 16, 4, {"web": 1, "held out": 0}, num_workers=num_workers, cache_folder=str(folder)
        )

    tokens = mixed()
    trainer(tmp_path, saver(tmp_path, every_n_train_steps=6), ChangeTheMix(), max_steps=6).fit(Recorder(), tokens)
    assert tokens.samples_per_source() == {"web": 16, "held out": 8}
    resumed = mixed()
    trainer(tmp_path, max_steps=8).fit(Recorder(), resumed, ckpt_path=tmp_path / "step=6.ckpt")
    assert resumed.samples_per_source() == {"web": 16, "held out": 16}
    assert resumed.epochs_per_source()["held out"] == pytest.approx(16 / 31)
    assert resumed.wait_seconds() > 0


def test_a_checkpoint_of_other_data_stops_the_run(tmp_path, folder):
    trainer(tmp_path, saver(tmp_path, every_n_train_steps=2), max_steps=2).fit(Recorder(), data(folder))
    other = TokenDataModule(str(folder / "held out"), 16, 4, cache_folder=str(folder))
    with pytest.raises(ValueError, match="other data than the checkpoint's: source 'data' has 505 tokens"):
        trainer(tmp_path, max_steps=4).fit(Recorder(), other, ckpt_path=tmp_path / "step=2.ckpt")


def test_the_index_is_kept_where_the_environment_says(tmp_path, folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    TokenDataModule(str(folder / "web"), 16, 4).prepare_data()
    assert len(list((tmp_path / "lightning_parm" / "_index").iterdir())) == 1


class Images(ElasticDataModule):
    """An existing data module after the two lines."""

    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return self.loader(range(40), batch_size=self.batch_size)


def test_a_map_style_data_set_resumes_on_another_batch_size(tmp_path):
    whole = Recorder()
    trainer(tmp_path, max_epochs=2).fit(whole, Images(4))
    assert sorted(whole.seen[:40]) == sorted(whole.seen[40:]) == list(range(40))
    assert whole.seen[:40] != whole.seen[40:]
    trainer(tmp_path, saver(tmp_path, every_n_train_steps=3), max_steps=4).fit(Recorder(), Images(4))
    resumed = Recorder()
    trainer(tmp_path, max_epochs=2).fit(resumed, Images(2), ckpt_path=tmp_path / "step=3.ckpt")
    assert resumed.seen == whole.seen[12:]
    assert resumed.epoch_ends == [28, 68]
