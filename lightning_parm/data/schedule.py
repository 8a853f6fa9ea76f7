"""The mix over a run: what the user planned, what was changed on the way, and when sources run out.

A *plan* is in force from a sample on, until the next one: knots ``(sample, weights)``, with the weights going linearly
from each knot to the next and constant before the first and after the last. The constructor's weights are the first
plan; every change during training appends one. From the plans follow the *segments* of constant weights that
:class:`~lightning_parm.data.mixture.Mixture` works on.
"""

from __future__ import annotations

import base64
import bz2
from collections.abc import Mapping, Sequence
from itertools import pairwise

from lightning_parm.data.mixture import Mixture

Weights = tuple[float, ...]
Knots = tuple[tuple[int, Weights], ...]
Plans = tuple[tuple[int, Knots], ...]
Segments = tuple[tuple[int, Weights], ...]
Mix = Mapping[str, float] | Sequence[tuple[int, Mapping[str, float]]]

_RAMP_PIECES = 64


def as_knots(mix: Mix, names: Sequence[str], sequence_length: int) -> Knots:
    """Return a user's mix as knots: ``{name: weight}``, or a list of ``(tokens, {name: weight})``.

    Raises:
        ValueError: a source is unknown or missing, a weight is negative or all are zero, or tokens do not rise.

    >>> as_knots([(0, {"web": 1, "code": 0}), (4096, {"web": 1, "code": 1})], ["web", "code"], sequence_length=1024)
    ((0, (1.0, 0.0)), (4, (1.0, 1.0)))
    """
    pairs = [(0, mix)] if isinstance(mix, Mapping) else [(tokens, weights) for tokens, weights in mix]
    if not pairs:
        raise ValueError("The schedule of weights is empty: give at least one (tokens, weights).")
    knots = []
    for tokens, weights in pairs:
        if set(weights) != set(names):
            raise ValueError(f"weights name {sorted(weights)}, but the sources are {sorted(names)}: give one of each.")
        if min(weights.values()) < 0 or max(weights.values()) <= 0:
            raise ValueError(f"weights={dict(weights)}: none may be negative and one must be positive.")
        knots.append((int(tokens) // sequence_length, tuple(float(weights[name]) for name in names)))
    if any(later < earlier for (earlier, _), (later, _) in pairwise(knots)):
        raise ValueError(f"The schedule's tokens must rise: {[tokens for tokens, _ in pairs]}.")
    return tuple(knots)


def segments_of(plans: Plans) -> Segments:
    """Return the stretches of constant weights; a ramp between two knots becomes 64 steps.

    >>> segments_of(((0, ((0, (1.0, 0.0)),)), (7, ((7, (1.0, 3.0)),))))
    ((0, (1.0, 0.0)), (7, (1.0, 3.0)))
    """
    result: list[tuple[int, Weights]] = []
    for number, (start, knots) in enumerate(plans):
        stop = plans[number + 1][0] if number + 1 < len(plans) else None
        steps = _steps(knots)
        for position, (begin, weights) in enumerate(steps):
            end = steps[position + 1][0] if position + 1 < len(steps) else None
            if (end is not None and end <= start) or (stop is not None and max(begin, start) >= stop):
                continue
            if not result or result[-1][1] != weights:
                result.append((max(begin, start), weights))
    return tuple(result)


def _steps(knots: Knots) -> list[tuple[int, Weights]]:
    steps = [(0, knots[0][1])]
    for (begin, before), (end, after) in pairwise(knots):
        pieces = min(_RAMP_PIECES, end - begin) if before != after else 0
        for piece in range(pieces):
            share = (piece + 0.5) / pieces
            weights = tuple(a + (b - a) * share for a, b in zip(before, after, strict=True))
            steps.append((begin + (end - begin) * piece // pieces, weights))
        steps.append((end, after))
    return [step for step, later in zip(steps, [*steps[1:], None], strict=True) if later is None or step[0] < later[0]]


def limit(segments: Segments, capacities: Sequence[int], policy: str) -> tuple[Segments, int]:
    """Return the segments after sources have run out, and the number of samples until nothing is left.

    Args:
        segments: the mix as if sources never ended.
        capacities: samples in one epoch of each source.
        policy: ``"stop"`` ends with the first source that runs out, ``"drop"`` goes on with the others.

    >>> limit(((0, (1.0, 1.0)),), [10, 30], "stop")
    (((0, (1.0, 1.0)),), 19)
    >>> limit(((0, (1.0, 1.0)),), [10, 30], "drop")
    (((0, (1.0, 1.0)), (19, (0.0, 1.0))), 40)
    """
    left = {source for source, capacity in enumerate(capacities) if capacity}  # none of a source that is gone
    while True:
        mixture = Mixture(segments, num_lanes=1)
        end = _first_exhausted(mixture, capacities, left)
        if policy == "stop" or end is None:
            return segments, end if end is not None else 1 << 62
        served = mixture.served(end)
        left = {source for source in left if served[source] < capacities[source]}
        active = [segment for segment in segments if segment[0] <= end]
        later = [(end, active[-1][1]), *(segment for segment in segments if segment[0] > end)]
        without = [(start, tuple(w * (s in left) for s, w in enumerate(weights))) for start, weights in later]
        if not any(without[0][1]):
            return segments, end
        kept = [(start, weights) for start, weights in without if any(weights)]
        segments = (*(segment for segment in segments if segment[0] < end), *kept)


def _first_exhausted(mixture: Mixture, capacities: Sequence[int], left: set[int]) -> int | None:
    """Return the first number of samples at which one of the sources in ``left`` has been served to the end."""

    def exhausted(samples: int) -> bool:
        served = mixture.served(samples)
        return any(served[source] >= capacities[source] for source in left)

    low, high = 0, 1024
    while not exhausted(high):
        low, high = high, high * 2
        if high > 1 << 31:  # more samples than a lane of the mixture counts
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if exhausted(middle) else (middle, high)
    return high


def pack(plans: Plans) -> str:
    """Return plans as a short string: a line a plan, compressed, because a mix may change a hundred times in a run."""
    lines, before = [], 0
    for start, knots in plans:
        texts = [("" if at == start else f"{at}:") + " ".join(_shortest(w) for w in weights) for at, weights in knots]
        lines.append(f"{start - before};{'|'.join(texts)}")
        before = start
    return base64.b85encode(bz2.compress("\n".join(lines).encode())).decode()


def unpack(packed: str) -> Plans:
    """Return what :func:`pack` packed.

    >>> unpack(pack(((0, ((0, (0.25, 1.0)),)),)))
    ((0, ((0, (0.25, 1.0)),)),)
    """
    plans: list[tuple[int, Knots]] = []
    start = 0
    for line in bz2.decompress(base64.b85decode(packed)).decode().split("\n"):
        step, _, texts = line.partition(";")
        start += int(step)
        knots = []
        for text in texts.split("|"):
            at, _, weights = text.rpartition(":")
            knots.append((int(at) if at else start, tuple(float(w) for w in weights.split(" "))))
        plans.append((start, tuple(knots)))
    return tuple(plans)


def _shortest(weight: float) -> str:
    """Return the fewest characters that read back as the same float: 0.5 is ".5" and 2.0 is "2"."""
    text = repr(weight).removesuffix(".0")
    return text[1:] if text.startswith("0.") else text
