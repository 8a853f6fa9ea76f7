"""Which source serves which sample, and as its how-many-th: closed forms over integers, with random access.

Sample i runs in lane ``l = i mod lanes`` at round ``t = i div lanes``. Every lane looks at a point that walks around a
circle of 2**32 positions by the golden ratio, lanes start at evenly spread (bit-reversed) phases, and the sources share
the circle in proportion to their weights. How often a lane chose a source before round t is a sum of floors, which
Euclid's algorithm gives in about 20 steps for any t; nothing has to be remembered or replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

CIRCLE = 1 << 32
_STEP = 2654435769  # 2**32 / golden ratio, odd
_CELLS = 1 << 16  # numbers at a time in sums over many segments
_NEVER = -(1 << 62)


def thresholds(weights: Sequence[float]) -> Int64:
    """Return the (S + 1,) bounds of the sources' shares of the circle.

    >>> thresholds([1, 0, 3]).tolist()
    [0, 1073741824, 1073741824, 4294967296]
    """
    exact = [Fraction(weight) for weight in weights]
    total, running, bounds = sum(exact), Fraction(0), [0]
    for weight in exact:
        running += weight
        bounds.append(int(running * CIRCLE / total))
    return np.array(bounds, dtype=np.int64)


class Mixture:
    """The choice of a source for every sample under weights that change at given samples.

    Args:
        segments: pairs ``(first sample, weights of all S sources)`` in order; the first starts at sample 0. Weights
            need not sum to 1; 0 is allowed for some.
        num_lanes: a power of two. With as many lanes as logical shards each lane reads shards of its own.
        previous: a mixture that was in use until now; what it counted is kept as far as the segments agree.

    >>> mixture = Mixture([(0, [3.0, 1.0]), (8, [0.0, 1.0])], num_lanes=4)
    >>> source, ticket = mixture.choose(np.arange(12))
    >>> source.tolist()
    [0, 0, 0, 1, 0, 0, 1, 0, 1, 1, 1, 1]
    """

    def __init__(
        self, segments: Sequence[tuple[int, Sequence[float]]], num_lanes: int, previous: Mixture | None = None
    ) -> None:
        self.segments = tuple((start, tuple(weights)) for start, weights in segments)
        self.num_lanes = num_lanes
        self.num_sources = len(self.segments[0][1])
        self._starts = np.array([start for start, _ in segments], dtype=np.int64)
        # A memory that saves time and changes no result: each lane's counts at the round it was last asked for.
        self._turns = np.full(num_lanes, _NEVER, dtype=np.int64)
        self._counts = np.zeros((num_lanes, self.num_sources), dtype=np.int64)
        if previous is None or (previous.num_lanes, previous.num_sources) != (num_lanes, self.num_sources):
            self._phases = _phases(num_lanes)
            self._bounds = np.stack([thresholds(weights) for _, weights in self.segments])
            return
        common = 0
        while self.segments[common : common + 1] == previous.segments[common : common + 1] != ():
            common += 1
        fresh = np.array([thresholds(weights) for _, weights in self.segments[common:]], dtype=np.int64)
        self._phases = previous._phases
        self._bounds = np.concatenate([previous._bounds[:common], fresh.reshape(-1, self.num_sources + 1)])
        changed = min((start for start, _ in (*self.segments[common:], *previous.segments[common:])), default=1 << 62)
        kept = previous._turns * num_lanes <= changed
        self._turns[kept], self._counts[kept] = previous._turns[kept], previous._counts[kept]

    def choose(self, samples: Int64) -> tuple[Int64, Int64]:
        """Return the source of each sample (N,), and a ticket: which of that source's samples it is.

        Returns:
            ``source`` (N,) and ``ticket`` (N,): how often the lane chose the source before, times the number of lanes,
            plus the lane. Tickets of one source never repeat; with one source alone they are the samples' numbers.
        """
        lane, turn = samples % self.num_lanes, samples // self.num_lanes
        source = self._source(lane, turn)
        if self.num_sources == 1:
            return source, samples
        before = np.empty_like(samples)
        order = np.argsort(turn, kind="stable")
        for group in np.split(order, np.flatnonzero(np.diff(turn[order])) + 1):  # a lane comes once in a round
            before[group] = self._before(lane[group], int(turn[group[0]]))[np.arange(len(group)), source[group]]
        return source, before * self.num_lanes + lane

    def served(self, num_samples: int) -> list[int]:
        """Return how many of the first ``num_samples`` samples each source served.

        >>> Mixture([(0, [1.0, 1.0])], num_lanes=1).served(1001)
        [501, 500]
        """
        stop = self._turn(num_samples, np.arange(self.num_lanes))
        lanes = np.flatnonzero(self._turns != stop)
        self._jump(lanes, stop[lanes])
        return [int(count) for count in self._counts.sum(axis=0)]

    def _source(self, lane: Int64, turn: Int64) -> Int64:
        segment = np.searchsorted(self._starts, turn * self.num_lanes + lane, side="right") - 1
        point = (self._phases[lane] + turn * _STEP) & (CIRCLE - 1)
        source: Int64 = np.sum(point[:, None] >= self._bounds[segment, 1:], axis=1)
        return source

    def _before(self, lanes: Int64, turn: int) -> Int64:
        """Return (N, S) how often each of the distinct lanes chose each source before round ``turn``."""
        far = lanes[(self._turns[lanes] > turn) | (self._turns[lanes] < turn - 8)]
        if far.size:
            self._jump(far, np.full_like(far, turn))
        behind = lanes[self._turns[lanes] < turn]
        while behind.size:
            self._counts[behind, self._source(behind, self._turns[behind])] += 1
            self._turns[behind] += 1
            behind = behind[self._turns[behind] < turn]
        return self._counts[lanes]

    def _turn(self, sample: npt.ArrayLike, lanes: Int64) -> Int64:
        """Return the first round in which each lane is at or past ``sample``."""
        return -(-(np.asarray(sample, dtype=np.int64) - lanes) // self.num_lanes)

    def _jump(self, lanes: Int64, stop: Int64) -> None:
        """Bring the counts of each of the distinct lanes to round ``stop`` (N,), from where they are or from 0."""
        begin = np.where(self._turns[lanes] <= stop, np.maximum(self._turns[lanes], 0), 0)
        self._counts[lanes] = self._counts[lanes] * (begin > 0)[:, None] + self._count(lanes, begin, stop)
        self._turns[lanes] = stop

    def _count(self, lanes: Int64, begin: Int64, stop: Int64) -> Int64:
        """Return (N, S) how often each lane chose each source in its rounds from ``begin`` to before ``stop``."""
        counts = np.zeros((len(lanes), self.num_sources), dtype=np.int64)
        lowest, highest = (
            (begin * self.num_lanes + lanes).min(initial=0),
            (stop * self.num_lanes + lanes).max(initial=0),
        )
        reached = int(np.searchsorted(self._starts, highest))
        step = max(1, _CELLS // (len(lanes) * (self.num_sources + 1) or 1))
        for first in range(int(np.searchsorted(self._starts, lowest, side="right")) - 1, reached, step):
            bounds = self._bounds[first : min(first + step, reached), None, :]
            starts = np.append(self._starts, 1 << 62)[first : first + len(bounds) + 1, None]
            edges = np.clip(self._turn(starts, lanes), begin, stop)  # where segments change, (segments + 1, N)
            turns = np.stack([edges[1:], edges[:-1]])[..., None]
            offsets = self._phases[lanes][:, None] + CIRCLE - bounds
            floors = _floor_sum(*np.broadcast_arrays(turns, offsets))
            during = floors[0] - floors[1]
            counts += (during[..., :-1] - during[..., 1:]).sum(axis=0).view(np.int64)
        return counts


def _phases(num_lanes: int) -> Int64:
    """Return where on the circle each lane starts: evenly spread, in bit-reversed order.

    >>> (_phases(4) * 4 // CIRCLE).tolist()
    [0, 2, 1, 3]
    """
    bits = num_lanes.bit_length() - 1
    lanes = [int(f"{lane:0{bits}b}"[::-1], 2) if bits else 0 for lane in range(num_lanes)]
    return np.array(lanes, dtype=np.int64) * (CIRCLE // num_lanes)


def _floor_sum(count: Int64, offset: Int64) -> UInt64:
    """Return ``sum(floor((_STEP * t + offset) / CIRCLE) for t in range(count))`` modulo 2**64, elementwise.

    The lattice points under a line, by Euclid's algorithm on (CIRCLE, _STEP); ``0 <= count < 2**32`` and
    ``0 <= offset < 2**33``.
    """
    n, b = count.astype(np.uint64), offset.astype(np.uint64)
    total = np.zeros_like(n)
    modulus, slope = CIRCLE, _STEP
    while True:
        quotient, slope = divmod(slope, modulus)
        if quotient:
            total += np.uint64(quotient) * (n * (n - np.uint64(1)) // np.uint64(2))
        whole = b // np.uint64(modulus)  # numpy divides by a scalar with multiplications; divmod would not
        total += n * whole
        height = np.uint64(slope) * n + b - whole * np.uint64(modulus)
        n = height // np.uint64(modulus)
        if not n.any():
            return total
        b = height - n * np.uint64(modulus)
        modulus, slope = slope, modulus
