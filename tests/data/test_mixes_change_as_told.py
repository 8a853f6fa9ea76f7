"""Schedules, sources that run out, and sources that come and go between runs."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from data.corpora import numbered_documents, write_arrow

from lightning_parm.data import TokenLoader
from lightning_parm.data.schedule import as_knots, pack, segments_of, unpack

L = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make sources of 20, 50 and 100 documents of a window each; the first token says which it is."""
    folder = tmp_path_factory.mktemp("corpus")
    for name, count, first in (("a", 20, 1), ("b", 50, 10_001), ("c", 100, 20_001)):
        write_arrow(folder / name / "0.arrow", numbered_documents([9] * count, first=first), delimiter=0)
    return folder


def loader(folder, names="abc", batch_size=1, **options):
    return TokenLoader({name: str(folder / name) for name in names}, L, batch_size, **options)


def take(stream, count):
    return [stream.next_batch()["input_ids"].flatten().tolist() for _ in range(count)]


def test_a_schedule_goes_in_straight_lines_between_its_entries(folder):
    schedule = [
        (0, {"a": 1, "b": 0, "c": 0}),
        (1000 * L, {"a": 1, "b": 0, "c": 0}),
        (3000 * L, {"a": 0, "b": 1, "c": 0}),
    ]
    stream = loader(folder, weights=schedule)
    assert stream.served(1000) == {"a": 1000, "b": 0, "c": 0}
    for samples, share in ((1500, 0.25), (2000, 0.5), (2500, 0.75), (3000, 1.0)):
        drift = stream.served(samples)["b"] - (samples - 1000) * share / 2
        assert abs(drift) < 8, samples
    assert stream.served(4000)["b"] - stream.served(3000)["b"] == 1000


def test_a_step_is_two_entries_at_the_same_tokens(folder):
    schedule = [(0, {"a": 1, "b": 0, "c": 0}), (70, {"a": 1, "b": 0, "c": 0}), (70, {"a": 0, "b": 0, "c": 1})]
    assert loader(folder, weights=schedule).served(10) == {"a": 7, "b": 0, "c": 3}


def test_a_change_by_hand_takes_the_place_of_the_schedule_and_keeps_the_past(folder):
    schedule = [(0, {"a": 1, "b": 0, "c": 0}), (100 * L, {"a": 0, "b": 1, "c": 0})]
    stream = loader(folder, weights=schedule)
    before = take(stream, 50)
    stream.set_weights({"a": 0, "b": 0, "c": 1})
    after = take(stream, 100)
    assert all(token == 0 or token > 20_000 for row in after for token in row)
    assert stream.served()["c"] == 100
    fresh = loader(folder, weights=schedule)
    assert take(fresh, 50) == before
    fresh.load_state_dict(stream.state_dict(samples=50))
    assert take(fresh, 100) == after


def test_a_source_that_runs_out_is_repeated_in_another_order(folder):
    stream = loader(folder, "a", num_logical_shards=1)
    first, second = take(stream, 20), take(stream, 20)
    assert first != second
    assert sorted(map(tuple, first)) == sorted(map(tuple, second))
    assert stream.epochs() == {"a": 2.0}


def test_stop_ends_with_the_first_source_that_runs_out(folder):
    stream = loader(folder, at_exhaustion="stop", weights={"a": 1, "b": 1, "c": 2}, num_logical_shards=1)
    rows = take(stream, len(stream))
    assert stream.exhausted
    with pytest.raises(StopIteration):
        stream.next_batch()
    assert list(stream) == []
    served = stream.served()
    assert served["a"] == 19  # whole windows with their last label inside: 199 of 200 tokens
    assert abs(served["b"] - 19) <= 4
    assert abs(served["c"] - 38) <= 4
    assert max(Counter(map(tuple, rows)).values()) == 1


@pytest.mark.parametrize(("size", "batch_size"), [(1, 1), (2, 1)])
def test_drop_serves_every_sample_of_every_source_once(folder, size, batch_size):
    rows = []
    for rank in range(size):
        stream = loader(folder, batch_size=batch_size, rank=rank, size=size, at_exhaustion="drop", num_logical_shards=1)
        rows += take(stream, len(stream))
    assert stream.served(stream.samples_per_epoch) == {"a": 19, "b": 49, "c": 99}
    assert len(rows) == (19 + 49 + 99) // size * size
    assert max(Counter(map(tuple, rows)).values()) == 1


