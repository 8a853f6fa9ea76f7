"""Token ranges of a source -> logical shards: equal shares of its tokens. Pure integers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]

WINDOWS_PER_SHARD = 64
"""A logical shard is at least this many windows long, so a small source has fewer logical shards."""


def count_shards(num_tokens: int, sequence_length: int, num_logical_shards: int) -> int:
    """Return how many logical shards a source has: a power of two, each shard at least 64 windows long.

    >>> count_shards(100_000_000, 4096, 1024), count_shards(100_000, 1024, 1024)
    (256, 1)
    """
    fitting = num_tokens // (WINDOWS_PER_SHARD * sequence_length)
    return min(num_logical_shards, 1 << max(fitting.bit_length() - 1, 0))


def shard_bounds(shard: npt.ArrayLike, num_tokens: int, num_shards: int) -> Int64:
    """Return the first token of each logical shard: shard k is tokens ``[k*T/K, (k+1)*T/K)``.

    All shares are equal to within one token, so all shards finish an epoch together.

    >>> shard_bounds([0, 1, 2, 3], 10, 3).tolist()
    [0, 3, 6, 10]
    """
    shard = np.asarray(shard, dtype=np.int64)
    quotient, remainder = divmod(num_tokens, num_shards)  # shard * num_tokens could exceed 64 bits
    bounds: Int64 = shard * quotient + shard * remainder // num_shards
    return bounds
