import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_parm.data.shuffle import extend_key, name_key, permute


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_every_place_is_taken_once(size, key):
    assert np.array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


def test_many_ranges_and_keys_in_one_call_equal_one_call_each():
    sizes, keys = np.array([1, 2, 7, 300]), np.array([5, 6, 7, 8], dtype=np.uint64)
    group = np.repeat(np.arange(4), sizes)
    place = np.concatenate([np.arange(size) for size in sizes])
    together = permute(place, sizes[group], keys[group])
    alone = np.concatenate([permute(np.arange(size), size, key) for size, key in zip(sizes, keys, strict=True)])
    assert np.array_equal(together, alone)


def test_the_order_is_pinned_for_ever():
    """A run of months must not change its order with a version: these numbers may never change."""
    assert permute(np.arange(10), 10, 2024).tolist() == [6, 3, 9, 2, 1, 5, 0, 7, 8, 4]
    assert name_key(7, "web") == 0xC3A9A33DCEC4895B
    assert extend_key(1, np.array([2]), np.array([3])).tolist() == [411002803395772997]


def test_orders_look_random():
    size = 20_000
    order = permute(np.arange(size), size, 3)
    assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < 0.03
    assert np.mean(np.abs(np.diff(order)) == 1) < 1e-3
    first = np.array([permute(0, 6, key)[0] for key in extend_key(1, np.arange(6000))])
    counts = np.bincount(first, minlength=6)
    assert counts.min() > 850
    assert counts.max() < 1150


def test_large_ranges_do_not_overflow():
    size = 2**61
    places = permute(np.arange(1000), size, 11)
    assert places.min() >= 0
    assert places.max() < size
    assert len(np.unique(places)) == 1000
