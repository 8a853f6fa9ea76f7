from collections import Counter

import numpy as np
import pytest

from lightning_parm.data.mixture import CIRCLE, Mixture, thresholds

SEGMENTS = [
    (0, [3.0, 1.0, 0.0, 2.0]),
    (37, [1.0, 1.0, 1.0, 1.0]),
    (38, [0.0, 0.0, 0.0, 1.0]),
    (500, [0.1, 0.2, 0.3, 0.4]),
]


@pytest.mark.parametrize("num_lanes", [1, 4, 16])
def test_tickets_count_what_each_lane_chose_before(num_lanes):
    source, ticket = Mixture(SEGMENTS, num_lanes).choose(np.arange(3000))
    counts: Counter[tuple[int, int]] = Counter()
    for sample, (chosen, number) in enumerate(zip(source.tolist(), ticket.tolist(), strict=True)):
        lane = sample % num_lanes
        assert number == counts[chosen, lane] * num_lanes + lane
        counts[chosen, lane] += 1


@pytest.mark.parametrize("num_lanes", [1, 16])
def test_random_access_after_any_history_of_questions_gives_the_same(num_lanes):
    expected = Mixture(SEGMENTS, num_lanes).choose(np.arange(3000))
    rng, mixture = np.random.default_rng(0), None
    for turn in range(60):
        known = int(rng.integers(1, 5))
        mixture = Mixture(SEGMENTS[:known], num_lanes, mixture)
        limit = SEGMENTS[known][0] if known < 4 else 3000
        samples = np.sort(rng.integers(0, limit, 20)) if turn % 2 else np.arange(max(0, limit - 30), limit)
        source, ticket = mixture.choose(samples)
        assert np.array_equal(source, expected[0][samples])
        assert np.array_equal(ticket, expected[1][samples])


@pytest.mark.parametrize("stop", [0, 1, 37, 38, 499, 2999])
def test_served_is_the_count_of_choices(stop):
    source, _ = Mixture(SEGMENTS, 16).choose(np.arange(3000))
    expected = np.bincount(source[:stop], minlength=4).tolist()
    assert Mixture(SEGMENTS, 16).served(stop) == expected
    asked = Mixture(SEGMENTS, 16)
    for earlier in (10, 400, 38, 2500):  # what it remembers of other questions changes no answer
        asked.served(earlier)
        assert asked.served(stop) == expected
    assert Mixture([*SEGMENTS, (2999, [1.0, 0.0, 0.0, 0.0])], 16, asked).served(stop) == expected


@pytest.mark.parametrize(("num_sources", "num_lanes", "millions"), [(16, 1024, 10), (16, 1, 2), (2, 1024, 2)])
def test_within_16_samples_of_the_weights_at_any_moment_of_10_million(num_sources, num_lanes, millions):
    weights = np.random.default_rng(num_sources).random(num_sources)
    mixture, shares = Mixture([(0, weights.tolist())], num_lanes), weights / weights.sum()
    worst, served = 0.0, np.zeros(num_sources)
    for start in range(0, millions * 1_000_000, 1_000_000):
        samples = np.arange(start, start + 1_000_000)
        source = mixture._source(samples % num_lanes, samples // num_lanes)
        for number in range(num_sources):
            count = served[number] + np.cumsum(source == number)
            worst = max(worst, float(np.abs(count - (samples + 1) * shares[number]).max()))
            served[number] = count[-1]
    assert worst <= 16
    assert mixture.served(millions * 1_000_000) == served.astype(int).tolist()


def test_a_source_of_weight_zero_is_never_served():
    source, _ = Mixture([(0, [0.0, 1.0, 0.0])], 8).choose(np.arange(5000))
    assert set(source.tolist()) == {1}


def test_shares_fill_the_circle_exactly():
    bounds = thresholds([0.1, 0.2, 0.3, 0.4])
    assert bounds[0] == 0
    assert bounds[-1] == CIRCLE
