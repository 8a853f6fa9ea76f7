"""The command line: ``lightning-parm fit|validate|test|predict`` is a LightningCLI, the others are functions.

A function's signature is its command's arguments and its docstring the help. It returns a dict, which ``--json``
prints as it is and which is shown as a table otherwise.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

_PROGRAM = "lightning-parm"
_TRAINER = {
    "fit": "train a model; --ckpt_path resumes, on any number of devices",
    "validate": "run one evaluation over the validation set",
    "test": "run one evaluation over the test set",
    "predict": "run inference on the data",
}
#: Command -> (what it does, module, function); ``bench`` is followed by what to measure.
_FUNCTIONS = {
    "tokenize": ("turn text into Arrow files of tokens", "lightning_parm.data.tokenize", "tokenize"),
    "inspect": ("say what is in a folder of tokens", "lightning_parm.data.inspect", "inspect"),
    "consolidate": ("make one file of a sharded checkpoint", "lightning_parm.checkpoint.directory", "consolidate"),
    "plan": ("predict times and the best parallel sizes of a cluster", "lightning_parm.plan", "plan"),
    "bench layer": ("time a mixture's layer on one device", "lightning_parm.bench.layer", "layer"),
    "bench loader": ("time the loader beside its peers", "lightning_parm.bench.loader", "loader"),
    "bench schedules": (
        "time every schedule on a real or emulated cluster",
        "lightning_parm.bench.schedules",
        "schedules",
    ),
    "bench step": ("time a dense model's training step under parm and ddp", "lightning_parm.bench.step", "step"),
    "bench training": (
        "time a mixture's training steps under parm and ddp",
        "lightning_parm.bench.training",
        "training",
    ),
}


def main(args: Sequence[str] | None = None) -> None:
    """Run ``lightning-parm``.

    Args:
        args: The command and its arguments, by default those of the process.

    Raises:
        SystemExit: Always with a code but for the Trainer's commands: 0 when done, 2 for bad input, 1 for other
            failures that are the world's and not a bug.
    """
    arguments = list(sys.argv[1:] if args is None else args)
    if importlib.util.find_spec("jsonargparse") is None or importlib.util.find_spec("rich") is None:
        _fail(1, "the command line needs jsonargparse and rich: pip install 'lightning-parm[cli]'.")
    if any(argument in _TRAINER for argument in arguments) and not _command_of(arguments):
        _run_trainer(arguments)
        return
    if not arguments or arguments[0] in ("-h", "--help"):
        _print_overview()
    elif arguments[0] == "--version":
        sys.stdout.write(f"{importlib.import_module('lightning_parm').__version__}\n")
    elif command := _command_of(arguments):
        _run_function(command, arguments[len(command.split()) :])
    else:
        typed = " ".join(arguments[:2] if arguments[0] == "bench" else arguments[:1])
        known = [*_TRAINER, *_FUNCTIONS]
        near = difflib.get_close_matches(typed, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        _fail(2, f"{typed!r} is not a command; the commands are {', '.join(known)}.{hint}")
    sys.exit(0)


def _command_of(arguments: Sequence[str]) -> str | None:
    for length in (1, 2):
        if " ".join(arguments[:length]) in _FUNCTIONS:
            return " ".join(arguments[:length])
    return None


def _print_overview() -> None:
    lines = [f"usage: {_PROGRAM} COMMAND [ARGUMENTS]", "", "Train with Lightning's Trainer, from YAML or arguments:"]
    lines += [f"  {name:<17}{does}" for name, does in _TRAINER.items()]
    lines += ["", "Prepare and measure:"]
    lines += [f"  {name:<17}{does}" for name, (does, _, _) in _FUNCTIONS.items()]
    lines += ["", f"{_PROGRAM} COMMAND --help tells the arguments of one, {_PROGRAM} --version the version."]
    sys.stdout.write("\n".join(lines) + "\n")


def _fail(code: int, message: str, command: str = "") -> NoReturn:
    sys.stderr.write(f"{' '.join([_PROGRAM, command]).strip()}: error: {message}\n")
    sys.exit(code)


def _run_trainer(arguments: list[str]) -> None:
    from lightning.pytorch import LightningDataModule, LightningModule
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

    # Lightning's use of torch's pytree, once a rank: nothing that whoever types the command could change.
    warnings.filterwarnings("ignore", ".*treespec, LeafSpec.*")

    class ParmCLI(LightningCLI):
        """LightningCLI that knows ``strategy: parm`` and starts from our GPT and data module."""

        def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            parser.set_defaults(
                {
                    "model": {"class_path": "lightning_parm.models.GPT"},
                    "data": {"class_path": "lightning_parm.TokenDataModule"},
                }
            )

    ParmCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_kwargs={"overwrite": True},
        parser_kwargs={"prog": _PROGRAM},
        # Lightning's launcher starts the other ranks with the arguments of this process, so it wants them from there.
        args=None if arguments == sys.argv[1:] else arguments,
    )


def _run_function(command: str, arguments: list[str]) -> None:
    from jsonargparse import ArgumentParser

    _, module_name, function_name = _FUNCTIONS[command]
    module = importlib.import_module(module_name)
    function: Callable[..., dict[str, Any]] = getattr(module, function_name)
    parser = ArgumentParser(prog=f"{_PROGRAM} {command}")
    parser.add_function_arguments(function, as_positional=True, skip={"on_progress"})
    parser.add_argument("--json", action="store_true", help="print the result as JSON on one line")
    parameters = inspect.signature(function).parameters
    switches = {f"--{name}" for name, parameter in parameters.items() if parameter.annotation in (bool, "bool")}
    values = parser.parse_args(_switched([_underscored(argument) for argument in arguments], switches)).as_dict()
    as_json = values.pop("json")
    try:
        if "on_progress" in parameters:
            with _progress() as on_progress:
                result = function(**values, on_progress=on_progress)
        else:
            result = function(**values)
    except ValueError as error:
        _fail(2, str(error), command)
    except (OSError, ModuleNotFoundError) as error:
        _fail(1, str(error), command)
    except KeyboardInterrupt:
        _fail(130, "stopped; the same command goes on where it was.", command)
    if int(os.environ.get("RANK", 0)):  # torchrun started this many times; rank 0 speaks for all
        return
    if as_json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    from rich.console import Console

    render = getattr(module, "render", _table)
    Console().print(render(result))


def _underscored(argument: str) -> str:
    """Let the words of an option be joined either way: ``--train-vocab-size`` is ``--train_vocab_size``."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


