"""A keyed bijection of [0, n): shuffling with random access and without a table.

Pure integers, vectorised in numpy: every element may have its own range and its own key, so that the documents of
many logical shards are permuted in one call.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SALTS = tuple(np.uint64(number * 0x9E3779B97F4A7C15 % 2**64) for number in range(3))  # two half rounds each
_CHUNK = 1 << 14  # elements at a time: the temporaries stay in the processor's cache


def scramble(value: UInt64) -> UInt64:
    """Return splitmix64 of every element: a bijection of the 64-bit integers without visible structure.

    >>> scramble(np.array([0, 1], dtype=np.uint64)).tolist()
    [16294208416658607535, 10451216379200822465]
    """
    z = value + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MULTIPLIERS[0]
    z = (z ^ (z >> np.uint64(27))) * _MULTIPLIERS[1]
    z ^= z >> np.uint64(31)
    return z


def name_key(seed: int, name: str) -> int:
    """Return 64 bits that depend on the seed and a source's name, the same on every machine and in every process.

    >>> name_key(0, "web") == name_key(0, "web") != name_key(1, "web")
    True
    """
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")


def extend_key(key: UInt64 | int, *parts: npt.ArrayLike) -> UInt64:
    """Return keys that depend on ``key`` and on every array of ``parts`` (broadcast together)."""
    result = np.atleast_1d(np.asarray(key, dtype=np.uint64))
    for part in parts:
        result = scramble(result ^ scramble(np.asarray(part).astype(np.uint64)))
    return result


def permute(index: npt.ArrayLike, size: npt.ArrayLike, key: npt.ArrayLike) -> Int64:
    """Return the place of ``index`` in a keyed random order of ``[0, size)``.

    A generalised Feistel network over ``left * right`` cells, the smallest near-square that holds ``size``: each
    round adds a hash of one half to the other half, which can be undone, so the whole is a bijection; a result outside
    the range is sent through again (cycle walking), which is rare because the near-square is hardly larger than
    ``size``.

    Args:
        index: (N,) integers with ``0 <= index < size``.
        size: (N,) or a scalar: the length of the range of each element, below 2**62.
        key: (N,) or a scalar of 64 bits; another key is another order.

    Returns:
        (N,) int64 with ``0 <= result < size``.

    >>> sorted(permute(np.arange(10), 10, 7).tolist()) == list(range(10))
    True
    >>> permute(np.arange(6), 6, 1).tolist() != permute(np.arange(6), 6, 2).tolist()
    True
    """
    shape = np.broadcast_shapes(np.shape(index), np.shape(size), np.shape(key), (1,))
    index, size = (np.broadcast_to(np.asarray(x, dtype=np.int64), shape) for x in (index, size))
    key = np.broadcast_to(np.asarray(key, dtype=np.uint64), shape)
    result = np.empty(shape, dtype=np.int64)
    for start in range(0, len(result), _CHUNK):
        part = slice(start, start + _CHUNK)
        result[part] = _permute(index[part], size[part], key[part])
    return result


def _permute(index: Int64, size: Int64, key: UInt64) -> Int64:
    left = np.ceil(np.sqrt(size.astype(np.float64))).astype(np.int64)
    right = -(-size // np.maximum(left, 1))
    result = _feistel(index, left, right, key)
    outside = np.flatnonzero(result >= size)
    while outside.size:
        result[outside] = _feistel(result[outside], left[outside], right[outside], key[outside])
        outside = outside[result[outside] >= size[outside]]
    return result


def _feistel(index: Int64, left: Int64, right: Int64, key: UInt64) -> Int64:
    """Shift the high part by a hash of the low part and the reverse, in turn, each within its own range."""
    quotient, remainder = np.divmod(index, right)
    high, low = quotient.view(np.uint64), remainder.view(np.uint64)
    rows, columns = left.view(np.uint64), right.view(np.uint64)
    for salt in _SALTS:
        salted = key ^ salt
        high += _below(rows, low ^ salted)
        np.subtract(high, rows, out=high, where=high >= rows)
        low += _below(columns, high + salted)
        np.subtract(low, columns, out=low, where=low >= columns)
    return (high * columns + low).view(np.int64)


def _below(limit: UInt64, value: UInt64) -> UInt64:
    """Return a hash of ``value``, overwritten, in ``[0, limit)``: the high half of a 32 x 32 bit product."""
    value *= _MULTIPLIERS[0]
    value ^= value >> np.uint64(29)
    value *= _MULTIPLIERS[1]
    value >>= np.uint64(32)
    value *= limit
    value >>= np.uint64(32)
    return value
