"""A ledger of tokens over packing: with unique tokens, every one is served exactly once an epoch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_parm.data.shards import count_shards, shard_bounds
from lightning_parm.data.windows import Windows


def stream(windows: Windows, shard: int, count: int) -> np.ndarray:
    """Return the shard's first ``count * L`` input tokens as numbers of places in the source."""
    shards = np.full(count, shard)
    pieces = windows.pieces(shards, np.arange(count))
    rows = np.full((count, windows.sequence_length + 1), -1)
    for row, column, document, start, size in zip(
        pieces.row, pieces.column, pieces.document, pieces.start, pieces.size, strict=True
    ):
        rows[row, column : column + size] = windows.ends[document] + start + np.arange(size)
    assert rows.min() >= 0
    assert np.array_equal(rows[1:, 0], rows[:-1, -1])  # each window starts where the one before it ended
    return rows[:, :-1].reshape(-1)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=40),
    st.integers(1, 12),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 5),
)
def test_three_epochs_serve_every_token_three_times(lengths, sequence_length, num_shards, num_parts):
    ends = np.concatenate([[0], np.cumsum(lengths)])
    if ends[-1] < num_shards * (sequence_length + 1):
        return
    part_first = np.unique(np.linspace(0, len(lengths), num_parts + 1).astype(int))
    windows = Windows(ends, part_first, sequence_length, num_shards, key=5)
    for shard in range(num_shards):
        low, high = (
            shard_bounds(shard, windows.num_tokens, num_shards),
            shard_bounds(shard + 1, windows.num_tokens, num_shards),
        )
        share = int(high - low)
        served = stream(windows, shard, 3 * share)[: 3 * share].reshape(3, share)
        for epoch in served:
            assert np.array_equal(np.sort(epoch), np.arange(low, high))


def test_every_epoch_has_another_order_and_documents_stay_whole():
    lengths = np.full(50, 10)
    windows = Windows(np.concatenate([[0], np.cumsum(lengths)]), np.array([0, 50]), 10, 1, key=5)
    first, second = stream(windows, 0, 100).reshape(2, 500)
    assert not np.array_equal(first, second)
    assert (np.diff(first.reshape(50, 10)) == 1).all()


def test_any_window_alone_equals_the_same_window_in_a_batch():
    rng = np.random.default_rng(1)
    ends = np.concatenate([[0], np.cumsum(rng.integers(1, 40, 3000))])
    shared = Windows(ends, np.array([0, 1000, 1500, 3000]), 16, 8, key=9)
    shards, numbers = rng.integers(0, 8, 400), rng.integers(0, 20_000, 400)
    together = shared.pieces(shards, numbers)
    for asked in range(0, 400, 7):
        alone = Windows(ends, np.array([0, 1000, 1500, 3000]), 16, 8, key=9).pieces(shards[[asked]], numbers[[asked]])
        inside = together.row == asked
        for name in ("column", "document", "start", "size"):
            assert np.array_equal(getattr(alone, name), getattr(together, name)[inside])


def test_memory_stays_bounded_over_many_epochs():
    windows = Windows(np.arange(0, 50_001, 10), np.array([0, 5000]), 32, 4, key=1)
    for start in range(0, 200_000, 1000):
        windows.pieces(np.arange(1000) % 4, start + np.arange(1000) // 4)
    assert windows._layouts.used < 5 * 5000 + 4096
    assert len(windows._layouts.documents) < 12 * 5000


@pytest.mark.parametrize(
    ("tokens", "length", "limit", "expected"),
    [(10**8, 4096, 1024, 256), (5000, 128, 1024, 1), (10**12, 4096, 1024, 1024), (8192 * 3, 64, 64, 4)],
)
def test_small_sources_have_fewer_shards(tokens, length, limit, expected):
    assert count_shards(tokens, length, limit) == expected


def test_shares_of_huge_sources_do_not_overflow():
    bounds = shard_bounds(np.arange(1025), 9 * 10**18, 1024)
    assert bounds[-1] == 9 * 10**18
    assert np.ptp(np.diff(bounds)) <= 1
