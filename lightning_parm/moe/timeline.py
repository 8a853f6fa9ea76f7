"""How long a rank's work takes when some of it is in flight together; pure Python.

A *step* of a schedule computes, or starts a collective and waits for it later. Chunks advance as in
:func:`lightning_parm.moe.overlap.run`, and backward visits the same moments in reverse, where waiting became starting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple


class Compute(NamedTuple):
    """Work of the rank itself: seconds in forward and in backward."""

    forward: float
    backward: float


class Sent(NamedTuple):
    """A collective.

    Attributes:
        axis: What it runs along.
        seconds: That its bytes take.
        start: Seconds before the first of them is on its way.
    """

    axis: str
    seconds: float
    start: float = 0.0


class Transfer(NamedTuple):
    """A collective in each direction; ``None`` where nothing is sent."""

    forward: Sent | None
    backward: Sent | None


Step = Compute | Transfer
Moment = tuple[Literal["compute", "start", "wait"], int, Step]


def moments(chunks: Sequence[Sequence[Step]]) -> list[Moment]:
    """What happens in forward, in order: the youngest chunk advances first, and pauses when it has sent something.

    Example:
        >>> send, work = Transfer(Sent("fused", 2.0), None), Compute(1.0, 2.0)
        >>> [(what, chunk) for what, chunk, _ in moments([[send, work], [send, work]])]
        [('start', 0), ('start', 1), ('wait', 0), ('compute', 0), ('wait', 1), ('compute', 1)]
    """
    happened: list[Moment] = []
    at = [0] * len(chunks)  # the step each chunk does next, or waits for
    waiting = [False] * len(chunks)
    running: list[int] = []
    for started in range(len(chunks) + sum(len(chunk) for chunk in chunks)):
        if started < len(chunks):
            running.insert(0, started)
        for index in tuple(running):
            steps = chunks[index]
            if waiting[index]:
                happened.append(("wait", index, steps[at[index]]))
                at[index] += 1
                waiting[index] = False
            while at[index] < len(steps) and not waiting[index]:
                step = steps[at[index]]
                waiting[index] = isinstance(step, Transfer)
                happened.append(("start" if waiting[index] else "compute", index, step))
                at[index] += not waiting[index]
            if at[index] == len(steps):
                running.remove(index)
    return happened


def duration(
    happened: Sequence[Moment],
    overlap: Callable[[str, str], float],
    backward: bool = False,
) -> float:
    """Seconds that the moments take.

    Things in flight together slow each other down: with an overlap of 0 each runs at half its rate, with 1 at its own.
    Collectives along one axis go one after the other, as on one communicator; the next in line moves at the rate that
    their overlap leaves to it.

    Args:
        happened: From :func:`moments`.
        overlap: How much of the shorter of two things vanishes, by axis; the rank's own work is ``"compute"``.
        backward: Whether to visit the moments in reverse, with waiting and starting exchanged.

    Example:
        >>> happened = moments([[Transfer(Sent("fused", 2.0), None), Compute(1.0, 2.0)]] * 2)
        >>> duration(happened, lambda a, b: 0.0), duration(happened, lambda a, b: float("compute" in (a, b)))
        (6.0, 5.0)
    """
    flying: dict[int, Sent] = {}  # by chunk, oldest first, with the seconds that are left if it were alone
    total = 0.0

    def rates() -> dict[int, float]:
        found: dict[int, float] = {}
        seen: dict[str, int] = {}
        sending = {axis for axis, _, start in flying.values() if not start}
        for chunk, (axis, _, start) in flying.items():
            place = seen[axis] = seen.get(axis, -1) + 1
            own = 1.0 if place == 0 else overlap(axis, axis) if place == 1 else 0.0
            others = 0.0 if start else sum(1 - overlap(axis, other) for other in sending - {axis})
            if own > 0:
                found[chunk] = own / (1 + others)
        return found

    def advance(until: int) -> None:
        nonlocal total
        while until in flying:
            moving = rates()
            ends = {chunk: (flying[chunk].start or flying[chunk].seconds) / rate for chunk, rate in moving.items()}
            passed = min(ends.values())
            total += passed
            for chunk, rate in moving.items():
                axis, seconds, start = flying[chunk]
                left = 0.0 if ends[chunk] <= passed else (start or seconds) - passed * rate
                flying[chunk] = Sent(axis, seconds, left) if start else Sent(axis, left)
                if not (start and seconds) and not left:
                    del flying[chunk]

    for what, chunk, step in reversed(happened) if backward else happened:
        work = step.backward if backward else step.forward
        if isinstance(step, Compute):
            assert isinstance(work, float)
            flying[-1] = Sent("compute", work)
            advance(-1)
        elif what == ("wait" if backward else "start"):
            if isinstance(work, Sent):
                flying[chunk] = work
        else:
            advance(chunk)
    return total
