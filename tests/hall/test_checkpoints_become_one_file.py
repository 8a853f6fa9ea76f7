"""``consolidate`` makes one file of a directory that opens anywhere, without a process group or a Trainer."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hall.continued import run
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

from lightning_parm import cli
from lightning_parm.checkpoint.directory import consolidate, save_sharded
from lightning_parm.models import GPT


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step 3 at ep2 esp2."""
    path = tmp_path_factory.mktemp("saved") / "step=3.ckpt"
    run("ep2 esp2", 3, str(path))
    return path


@pytest.fixture(scope="module")
def uninterrupted() -> list[float]:
    return run("one process", 5)


@pytest.fixture(scope="module")
def file(directory: Path) -> Path:
    told: list[tuple[str, int, int]] = []
    result = consolidate(
        str(directory), str(directory.parent / "one.ckpt"), on_progress=lambda *step: told.append(step)
    )
    assert result["global_step"] == 3
    for stage in ("reading", "writing"):
        steps = [(done, total) for name, done, total in told if name == stage]
        assert steps == sorted(steps)
        assert steps[-1] == (result["bytes"], result["bytes"])
    return directory.parent / "one.ckpt"


@pytest.mark.parametrize("loaded_at", ["one process", "mp2 ep2 esp2"])
def test_the_file_continues_anywhere(file: Path, loaded_at: str, uninterrupted: list[float]) -> None:
    torch.testing.assert_close(run(loaded_at, 5, None, str(file)), uninterrupted[3:], rtol=0, atol=1e-9)


def test_the_file_is_what_one_process_writes(file: Path, tmp_path: Path) -> None:
    run("one process", 3, str(tmp_path / "plain.ckpt"))
    ours, plain = (torch.load(path, weights_only=True) for path in (file, tmp_path / "plain.ckpt"))
    assert list(ours) == list(plain)
    torch.testing.assert_close(ours["state_dict"], dict(plain["state_dict"]), rtol=0, atol=1e-9)
    for mine, theirs in zip(ours["optimizer_states"], plain["optimizer_states"], strict=True):
        assert [group["params"] for group in mine["param_groups"]] == [g["params"] for g in theirs["param_groups"]]
        torch.testing.assert_close(mine["state"], theirs["state"], rtol=0, atol=1e-9)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_file_with_averaged_weights_is_what_one_process_writes(tmp_path: Path) -> None:
    def saved(topology: str, folder: str, steps: int, resume_from: str | None = None) -> Path:
        keep = ModelCheckpoint(tmp_path / folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        callbacks = [EMAWeightAveraging(decay=0.5), keep]
        run(topology, steps, None, resume_from, callbacks=callbacks, enable_checkpointing=True)
        return tmp_path / folder / f"step={steps}.ckpt"

    def compare(file: Path, expected: Path) -> None:
        ours, plain = (torch.load(path, weights_only=True) for path in (file, expected))
        assert list(ours) == list(plain)
        for key in ("state_dict", "current_model_state", "averaging_state"):
            torch.testing.assert_close(dict(ours[key]), dict(plain[key]), rtol=0, atol=1e-9)
        assert not torch.equal(ours["state_dict"]["norm.weight"], ours["current_model_state"]["norm.weight"])

    file = tmp_path / "one.ckpt"
    consolidate(str(saved("ep2 esp2", "ranks", 3)), str(file))
    last = saved("one process", "plain", 4)
    compare(file, last.with_name("step=3.ckpt"))
    averages = torch.load(file)["state_dict"]
    for name, value in GPT.load_from_checkpoint(file, map_location="cpu").state_dict().items():
        torch.testing.assert_close(value, averages[name].to(value.dtype), rtol=0, atol=0)
    compare(saved("one process", "resumed", 4, str(file)), last)


def test_the_file_opens_with_load_from_checkpoint(file: Path) -> None:
    model = GPT.load_from_checkpoint(file, map_location="cpu")
    whole = torch.load(file)["state_dict"]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, whole[name].to(value.dtype), rtol=0, atol=0)


def test_neither_a_trainer_nor_lightning_is_imported(directory: Path, tmp_path: Path) -> None:
    script = f"""
import importlib.util, sys, types
spec = importlib.util.find_spec("lightning_parm")
package = types.ModuleType("lightning_parm")  # without what the package exports, which is for Trainers
package.__path__ = list(spec.submodule_search_locations)
sys.modules["lightning_parm"] = package
from lightning_parm.checkpoint import consolidate
consolidate({str(directory)!r}, {str(tmp_path / "one.ckpt")!r})
import torch.distributed
assert not torch.distributed.is_initialized()
assert not [name for name in sys.modules if name.startswith(("lightning.", "pytorch_lightning"))]
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=250)
    assert (tmp_path / "one.ckpt").is_file()


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    numbers = {f"w{i}": torch.full((2**18,), float(i)) for i in range(100)}
    save_sharded({"state_dict": numbers}, tmp_path / "big.ckpt", lambda sent: sent)
    measure = f"""
import re
def private():  # what cannot be written out to a file
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 2**10
from lightning_parm.checkpoint import consolidate
before, peak = private(), 0.0
def look(stage, done, total):
    global peak
    peak = max(peak, private() - before)
consolidate({str(tmp_path)!r} + "/big.ckpt", {str(tmp_path)!r} + "/one.ckpt", on_progress=look)
assert peak < 30, peak  # MiB, of 100
import torch
whole = torch.load({str(tmp_path)!r} + "/one.ckpt")["state_dict"]
assert all(bool((whole[f"w{{i}}"] == i).all()) for i in range(100))
"""
    subprocess.run([sys.executable, "-c", measure], check=True, timeout=250)


def test_the_command(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["consolidate", str(directory), str(tmp_path / "one.ckpt")])
    assert ended.value.code == 0
    told = capsys.readouterr()
    assert "one.ckpt" in told.out
    assert "writing: " in told.err
    with pytest.raises(SystemExit) as ended:
        cli.main(["consolidate", str(directory), str(tmp_path / "one.ckpt")])
    assert ended.value.code == 2
    assert "one.ckpt' exists: give another name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "nowhere"}, r"'nowhere' does not exist: give the directory"),
        ({"path": __file__}, r"is one file already: give the directory"),
        ({"file": "directory/inside.ckpt"}, r"inside\.ckpt' lies inside the checkpoint"),
        ({"path": "incomplete"}, r"incomplete' is incomplete: it has no 'meta\.pt'"),
    ],
)
def test_wrong_arguments_are_told(change: dict[str, Any], message: str, directory: Path, tmp_path: Path) -> None:
    (tmp_path / "incomplete").mkdir()
    arguments = {"path": str(directory), "file": str(tmp_path / "one.ckpt")} | change
    arguments = {name: value.replace("directory", str(directory)) for name, value in arguments.items()}
    if change.get("path") == "incomplete":
        arguments["path"] = str(tmp_path / "incomplete")
    with pytest.raises(ValueError, match=message):
        consolidate(**arguments)


def test_a_directory_does_not_open_with_load_from_checkpoint(directory: Path) -> None:
    with pytest.raises(IsADirectoryError, match=r"step=3\.ckpt"):
        GPT.load_from_checkpoint(directory)
