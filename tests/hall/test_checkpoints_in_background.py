"""``async_checkpoint=True``: training goes on while a checkpoint is written, and nothing is lost if it cannot be."""

import shutil
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from distributed import run_ranks
from hall.continued import CRASHES, corpus, run, train
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint import FileSystemWriter

from lightning_parm.checkpoint import background
from lightning_parm.checkpoint.directory import META

EP2 = {"expert_parallel_size": 2}
ASYNC = {"async_checkpoint": True}

pytestmark = pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided.*")


class SaveAt(L.Callback):
    """Saves to ``path`` after ``step``."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


class Look(L.Callback):
    """Calls ``look(step)`` before each batch, after ``step`` steps; a failed assertion there fails the fit."""

    def __init__(self, look: Any) -> None:
        self.look = look

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.look(trainer.global_step)


@pytest.fixture(scope="module")
def uninterrupted() -> list[float]:
    return run("one process", 6)


def every_step(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1)


def test_training_goes_on_and_rotation_waits(tmp_path: Path, uninterrupted: list[float]) -> None:
    corpus()

    def rank_main(rank: int, world_size: int) -> tuple[list[float], list[tuple[int, list[str]]]]:
        go_on = threading.Event()
        write_data, seen = FileSystemWriter.write_data, []

        def hold_back(self: Any, *args: Any) -> Any:
            if "step=2.ckpt" in str(self.path):
                assert threading.current_thread() is not threading.main_thread()
                go_on.wait(30)
            return write_data(self, *args)

        def look(step: int) -> None:
            whole = sorted(path.parent.name for path in tmp_path.glob(f"*/{META}"))
            seen.append((step, whole))
            if step == 3:  # the save after step 2 has not begun to write, and this batch follows the one after step 3
                go_on.set()

        with mock.patch.object(FileSystemWriter, "write_data", hold_back):
            options = {"callbacks": [every_step(tmp_path), Look(look)], "enable_checkpointing": True}
            return train(rank, world_size, EP2, 4, strategy=ASYNC, **options), seen

    losses, seen = run_ranks(2, rank_main)[0]
    torch.testing.assert_close(losses, uninterrupted[:4], rtol=0, atol=1e-9)
    assert dict(seen)[3] == ["step=1.ckpt"]  # kept until a later one is whole
    assert [path.name for path in tmp_path.iterdir()] == ["step=4.ckpt"]  # the end of fit has waited
    assert (tmp_path / "step=4.ckpt" / META).is_file()
    continued = run("mp2 ep2 esp2", 6, None, str(tmp_path / "step=4.ckpt"))
    torch.testing.assert_close(continued, uninterrupted[4:], rtol=0, atol=1e-9)


def test_shards_of_parameters_are_saved_too(tmp_path: Path, uninterrupted: list[float]) -> None:
    options = {"callbacks": [every_step(tmp_path)], "enable_checkpointing": True, "strategy": ASYNC}
    run("ep2 edp2 sharded", 3, **options)
    continued = run("ep2 esp2", 4, None, str(tmp_path / "step=3.ckpt"))
    torch.testing.assert_close(continued, uninterrupted[3:4], rtol=0, atol=1e-9)


def test_two_saves_at_most_are_on_their_way(tmp_path: Path) -> None:
    copies: list[dict[str, Any]] = []

    class Save:
        def __init__(self, hold: threading.Event) -> None:
            self.hold = hold

        def copy_to_cpu(self, buffers: dict[str, Any]) -> None:
            copies.append(buffers)

        def write(self, group: Any) -> None:
            assert self.hold.wait(30)

    def rank_main(rank: int, world_size: int) -> list[bool]:
        saves = background.BackgroundSaves()
        events = [threading.Event() for _ in range(3)]
        removed = []
        for event in events[:2]:
            saves.save(Save(event))  # type: ignore[arg-type]
        saves.remove(lambda: removed.append(1))
        third = threading.Thread(target=saves.save, args=(Save(events[2]),))
        third.start()
        third.join(0.2)
        blocked = [third.is_alive(), len(copies) == 2, not removed]
        events[0].set()
        third.join(30)
        blocked += [not third.is_alive(), copies[2] is copies[0], copies[1] is not copies[0]]
        for event in events:
            event.set()
        saves.close()
        return [*blocked, removed == [1]]

    assert all(run_ranks(2, rank_main)[1])


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_failure_reaches_every_rank_and_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    corpus()

    def rank_main(rank: int, world_size: int) -> str:
        write_data = FileSystemWriter.write_data

        def full(self: Any, *args: Any) -> Any:
            if rank == 1 and "step=2.ckpt" in str(self.path):
                raise OSError(28, "No space left on device")
            return write_data(self, *args)

        options = {"callbacks": [every_step(tmp_path)], "enable_checkpointing": True}
        with mock.patch.object(FileSystemWriter, "write_data", full), pytest.raises(RuntimeError) as failed:
            train(rank, world_size, EP2, 2, strategy=ASYNC, **options)
        return str(failed.value)

    for message in run_ranks(2, rank_main):
        assert "step=2.ckpt' cannot be saved: rank 1: OSError: [Errno 28] No space left on device" in message
    assert (tmp_path / "step=1.ckpt" / META).is_file()
    with pytest.raises(AssertionError, match=r"step=2\.ckpt' is incomplete.*Resume from .*step=1\.ckpt'"):
        run("ep4", 3, None, str(tmp_path / "step=2.ckpt"))


def test_what_waits_behind_a_failed_save_fails_too_and_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    # save_last makes two saves of each step, the second of which is on its way when the first fails
    corpus()

    def rank_main(rank: int, world_size: int) -> list[str]:
        write_data, writes = FileSystemWriter.write_data, 0

        def full(self: Any, *args: Any) -> Any:
            nonlocal writes
            writes += 1
            if writes == 3 and rank == 1:
                raise OSError(28, "No space left on device")
            return write_data(self, *args)

        failures = []
        write = background.BackgroundSaves._write

        def noted(self: Any, *args: Any) -> None:
            try:
                write(self, *args)
            except RuntimeError as failure:
                failures.append(str(failure))
                raise

        keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_last=True)
        options = {"callbacks": [keep], "enable_checkpointing": True}
        disk = mock.patch.object(FileSystemWriter, "write_data", full)
        with disk, mock.patch.object(background.BackgroundSaves, "_write", noted), pytest.raises(RuntimeError):
            train(rank, world_size, EP2, 6, strategy=ASYNC, **options)
        return failures

    for first, second in run_ranks(2, rank_main):
        assert "step=2.ckpt' cannot be saved: rank 1: OSError: [Errno 28] No space left on device" in first
        assert "last.ckpt' was not saved, because of what came before it: The checkpoint" in second
    assert (tmp_path / "step=1.ckpt" / META).is_file()
    assert (tmp_path / "last.ckpt" / META).is_file()
    assert not (tmp_path / "step=2.ckpt" / META).exists()


@pytest.fixture(scope="module")
def step_3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "step=3.ckpt"
    run("ep4", 3, str(path))
    return path


@pytest.mark.parametrize(("killed_at", "survivor"), CRASHES.values(), ids=CRASHES)
def test_a_kill_while_the_thread_saves_leaves_a_whole_checkpoint(
    killed_at: str, survivor: int, step_3: Path, tmp_path: Path, uninterrupted: list[float]
) -> None:
    path, fresh = tmp_path / "last.ckpt", tmp_path / "new.ckpt"
    shutil.copytree(step_3, path)
    # a killed rank's peers may report the broken connection first
    for target in (path, fresh) if "write" in killed_at else (path,):
        with pytest.raises((RuntimeError, AssertionError), match=r"died without a result|[Cc]onnection"):
            run("ep4", 6, None, strategy=ASYNC, callbacks=[SaveAt(4, target)], killed_at=killed_at)
    continued = run("ep4", survivor + 1, None, str(path))
    torch.testing.assert_close(continued, uninterrupted[survivor : survivor + 1], rtol=0, atol=1e-9)
    if "write" in killed_at:
        with pytest.raises(AssertionError, match=r"new\.ckpt' is incomplete: it has no 'meta\.pt'"):
            run("ep4", 5, None, str(fresh))
