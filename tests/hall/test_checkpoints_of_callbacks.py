"""What ModelCheckpoint and the Trainer offer works on directories."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from distributed import run_ranks
from hall.continued import corpus, data, run, train
from hall.models import RecordingGPT, small_gpt
from hall.trainers import RandomTokens, make_trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.utils.data import DataLoader

from lightning_parm import ParmStrategy
from lightning_parm.checkpoint import trainer as checkpointing
from lightning_parm.checkpoint.directory import META

EP2 = {"expert_parallel_size": 2}

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided.*"),
]


class FailsAt(RecordingGPT):
    """Fails in the batch after ``step`` steps, on ``rank`` or on all ranks."""

    step, rank = 3, None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == self.step and self.rank in (None, self.global_rank):
            raise ValueError("the weather was bad")
        return super().training_step(batch, batch_idx)


@pytest.fixture(scope="module")
def uninterrupted() -> list[float]:
    return run("one process", 6)


def whole(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob(f"*/{META}"))


def test_when_and_what_is_saved(tmp_path: Path, uninterrupted: list[float]) -> None:
    corpus()

    def rank_main(rank: int, world_size: int) -> dict[str, Any]:
        def fit(name: str, steps: int, **options: Any) -> list[float]:
            keep = ModelCheckpoint(tmp_path / name, filename="{step}", **options)
            return train(rank, world_size, EP2, steps, callbacks=[keep], enable_checkpointing=True)

        fit("every 2", 4, every_n_train_steps=2, save_top_k=-1)
        fit("all the time", 3, train_time_interval=timedelta(0), save_top_k=-1)
        fit("weights", 2, every_n_train_steps=2, save_weights_only=True)
        weights = str(tmp_path / "weights" / "step=2.ckpt")
        with pytest.raises(KeyError, match="checkpoint contains only the model"):
            train(rank, world_size, EP2, 4, None, weights)
        trainer = make_trainer(rank, world_size, ParmStrategy(**EP2))
        model = small_gpt(torch.float64)
        trainer.validate(model, DataLoader(RandomTokens(8), batch_size=8), ckpt_path=weights, verbose=False)
        return trainer.strategy.whole_state_dict()

    validated = run_ranks(2, rank_main)[0]
    run("one process", 2, str(tmp_path / "plain.ckpt"))
    plain = torch.load(tmp_path / "plain.ckpt")["state_dict"]
    torch.testing.assert_close(validated, dict(plain), rtol=0, atol=1e-9)
    assert whole(tmp_path / "every 2") == ["step=2.ckpt", "step=4.ckpt"]
    assert whole(tmp_path / "all the time") == ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]
    continued = run("dp4", 6, None, str(tmp_path / "all the time" / "step=3.ckpt"))
    torch.testing.assert_close(continued, uninterrupted[3:], rtol=0, atol=1e-9)


def test_best_last_and_hpc(tmp_path: Path, uninterrupted: list[float]) -> None:
    corpus()

    def rank_main(rank: int, world_size: int) -> list[float]:
        keep = ModelCheckpoint(
            tmp_path / "kept", filename="{step}", every_n_train_steps=1, monitor="step", mode="min", save_last="link"
        )
        options = {"callbacks": [keep], "enable_checkpointing": True, "default_root_dir": str(tmp_path / "root")}
        trainer = make_trainer(
            rank, world_size, ParmStrategy(**EP2), max_steps=3, max_epochs=-1, gradient_clip_val=0.5, **options
        )
        model = small_gpt(torch.float64)
        trainer.fit(model, data(world_size))
        assert Path(keep.best_model_path).name == "step=1.ckpt"
        assert Path(keep.last_model_path).name == "last.ckpt"
        trainer.fit_loop.epoch_loop.max_steps = 4
        trainer.fit(model, data(world_size), ckpt_path="best")  # three more steps after the first
        (tmp_path / "root").mkdir(exist_ok=True)
        path = trainer._checkpoint_connector.hpc_save_path(str(tmp_path / "root"))
        assert Path(path).name == "hpc_ckpt_1.ckpt"
        trainer.strategy.barrier()  # else a rank may look only when another one has begun to save
        trainer.save_checkpoint(path)
        assert trainer._checkpoint_connector.hpc_save_path(str(tmp_path / "root")).endswith("hpc_ckpt_2.ckpt")
        return [*model.losses, *train(rank, world_size, EP2, 6, None, "hpc", **options)]

    losses = run_ranks(2, rank_main)[0]
    expected = [*uninterrupted[:3], *uninterrupted[1:4], *uninterrupted[4:]]
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-9)
    (tmp_path / "root" / "hpc_ckpt_2.ckpt").mkdir()  # a later one, whose save was cut

    def resume(rank: int, world_size: int) -> None:
        train(rank, world_size, EP2, 6, None, "hpc", default_root_dir=str(tmp_path / "root"))

    with pytest.raises(AssertionError, match=r"hpc_ckpt_2\.ckpt' is incomplete.*Resume from '.*hpc_ckpt_1\.ckpt'"):
        run_ranks(2, resume)


@pytest.mark.parametrize("sharded", [True, False])
def test_an_exception_on_all_ranks_leaves_a_checkpoint(
    sharded: bool, tmp_path: Path, uninterrupted: list[float]
) -> None:
    corpus()

    def rank_main(rank: int, world_size: int) -> None:
        keep = ModelCheckpoint(tmp_path, filename="{step}", save_on_exception=True)
        strategy = {"async_checkpoint": sharded, "save_distributed_checkpoint": sharded}
        with pytest.raises(ValueError, match="the weather was bad"):
            train(
                rank,
                world_size,
                EP2,
                6,
                model=small_gpt(torch.float64, cls=FailsAt),
                callbacks=[keep],
                enable_checkpointing=True,
                strategy=strategy,
            )

    run_ranks(2, rank_main)
    assert [path.name for path in tmp_path.iterdir()] == ["step=3.ckpt"]
    continued = run("ep4", 6, None, str(tmp_path / "step=3.ckpt"))
    torch.testing.assert_close(continued, uninterrupted[3:], rtol=0, atol=1e-9)


def test_an_exception_on_one_rank_leaves_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus()
    monkeypatch.setattr(checkpointing, "_SECONDS_TO_MEET", 1.0)
    monkeypatch.setattr(FailsAt, "rank", 1)

    def rank_main(rank: int, world_size: int) -> None:
        keep = ModelCheckpoint(tmp_path, filename="{step}", save_on_exception=True)
        model = small_gpt(torch.float64, cls=FailsAt)
        train(rank, world_size, EP2, 6, model=model, callbacks=[keep], enable_checkpointing=True)

    with pytest.raises(
        AssertionError,
        match=r"(?s)the weather was bad.*No checkpoint was saved on exception: rank 1 failed \(ValueError: the weather "
        r"was bad\) and not every other rank did within 1 s",
    ):
        run_ranks(2, rank_main)
    assert not whole(tmp_path)


def test_lightnings_async_plugin(tmp_path: Path, uninterrupted: list[float]) -> None:
    with pytest.raises(ValueError, match=r"take the plugin away and use ParmStrategy\(async_checkpoint=True\)"):
        L.Trainer(strategy=ParmStrategy(), accelerator="cpu", devices=2, plugins=[AsyncCheckpointIO()], logger=False)
    neither = ParmStrategy(async_checkpoint=True, save_distributed_checkpoint=False)
    with pytest.raises(ValueError, match=r"drop one of them, or give the Trainer Lightning's AsyncCheckpointIO"):
        L.Trainer(strategy=neither, accelerator="cpu", devices=2, logger=False)
    corpus()

    def rank_main(rank: int, world_size: int) -> None:
        strategy = ParmStrategy(**EP2, save_distributed_checkpoint=False)
        strategy._checkpoint_io = AsyncCheckpointIO(strategy.checkpoint_io)
        keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1)
        options = {"max_steps": 3, "max_epochs": -1, "gradient_clip_val": 0.5, "enable_checkpointing": True}
        trainer = make_trainer(rank, world_size, strategy, callbacks=[keep], **options)
        trainer.fit(small_gpt(torch.float64), data(world_size))

    run_ranks(2, rank_main)
    continued = run("ep4", 6, None, str(tmp_path / "step=3.ckpt"))
    torch.testing.assert_close(continued, uninterrupted[3:], rtol=0, atol=1e-9)


@pytest.mark.parametrize("batches", [4, 5])
def test_a_checkpoint_inside_an_accumulation_says_so_on_resume(batches: int, tmp_path: Path) -> None:
    corpus()
    path = str(tmp_path / "cut.ckpt")

    class Save(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx + 1 == batches:
                trainer.save_checkpoint(path)

    def rank_main(rank: int, world_size: int, resume_from: str | None) -> None:
        options = {"accumulate_grad_batches": 2, "callbacks": None if resume_from else [Save()]}
        train(rank, world_size, EP2, 3, None, resume_from, **options)

    run_ranks(2, rank_main, None)
    if batches == 4:
        run_ranks(2, rank_main, path)  # warnings are errors
        return
    with pytest.raises(
        AssertionError,
        match=r"cut\.ckpt' was taken after 5 batches and 2 optimizer steps, 1 batches into an accumulation of 2\.",
    ):
        run_ranks(2, rank_main, path)