def test_dropped_sources_stay_out_when_the_mix_changes(folder):
    stream = loader(folder, at_exhaustion="drop", num_logical_shards=1, weights={"a": 10, "b": 1, "c": 1})
    take(stream, 60)
    assert stream.served()["a"] == 19
    stream.set_weights({"a": 10, "b": 1, "c": 1})
    take(stream, 60)
    assert stream.served()["a"] == 19


def test_sources_come_and_go_on_resume(folder):
    stream = loader(folder, "ab", weights={"a": 1, "b": 1})
    take(stream, 30)
    grown = loader(folder, "abc", weights={"a": 1, "b": 1, "c": 2})
    grown.load_state_dict(stream.state_dict())
    take(grown, 40)
    assert grown.served() == {"a": 25, "b": 25, "c": 20}
    shrunk = loader(folder, "bc", weights={"b": 1, "c": 1})
    shrunk.load_state_dict(grown.state_dict())
    rows = take(shrunk, 40)
    assert all(token == 0 or token > 10_000 for row in rows for token in row)
    assert shrunk.served() == {"a": 25, "b": 45, "c": 40}
    again = loader(folder, "bc", weights={"b": 1, "c": 1}, batch_size=2)
    again.load_state_dict(shrunk.state_dict(samples=80))
    assert [r for row in take(again, 10) for r in (row[:L], row[L:])] == rows[10:30]


def test_a_source_that_is_gone_does_not_end_a_stream_that_stops(folder):
    stream = loader(folder, "abc", at_exhaustion="stop", num_logical_shards=1, weights={"a": 1, "b": 1, "c": 1})
    take(stream, 30)
    rest = loader(folder, "bc", at_exhaustion="stop", num_logical_shards=1, weights={"b": 1, "c": 1})
    rest.load_state_dict(stream.state_dict())
    take(rest, len(rest) - 30)
    assert rest.served()["b"] == 49


def test_the_rest_of_a_source_is_unmoved_by_what_joins_it(folder):
    """What 'b' serves is its own sequence, whatever else is in the mix: nothing is lost and nothing repeated."""
    stream = loader(folder, "b", num_logical_shards=1)
    alone = take(stream, 30)
    stream = loader(folder, "b", num_logical_shards=1)
    first = take(stream, 10)
    grown = loader(folder, "bc", num_logical_shards=1, weights={"b": 1, "c": 1})
    grown.load_state_dict(stream.state_dict())
    later = [row for row in take(grown, 40) if max(row) < 20_000]
    assert first + later[:19] == alone[:29]


def test_plans_survive_packing():
    names = ["x", "y"]
    plans = ((0, as_knots([(0, {"x": 1, "y": 0.1}), (99, {"x": 0, "y": 1 / 3})], names, 1)), (7, ((7, (0.5, 0.25)),)))
    assert unpack(pack(plans)) == plans
    assert segments_of(unpack(pack(plans))) == segments_of(plans)
    assert segments_of(plans)[-1] == (7, (0.5, 0.25))


def test_equal_weights_written_twice_are_one_segment():
    knots = ((0, (1.0, 1.0)), (50, (1.0, 1.0)))
    assert segments_of(((0, knots), (20, knots))) == ((0, (1.0, 1.0)),)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([], "schedule of weights is empty"),
        ([(100, {"a": 1, "b": 1, "c": 1}), (0, {"a": 1, "b": 1, "c": 1})], r"tokens must rise: \[100, 0\]"),
        ([(0, {"a": 1, "b": 1})], r"weights name \['a', 'b'\], but the sources are \['a', 'b', 'c'\]"),
    ],
)
def test_schedules_that_make_no_sense(folder, weights, message):
    with pytest.raises(ValueError, match=message):
        as_knots(weights, ["a", "b", "c"], L)


def test_weights_in_numpy_floats_are_fine(folder):
    stream = loader(folder, weights=dict(zip("abc", np.array([0.2, 0.3, 0.5]), strict=True)))
    take(stream, 10)
    assert stream.served() == loader(folder, weights={"a": 0.2, "b": 0.3, "c": 0.5}).served(10)