def _switched(arguments: list[str], switches: set[str]) -> list[str]:
    """Let ``--sweep`` alone mean ``--sweep true``."""
    following = [*arguments, "--"][1:]
    return [
        f"{argument}=true" if argument in switches and after.lower() not in ("true", "false") else argument
        for argument, after in zip(arguments, following, strict=True)
    ]


def _table(result: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for name, value in result.items():
        if name in ("digest", "training"):  # fingerprints by which a later run recognises this one
            continue
        table.add_row(name.replace("_", " "), f"{value:,}" if isinstance(value, int | float) else str(value))
    return table


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Give a callback that draws a bar for each stage on a terminal, and writes a line now and then elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines()
        return
    columns = (TextColumn("{task.description:<22}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    # Without its refreshing thread: processes are forked while the bar is up, and a fork copies held locks.
    with Progress(*columns, TimeRemainingColumn(), console=console, auto_refresh=False) as progress:
        tasks: dict[str, Any] = {}
        drawn = 0.0

        def show(stage: str, done: int, total: int) -> None:
            nonlocal drawn
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done)
            if done == total or time.monotonic() - drawn > 0.1:
                progress.refresh()
                drawn = time.monotonic()

        yield show


def _lines(seconds: float = 5.0) -> Callable[[str, int, int], None]:
    from rich.filesize import decimal

    told: dict[str, float] = {}

    def tell(stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done < total and now - told.get(stage, 0.0) < seconds:
            return
        told[stage] = now
        amounts = f"{decimal(done)} of {decimal(total)} ({done / max(1, total):.0%})"
        sys.stderr.write(f"{stage}: {amounts}\n")

    return tell
