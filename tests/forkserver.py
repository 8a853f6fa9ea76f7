"""Python commands without the wait for their imports: forks of one process that has imported torch and Lightning.

A fresh interpreter takes 6 to 9 s of a core until ``import lightning_parm`` is done, and a run on two ranks starts two.
:func:`distributed.run_command` with ``fresh=False`` asks the server here for the command instead, and the ranks that
the command starts by ``subprocess`` come from it as well. Where a fresh interpreter is part of the proof, as with
launchers and the order of imports, it gets one.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing.process
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

REAL_POPEN = subprocess.Popen


class Forked:
    """A Python command in a fork of the server; what ``subprocess.Popen`` is to its users, pipes excepted.

    Args:
        command: ``[sys.executable, "-m", module, ...]`` or ``[sys.executable, script, ...]``.
        cwd: Where it runs; None for here.
        env: Its environment; None for this one.
        stdout: A file; None for this process's.
        stderr: A file; None for this process's.
        mark: What the process and all its forks are called in ``/proc/*/comm``; None for the name of this one.
    """

    def __init__(
        self,
        command: Sequence[str],
        cwd: Any = None,
        env: Mapping[str, str] | None = None,
        stdout: Any = None,
        stderr: Any = None,
        mark: str | None = None,
    ) -> None:
        self.args = command
        self.returncode: int | None = None
        request = {
            "arguments": [str(argument) for argument in command[1:]],
            "cwd": str(cwd or os.getcwd()),
            "environment": dict(os.environ if env is None else env),
            "mark": mark or Path("/proc/self/comm").read_text().strip(),
        }
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(_ADDRESS[0] if _ADDRESS else _start())
        streams = [1 if stdout is None else stdout.fileno(), 2 if stderr is None else stderr.fileno()]
        socket.send_fds(self._server, [b"request\n"], streams)
        self._answers = self._server.makefile("rw")
        self._answers.write(json.dumps(request) + "\n")
        self._answers.flush()
        self.pid = int(self._answers.readline())

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        with_data = socket.MSG_PEEK | socket.MSG_DONTWAIT
        try:
            if self.returncode is None and self._server.recv(1, with_data):
                self._end()
        except BlockingIOError:
            pass
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, when it has ended."""
        deadline = time.monotonic() + (1e9 if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode

    def _end(self) -> None:
        self.returncode = int(self._answers.readline())
        self._answers.close()
        self._server.close()

    def communicate(self, input: None = None, timeout: float | None = None) -> tuple[None, None]:
        """Wait for its end."""
        self.wait(timeout)
        return None, None

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: Any) -> None:
        self.wait()


def _popen(command: Any, *rest: Any, **options: Any) -> Any:
    """In place of ``subprocess.Popen`` in a forked process: Python commands without pipes are forked as well."""
    python = isinstance(command, list) and command[0] == sys.executable and command[1] != "-c"
    if python and not rest and set(options) <= {"cwd", "env"}:
        return Forked(command, **options)
    return REAL_POPEN(command, *rest, **options)


# ---------------------------------------------------------------- the server

_ADDRESS: list[str] = []  # in the server and its forks


@cache
def _start() -> str:
    """Start the server, once for a test session; it ends with this process."""
    folder = tempfile.mkdtemp(prefix="forkserver")
    address = str(Path(folder) / "socket")
    environment = {name: value for name, value in os.environ.items() if name != "LIGHTNING_PARM_TEST"}
    server = REAL_POPEN([sys.executable, __file__, address], env=environment, start_new_session=True)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.kill)
    while not Path(address).exists():
        assert server.poll() is None, "the fork server cannot start"
        time.sleep(0.05)
    return address


def _serve(address: str) -> None:
    parent = os.getppid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that look after the commands
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{address}.new")
        listener.listen()
        os.rename(f"{address}.new", address)  # now it can be connected to
        _ADDRESS.append(address)
        listener.settimeout(10.0)
        while os.getppid() == parent:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            if os.fork() == 0:
                listener.close()
                _look_after(connection)
                os._exit(0)
            connection.close()


def _look_after(connection: socket.socket) -> None:
    """Fork again, tell the number of that process, and, when it has ended, its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connection.settimeout(None)
    _, streams, _, _ = socket.recv_fds(connection, len(b"request\n"), 2)
    lines = connection.makefile("rw")
    request = json.loads(lines.readline())
    pid = os.fork()
    if pid == 0:
        lines.close()
        connection.close()
        _become(request, streams)
    for fd in streams:
        os.close(fd)
    try:
        lines.write(f"{pid}\n")
        lines.flush()
        _, status = os.waitpid(pid, 0)
        lines.write(f"{os.waitstatus_to_exitcode(status)}\n")
        lines.flush()
    except BrokenPipeError:  # who asked for it has ended
        pass


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """Be the command: its session, name, files, environment and folder, and then its code."""
    code: Any = 1
    try:
        os.setsid()
        Path("/proc/self/comm").write_text(request["mark"])
        for target, fd in zip((1, 2), streams, strict=True):
            os.dup2(fd, target)
            os.close(fd)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["cwd"])
        multiprocessing.process.ORIGINAL_DIR = request["cwd"]  # where spawned children begin
        from lightning.fabric.utilities.rank_zero import _get_rank, rank_zero_only

        rank_zero_only.rank = _get_rank() or 0  # read when it was imported, with another environment
        subprocess.Popen = _popen  # type: ignore[assignment,misc]
        code = _run(request["arguments"])
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(arguments: list[str]) -> int:
    try:
        if arguments[0] == "-m":
            sys.argv = ["-m", *arguments[2:]]
            sys.path[0] = os.getcwd()
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path[0] = str(Path(arguments[0]).absolute().parent)
            runpy.run_path(os.path.abspath(arguments[0]), run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


if __name__ == "__main__":
    # Imports and nothing else: a process that has computed on several threads cannot be forked.
    import lightning_parm.models  # noqa: F401

    sys.modules["forkserver"] = sys.modules["__main__"]
    _serve(sys.argv[1])
