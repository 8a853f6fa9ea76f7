"""The command line: help at once, one clear sentence on bad input, tables for people and JSON for programs."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
import yaml
from data.corpora import write_arrow
from distributed import Finished, run_command

from lightning_parm import cli


def run(*arguments: str, cwd: Path | None = None) -> Finished:
    return run_command([sys.executable, "-m", "lightning_parm", *arguments], cwd, fresh=False)


def called(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run a command in this process and return its exit code and what it wrote."""
    with pytest.raises(SystemExit) as exit_info:
        cli.main(arguments)
    output = capsys.readouterr()
    return int(exit_info.value.code or 0), output.out, output.err


def test_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ((), ("--help",), ("-h",)):
        code, out, err = called(capsys, *arguments)
        assert (code, err) == (0, "")
        for command in ("fit", "validate", "test", "predict", "tokenize"):
            assert re.search(rf"^  {command} ", out, re.MULTILINE)
    assert called(capsys, "--version")[1].strip() == __import__("lightning_parm").__version__


def test_the_page_shows_the_overview_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "cli.md"
    assert f"$ lightning-parm\n{called(capsys)[1]}" in page.read_text(encoding="utf-8")


def test_every_listed_function_exists() -> None:
    for _, module, function in cli._FUNCTIONS.values():
        assert callable(getattr(__import__(module, fromlist=[function]), function))


