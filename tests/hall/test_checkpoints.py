"""A checkpoint written at any topology continues at any other, and a crash while saving loses nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from hall.continued import CRASHES, TOPOLOGIES, corpus, data, run, train
from hall.models import small_gpt
from hall.trainers import make_trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_parm import ParmStrategy
from lightning_parm.checkpoint.directory import META
from lightning_parm.models import GPT

ON_FOUR = [name for name, (world_size, _) in TOPOLOGIES.items() if world_size == 4]


@pytest.fixture(scope="module")
def uninterrupted() -> list[float]:
    return run("one process", 6)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Step 3, saved at every topology."""
    folder = tmp_path_factory.mktemp("saved")
    paths = {name: str(folder / f"{name.replace(' ', '-')}.ckpt") for name in ON_FOUR}

    def rank_main(rank: int, world_size: int) -> None:
        for name, path in paths.items():
            train(rank, world_size, TOPOLOGIES[name][1], 3, path)

    corpus()
    run_ranks(4, rank_main, timeout=200)
    assert all(Path(path).is_dir() for path in paths.values())
    for name in ("parm on one", "one process"):
        paths[name] = str(folder / f"{name.replace(' ', '-')}.ckpt")
        run(name, 3, paths[name])
        assert Path(paths[name]).is_file()
    return paths


@pytest.mark.parametrize("loaded_at", TOPOLOGIES)
def test_training_continues_at_any_topology(saved: dict[str, str], loaded_at: str, uninterrupted: list[float]) -> None:
    world_size, sizes = TOPOLOGIES[loaded_at]
    files = ["one process", "parm on one"]
    sources = files if sizes is None else list(saved)  # without the strategy, one file is what opens

    def rank_main(rank: int, world_size: int) -> dict[str, list[float]]:
        return {name: train(rank, world_size, sizes, 6, None, saved[name]) for name in sources}

    for name, losses in run_ranks(world_size, rank_main, timeout=200)[0].items():
        told = f"saved at {name}: {losses} instead of {uninterrupted[3:]}"
        torch.testing.assert_close(losses, uninterrupted[3:], rtol=0, atol=1e-9, msg=told)


@pytest.mark.parametrize("saved_at", ["dp4", "mp2 ep2 esp2"])
def test_one_file_opens_without_the_strategy(saved_at: str, tmp_path: Path, uninterrupted: list[float]) -> None:
    path = tmp_path / "whole.ckpt"
    run(saved_at, 3, save_to=str(path), strategy={"save_distributed_checkpoint": False})
    assert path.is_file()
    model = GPT.load_from_checkpoint(path)
    rows = model.blocks[0].feed_forward.state_dict()
    experts = next(value for name, value in rows.items() if value.dim() >= 3)
    assert experts.shape[0] == 4
    assert not torch.equal(experts[0], experts[1])
    torch.testing.assert_close(run("one process", 6, resume_from=str(path)), uninterrupted[3:], rtol=0, atol=1e-9)
    torch.testing.assert_close(run("ep4", 6, resume_from=str(path)), uninterrupted[3:], rtol=0, atol=1e-9)


def test_a_ddp_checkpoint_continues_under_parm(tmp_path: Path, uninterrupted: list[float]) -> None:
    path = str(tmp_path / "ddp.ckpt")
    corpus()

    def under_ddp(rank: int, world_size: int) -> list[float]:
        trainer = make_trainer(rank, world_size, "ddp", max_steps=3, max_epochs=-1, gradient_clip_val=0.5)
        model = small_gpt(torch.float64)
        trainer.fit(model, data(world_size))
        trainer.save_checkpoint(path)
        return model.losses

    torch.testing.assert_close(run_ranks(2, under_ddp)[0], uninterrupted[:3], rtol=0, atol=1e-9)
    continued = run("mp2 ep2 esp2", 6, resume_from=path)
    torch.testing.assert_close(continued, uninterrupted[3:], rtol=0, atol=1e-9)


def test_saving_again_replaces_the_shards_and_nothing_else_is_left(tmp_path: Path, uninterrupted: list[float]) -> None:
    path = tmp_path / "last.ckpt"
    run("ep4", 2, save_to=str(path))
    run("ep4", 3, save_to=str(path))
    assert sorted(entry.name.split("-")[0] for entry in path.iterdir()) == [META, "shards"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]
    torch.testing.assert_close(run("ep4", 6, resume_from=str(path)), uninterrupted[3:], rtol=0, atol=1e-9)


@pytest.mark.parametrize(("killed_at", "survivor"), CRASHES.values(), ids=CRASHES)
def test_a_kill_while_saving_leaves_a_whole_checkpoint(
    killed_at: str, survivor: int, tmp_path: Path, uninterrupted: list[float]
) -> None:
    path, fresh = tmp_path / "last.ckpt", tmp_path / "new.ckpt"
    run("ep4", 3, save_to=str(path))
    # a killed rank's peers may report the broken connection first; a fresh directory has no old shards to remove
    for target in (path, fresh) if survivor == 3 else (path,):
        with pytest.raises((RuntimeError, AssertionError), match=r"died without a result|[Cc]onnection"):
            run("ep4", 4, save_to=str(target), killed_at=killed_at)
    continued = run("ep4", 6, resume_from=str(path))
    torch.testing.assert_close(continued, uninterrupted[survivor:], rtol=0, atol=1e-9)
    if survivor == 3:
        assert fresh.is_dir()
        with pytest.raises(AssertionError, match=r"new\.ckpt' is incomplete: it has no 'meta\.pt'"):
            run("ep4", 6, resume_from=str(fresh))


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("save_last", [True, "link"])
def test_rotation_and_last_work_on_directories(save_last: Any, tmp_path: Path, uninterrupted: list[float]) -> None:
    def rank_main(rank: int, world_size: int, steps: int, resume_from: str | None) -> list[float]:
        keep = ModelCheckpoint(
            tmp_path,
            filename="{step}",
            every_n_train_steps=1,
            save_top_k=2,
            monitor="step",
            mode="max",
            save_last=save_last,
        )
        options = {"max_steps": steps, "max_epochs": -1, "gradient_clip_val": 0.5, "enable_checkpointing": True}
        trainer = make_trainer(rank, world_size, ParmStrategy(expert_parallel_size=4), callbacks=[keep], **options)
        model = small_gpt(torch.float64)
        trainer.fit(model, data(world_size), ckpt_path=resume_from)
        return model.losses

    run_ranks(4, rank_main, 3, None)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["last.ckpt", "step=2.ckpt", "step=3.ckpt"]
    assert (tmp_path / "last.ckpt").is_symlink() == (save_last == "link")
    losses = run_ranks(4, rank_main, 6, "last")[0]
    torch.testing.assert_close(losses, uninterrupted[3:], rtol=0, atol=1e-9)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["last.ckpt", "step=5.ckpt", "step=6.ckpt"]
