"""Processes for tests: forked gloo ranks with a file store and a deadline, and commands that leave nothing behind."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import subprocess
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forkserver import Forked


def _child(
    rank: int, world_size: int, store: str, timeout: float, connection: Any, function: Callable[..., Any], args: tuple
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        message = pickle.dumps(
            (True, function(rank, world_size, *args))
        )  # tensors by value: this process is about to end
    except BaseException:
        message = pickle.dumps((False, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    connection.send_bytes(message)
    connection.close()


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Run ``function(rank, world_size, *args)`` on ``world_size`` forked gloo ranks and return their results.

    Results travel through a pipe, so they must be picklable; tensors are best returned detached. When a rank fails,
    the others are ended and the failing rank's traceback is raised; the same when ``timeout`` seconds have passed.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        ranks = [
            context.Process(target=_child, args=(rank, world_size, store, timeout, pipe[1], function, args))
            for rank, pipe in enumerate(pipes)
        ]
        gc.freeze()  # a rank must not collect what is this process's, such as groups whose threads it does not have
        for rank in ranks:
            rank.start()
        gc.unfreeze()
        for _, writer in pipes:
            writer.close()
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        try:
            while len(results) < world_size:
                readers = {pipes[r][0]: r for r in range(world_size) if r not in results}
                ready = multiprocessing.connection.wait(list(readers), timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise TimeoutError(
                        f"ranks {sorted(readers.values())} of {world_size} did not finish in {timeout} s"
                    )
                for reader in ready:
                    rank = readers[reader]
                    try:
                        succeeded, value = pickle.loads(reader.recv_bytes())
                    except EOFError:
                        ranks[rank].join(timeout=5)
                        raise RuntimeError(
                            f"rank {rank} of {world_size} died without a result, {_end(ranks[rank].exitcode)}"
                        ) from None
                    if not succeeded:
                        raise AssertionError(f"rank {rank} of {world_size} failed:\n{value}")
                    results[rank] = value
        finally:
            for process in ranks:
                process.join(timeout=5 if len(results) == world_size else 0.1)
                if process.is_alive():
                    process.kill()
                    process.join()
        return [results[rank] for rank in range(world_size)]


def _end(exitcode: int | None) -> str:
    if exitcode is None:
        return "closing its pipe while it still ran"
    return f"by {signal.Signals(-exitcode).name}" if exitcode < 0 else f"with exit code {exitcode}"


@dataclass(frozen=True)
class Finished:
    """What a command left: its exit code, what it wrote, and the processes it started that outlived it."""

    returncode: int
    stdout: str
    stderr: str
    survivors: list[str]


def run_command(
    command: Sequence[str],
    cwd: Path | None = None,
    timeout: float = 250.0,
    environment: Mapping[str, str] | None = None,
    fresh: bool = True,
) -> Finished:
    """Run a command in a session of its own, with one thread a process; nothing that it started is left afterwards.

    Without ``fresh`` a Python command is a fork of a process that has imported what takes long, see :mod:`forkserver`.

    ``survivors`` are command lines of processes that still ran half a minute after the command had ended. They, and all
    of them when ``timeout`` seconds have passed, are killed, whichever session they moved to.
    """
    mark = f"test-{uuid.uuid4().hex[:10]}"
    inherited = {key: value for key, value in os.environ.items() if key not in ("MASTER_ADDR", "MASTER_PORT")}
    marked = {**inherited, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **(environment or {})}
    marked["LIGHTNING_PARM_TEST"] = mark
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        if fresh:
            process: Any = subprocess.Popen(
                command, cwd=cwd, env=marked, stdout=out, stderr=err, start_new_session=True
            )
        else:
            process = Forked(command, cwd=cwd, env=marked, stdout=out, stderr=err, mark=mark)
        survivors: dict[int, str] = {}
        timed_out = False
        try:
            process.wait(timeout)
            deadline = time.monotonic() + 30
            while (survivors := _marked(mark)) and time.monotonic() < deadline:
                time.sleep(0.1)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            for pid in _marked(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        for file in (out, err):
            file.seek(0)
        finished = Finished(process.returncode, out.read(), err.read(), list(survivors.values()))
    if timed_out:
        raise TimeoutError(f"{command} ran for {timeout} s and wrote:\n{finished.stdout}\n{finished.stderr}")
    return finished


def _marked(mark: str) -> dict[int, str]:
    """Running processes with ``mark`` in their environment, or for a name as forks have it, and their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # of another user, or gone by now
            if mark.encode() in (folder / "environ").read_bytes() + (folder / "comm").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
    return found
