"""Chunks in flight together: every chunk is a generator that pauses where it would have to wait for the network."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
S = TypeVar("S")
Steps = Generator[None, None, T]


def run(pipelines: Sequence[Steps[T]]) -> list[T]:
    """Advance all pipelines in turn, one more of them each round, the youngest first; return their results in order.

    The youngest goes first so that its exchange is on the wire before an older chunk computes. Every rank runs the
    same steps in the same order, hence so do the collectives, and backward runs them in exactly the opposite order:
    a pipelined forward has a pipelined backward.

    Example:
        >>> def chunk(name):
        ...     log.append(f"send {name}")
        ...     yield
        ...     log.append(f"compute {name}")
        ...     return name
        >>> log = []
        >>> run([chunk(0), chunk(1)]), log
        ([0, 1], ['send 0', 'send 1', 'compute 0', 'compute 1'])
    """
    results: dict[int, T] = {}
    running: list[int] = []
    started = 0
    while len(results) < len(pipelines):
        if started < len(pipelines):
            running.insert(0, started)
            started += 1
        for index in tuple(running):
            try:
                next(pipelines[index])
            except StopIteration as stop:
                results[index] = stop.value
                running.remove(index)
    return [results[index] for index in range(len(pipelines))]


def beside(steps: Steps[T], compute: Callable[[], S]) -> Steps[tuple[T, S]]:
    """``steps``, with ``compute`` done while their first exchange is on the wire."""
    next(steps)
    side = compute()
    yield
    return (yield from steps), side
