"""Directories on filesystems that fsspec knows, and what reading says of those that are broken."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from distributed import run_ranks
from fsspec.implementations.local import LocalFileSystem
from hall.continued import corpus, run, train
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_parm.checkpoint.directory import META, consolidate, load_meta, load_sharded, remove_sharded, save_sharded
from lightning_parm.checkpoint.folder import Folder

EP2 = {"expert_parallel_size": 2}


class Bucket(LocalFileSystem):
    """A remote store that all processes of this machine see; it opens with the right key only."""

    protocol = "bucket"
    cachable = False

    def __init__(self, key: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.key = key

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(p) for p in path]
        return super()._strip_protocol(str(path).removeprefix("bucket://"))

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "private" in path and self.key != "secret":
            raise PermissionError(f"{path} needs the key")
        return super().open(path, mode, **options)


@pytest.fixture(autouse=True)
def bucket() -> Iterator[None]:
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    yield
    fsspec.config.conf.pop("bucket", None)


@pytest.fixture(scope="module")
def uninterrupted() -> list[float]:
    return run("one process", 5)


def as_one(sent: Any) -> Any:
    return sent


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided.*")
def test_ranks_save_rotate_and_resume_behind_a_url(tmp_path: Path, uninterrupted: list[float]) -> None:
    corpus()

    def rank_main(rank: int, world_size: int, steps: int, resume_from: str | None, later: bool) -> list[float]:
        keep = ModelCheckpoint(f"bucket://{tmp_path}", filename="{step}", every_n_train_steps=1, save_last=True)
        options = {"callbacks": [keep], "enable_checkpointing": True, "strategy": {"async_checkpoint": later}}
        return train(rank, world_size, EP2, steps, None, resume_from, **options)

    run_ranks(2, rank_main, 2, None, False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "step=2.ckpt"]
    losses = run_ranks(2, rank_main, 4, "last", True)[0]
    torch.testing.assert_close(losses, uninterrupted[2:4], rtol=0, atol=1e-9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "step=4.ckpt"]
    for path in tmp_path.iterdir():
        assert sorted(entry.name.split("-")[0] for entry in path.iterdir()) == [META, "shards"]
    consolidate(f"bucket://{tmp_path}/step=4.ckpt", str(tmp_path / "one.ckpt"))
    losses = run("ep4", 5, None, str(tmp_path / "one.ckpt"))
    torch.testing.assert_close(losses, uninterrupted[4:], rtol=0, atol=1e-9)


def test_storage_options_reach_the_filesystem(tmp_path: Path) -> None:
    url, state = f"bucket://{tmp_path}/private.ckpt", {"state_dict": {"weight": torch.arange(4.0)}}
    with pytest.raises(
        RuntimeError, match=r"private\.ckpt' cannot be saved: rank 0: PermissionError: .* needs the key"
    ):
        save_sharded(state, url, as_one)
    save_sharded(state, url, as_one, {"key": "secret"})
    with pytest.raises(RuntimeError, match="needs the key"):
        load_meta(url)
    fsspec.config.conf["bucket"] = {"key": "secret"}
    assert load_sharded(url, {})["state_dict"]["weight"].tolist() == [0, 1, 2, 3]


def test_one_process_saves_in_memory() -> None:
    url = "memory://runs/step=1.ckpt"
    for value in (1.0, 2.0):
        save_sharded({"state_dict": {"weight": torch.full((3,), value)}, "epoch": 4}, url, as_one)
    loaded = load_sharded(url, {})
    assert loaded["epoch"] == 4
    assert loaded["state_dict"]["weight"].tolist() == [2, 2, 2]
    assert [entry.split("-")[0] for entry in Folder(url).entries()] == [META, "shards"]
    remove_sharded(url)
    assert not Folder(url).exists()
    with pytest.raises(RuntimeError, match=r"is incomplete.* Resume from an earlier checkpoint and delete"):
        load_meta("memory://nothing.ckpt")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "step=1.ckpt"
    states = {"state_dict": {"weight": torch.arange(1000.0), "bias": torch.zeros(3)}}
    save_sharded(states, path, as_one)
    return path


def test_a_file_in_the_place_gives_way(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(b"a checkpoint of one file")
    save_sharded({"state_dict": {"weight": torch.zeros(3)}}, path, as_one)
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]
    assert path.is_dir()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(RuntimeError, match=r"x\.ckpt' cannot be saved: rank 0 cannot make it a folder \(NotADirectory"):
        save_sharded({"state_dict": {}}, tmp_path / "file" / "x.ckpt", as_one)


def test_meta_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Folder, "write", full)
    with pytest.raises(RuntimeError, match=r"x\.ckpt' cannot be saved: rank 0: OSError: \[Errno 28\] No space left"):
        save_sharded({"state_dict": {"weight": torch.zeros(3)}}, tmp_path / "x.ckpt", as_one)
    with pytest.raises(RuntimeError, match="is incomplete"):
        load_meta(tmp_path / "x.ckpt")


@pytest.mark.parametrize("damage", ["cut", "removed", "garbled"])
@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", META])
def test_a_damaged_file_is_named(file: str, damage: str, saved: Path) -> None:
    (shards,) = saved.glob("shards-*")
    broken = saved / META if file == META else shards / file
    content = broken.read_bytes()
    broken.unlink()
    if damage == "cut":
        broken.write_bytes(content[: len(content) // 2])
    elif damage == "garbled":
        broken.write_bytes(b"\x07" * len(content))
    named = "is incomplete" if (file, damage) == (META, "removed") else rf"{file}' (of a checkpoint is|cannot be read)"
    with pytest.raises(RuntimeError, match=named):
        load_sharded(saved, {})


def test_removing_begins_with_meta(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(path: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", crash)
    with pytest.raises(KeyboardInterrupt):
        remove_sharded(saved)
    with pytest.raises(RuntimeError, match="is incomplete"):
        load_sharded(saved, {})


def test_removing_a_link_leaves_what_it_leads_to(saved: Path) -> None:
    link = saved.with_name("last.ckpt")
    link.symlink_to(saved.name)
    remove_sharded(link)
    assert not link.is_symlink()
    assert load_sharded(saved, {})["state_dict"]["bias"].tolist() == [0, 0, 0]


def test_the_format_is_versioned(saved: Path) -> None:
    meta = torch.load(saved / META)
    assert meta.pop("shards_format") == 1
    torch.save(meta, saved / META)  # as the first version wrote it
    assert load_sharded(saved, {})["state_dict"]["bias"].tolist() == [0, 0, 0]
    torch.save({**meta, "shards_format": 7}, saved / META)
    with pytest.raises(RuntimeError, match=r"has format 7 .* reads formats up to 1\. Upgrade lightning-parm, or let"):
        load_sharded(saved, {})
