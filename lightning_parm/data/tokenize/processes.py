"""A process for each task, a few at a time: forked, so that scripts need no main guard, and gone when the parent is."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Task = TypeVar("Task")


def run_tasks(
    tasks: Sequence[Task],
    function: Callable[[Task, Callable[[int], None]], Any],
    num_processes: int,
    on_report: Callable[[int], None],
) -> list[Any]:
    """Run ``function(task, report)`` for every task in a process of its own and return the results in order.

    When a task fails no new one is started, those that run are awaited, and the failure is raised.

    Args:
        tasks: What to do, one process each.
        function: Called in the process; it calls ``report(amount)`` now and then.
        num_processes: How many run at a time.
        on_report: Called in this process with every amount reported.

    Raises:
        ValueError: A task raised one; the message is kept.
        RuntimeError: A task failed in another way, or its process died.
    """
    context = multiprocessing.get_context("fork")
    waiting = deque(enumerate(tasks))
    running: dict[Any, tuple[Any, int]] = {}
    results: list[Any] = [None] * len(tasks)
    failure: Exception | None = None
    try:
        while running or (waiting and failure is None):
            while waiting and failure is None and len(running) < num_processes:
                index, task = waiting.popleft()
                reader, writer = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(task, function, writer, os.getpid()), daemon=True)
                process.start()
                writer.close()
                running[reader] = (process, index)
            for ready in multiprocessing.connection.wait(list(running)):
                process, index = running[ready]
                kind, value = _receive(ready)
                if kind == "report":
                    on_report(value)
                    continue
                del running[ready]
                process.join()
                if kind == "result":
                    results[index] = value
                elif kind == "died":
                    failure = failure or RuntimeError(
                        f"a process ended with exit code {process.exitcode} before its work was done "
                        "(-9: the system killed it, often for want of memory)."
                    )
                else:
                    failure = failure or (ValueError(value) if kind == "refused" else RuntimeError(value))
    finally:
        for process, _ in running.values():
            process.terminate()
            process.join()
    if failure is not None:
        raise failure
    return results


def _receive(reader: Any) -> tuple[str, Any]:
    try:
        return reader.recv()  # type: ignore[no-any-return]
    except EOFError:
        return "died", None


def _child(task: Any, function: Callable[..., Any], writer: Any, parent: int) -> None:
    # Ctrl-C reaches the whole foreground group; the parent alone answers it, by ending its children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A library's own threads on top of a process a core would only fight for the cores, and do not survive a fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def report(amount: int) -> None:
        if os.getppid() != parent:  # the parent was killed: leave the task to the run that resumes
            os._exit(1)
        writer.send(("report", amount))

    try:
        outcome = ("result", function(task, report))
    except ValueError as error:
        outcome = ("refused", str(error))
    except Exception:
        outcome = ("failed", traceback.format_exc())
    writer.send(outcome)
    writer.close()