@pytest.mark.parametrize("typed", [("--sweep",), ("--sweep", "true"), ("--sweep=true",), ("--sweep", "--nodes", "4")])
def test_a_switch_alone_is_switched_on(
    typed: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(sweep: bool = False, nodes: int = 1) -> dict[str, int]:
        """Tell the arguments."""
        return {"sweep": int(sweep), "nodes": nodes}

    monkeypatch.setattr("lightning_parm.plan.plan", told)
    code, out, _ = called(capsys, "plan", *typed, "--json")
    assert (code, json.loads(out)) == (0, {"sweep": 1, "nodes": 4 if "--nodes" in typed else 1})


def test_help_comes_from_the_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = called(capsys, "tokenize", "--help")
    assert code == 0
    assert "usage: lightning-parm tokenize" in out
    assert "a quoted glob pattern" in " ".join(out.split())
    assert "--on_progress" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tokenise", "a"], r"'tokenise' is not a command; .* Did you mean 'tokenize'\?"),
        (["bench"], r"'bench' is not a command; the commands are fit, "),
        (["tokenize", "nosuch*.txt", "out"], r"'nosuch\*\.txt' matches no file"),
        (["tokenize", "nosuch.txt", "out", "--errors", "ignore"], r"Expected a .*'strict', 'replace', 'skip'"),
        (["tokenize"], "arguments are required: inputs, output"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = called(capsys, *arguments)
    assert (code, out) == (2, "")
    assert re.search(message, err), err
    assert "Traceback" not in err


def test_missing_extra_is_one_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = cli.importlib.util.find_spec
    for missing in ("jsonargparse", "rich", "tokenizers"):
        monkeypatch.setattr(
            cli.importlib.util, "find_spec", lambda name, missing=missing: None if name == missing else found(name)
        )
        code, _, err = called(capsys, "tokenize", "a", "b")
        assert code == 1
        assert "pip install 'lightning-parm[cli]'" in err
        assert err.count("\n") == 1


def test_failures_of_the_world_are_code_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")
    (tmp_path / "file").touch()
    code, _, err = called(capsys, "tokenize", str(tmp_path / "a.txt"), str(tmp_path / "file" / "below"))
    assert code == 1
    assert "Not a directory" in err or "File exists" in err

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_parm.data.tokenize.corpus.find_files", stop)
    code, _, err = called(capsys, "tokenize", str(tmp_path / "a.txt"), str(tmp_path / "out"))
    assert code == 130
    assert "the same command goes on where it was" in err


def test_tokenize_shows_a_table_or_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text("some text " * 20, encoding="utf-8")
    out = str(tmp_path / "out")
    code, text, progress = called(capsys, "tokenize", str(tmp_path / "*.txt"), out, "--train-vocab-size", "300")
    assert code == 0
    assert re.search(r"documents +3\b", text)
    assert re.search(r"^tokenizing: .* \(100%\)$", progress, re.MULTILINE), "plain lines where there is no terminal"
    assert "\x1b" not in text + progress
    code, text, _ = called(capsys, "tokenize", str(tmp_path / "*.txt"), out, "--train-vocab-size", "300", "--json")
    assert code == 0
    result = json.loads(text)
    assert result["documents"] == 3
    assert result["kept_shards"] == result["shards"] == 1


def test_a_list_of_inputs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("some text", encoding="utf-8")
    inputs = json.dumps([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")])
    code, out, _ = called(capsys, "tokenize", inputs, str(tmp_path / "out"), "--train-vocab-size=260", "--json")
    assert code == 0
    assert json.loads(out)["documents"] == 2


def test_progress_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with cli._progress() as show:
        for done in (0, 50, 100):
            show("tokenizing", done, 100)
    assert "tokenizing" in capsys.readouterr().err


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    random = np.random.default_rng(0)
    write_arrow(folder / "a.arrow", [random.integers(0, 60, 90).astype(np.uint16) for _ in range(40)], delimiter=0)
    return folder


SMALL = ["--data.sequence_length=16", "--data.batch_size=2", "--model.vocab_size=64", "--model.num_layers=1"]
SMALL += ["--model.model_dim=16", "--model.hidden_dim=16", "--model.num_heads=2", "--model.num_experts=4"]


# What Lightning and jsonargparse say of each other and of runs this small is not under test.
LIGHTNING = pytest.mark.filterwarnings("ignore")


def trained(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run one of the Trainer's commands in this process, on one device."""
    environment = dict(os.environ)  # Lightning leaves a seed and a port there for the processes that it starts
    monkeypatch.setattr(sys, "argv", ["lightning-parm", *arguments])
    try:
        cli.main()
    finally:
        if dist.is_initialized():  # the strategy's group of one must not be here when other tests fork ranks
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)


@LIGHTNING
def test_fit_on_two_ranks_then_validate_and_fit_from_its_config(
    tmp_path: Path,
    tokens: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "log", "name": "run"}}
    trainer = {"accelerator": "cpu", "devices": 2, "strategy": "parm", "max_steps": 2, "logger": logger}
    config = {"trainer": trainer, "data": {"sources": str(tokens), "validation": str(tokens)}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    fit = run("fit", "--config=run.yaml", *SMALL, cwd=tmp_path)
    assert fit.returncode == 0, fit.stderr
    assert "`max_steps=2` reached" in fit.stderr + fit.stdout
    assert "To prevent mistakes it is not recommended" not in fit.stderr
    folder = tmp_path / "log" / "run" / "version_0"
    saved = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    assert saved["model"]["class_path"] == "lightning_parm.models.GPT"
    assert saved["data"]["class_path"] == "lightning_parm.TokenDataModule"
    [checkpoint] = (folder / "checkpoints").iterdir()

    monkeypatch.chdir(tmp_path)
    on_one = ("--trainer.devices=1", f"--ckpt_path={checkpoint}", "--trainer.enable_progress_bar=false")
    trained("fit", f"--config={folder / 'config.yaml'}", *on_one, "--trainer.max_steps=3", monkeypatch=monkeypatch)
    assert "`max_steps=3` reached" in caplog.text
    del saved["ckpt_path"]
    (tmp_path / "validate.yaml").write_text(yaml.safe_dump(saved), encoding="utf-8")
    trained("validate", "--config=validate.yaml", *on_one, monkeypatch=monkeypatch)
    assert "val_loss" in capsys.readouterr().out


@LIGHTNING
def test_a_users_own_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel\n"
        "from pathlib import Path\n"
        "class Mine(BoringModel):\n"
        "    def __init__(self, size: int = 32):\n"
        "        super().__init__()\n"
        "        self.size = size\n"
        "    def on_train_end(self):\n"
        "        strategy = type(self.trainer.strategy).__name__\n"
        "        Path('proof').write_text(f'{self.size} {strategy}')\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    arguments = ["fit", "--model=mine.Mine", "--model.size=5", "--data=mine.BoringDataModule", "--trainer.devices=1"]
    arguments += ["--trainer.fast_dev_run=1", "--trainer.accelerator=cpu", "--trainer.strategy=parm"]
    trained(*arguments, monkeypatch=monkeypatch)
    assert (tmp_path / "proof").read_text(encoding="utf-8") == "5 ParmStrategy"


@LIGHTNING
def test_bad_trainer_arguments_are_code_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    strategy = ("--trainer.strategy=lightning_parm.ParmStrategy", "--trainer.strategy.schedule=s9")
    with pytest.raises(SystemExit, match="2"):
        trained("fit", *strategy, *SMALL, "--data.sources=x", monkeypatch=monkeypatch)
    assert "s9" in capsys.readouterr().err
