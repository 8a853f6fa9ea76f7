"""The same guarantees for any map-style data set: a sampler whose order no number of ranks or workers can change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler

from lightning_parm.data.shuffle import extend_key, name_key, permute

_AT_ONCE = 4096


class ElasticSampler(DistributedSampler[int]):
    """Indices of a data set in a keyed order without a table; its whole state is one integer, the samples consumed.

    Sample ``i`` of the run is the same whatever the number of ranks, workers or samples a batch: rank r takes samples
    ``start + r, start + r + size, ...``. Epochs follow each other without a seam, nothing is padded or dropped. It is a
    ``DistributedSampler`` so that Lightning leaves it in place.

    Args:
        length: examples in the data set.
        rank: this rank among the data-parallel ranks.
        size: number of data-parallel ranks.
        seed: another seed is another order.
        shuffle: ``False`` keeps the data set's order.
        start: samples consumed so far, over all ranks.
        endless: go on after the epoch in which it stands.

    Raises:
        ValueError: the data set is empty, or the rank is not below the size.

    >>> whole = list(ElasticSampler(10))
    >>> sorted(whole) == list(range(10))
    True
    >>> [list(ElasticSampler(10, rank, 2, start=4)) for rank in (0, 1)] == [whole[4::2], whole[5::2]]
    True
    """

    def __init__(
        self,
        length: int,
        rank: int = 0,
        size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        start: int = 0,
        endless: bool = False,
    ) -> None:
        if length < 1:
            raise ValueError(f"length={length}: there is nothing to sample from.")
        if not 0 <= rank < size:
            raise ValueError(f"rank={rank} is not below size={size}: ranks count from 0.")
        super().__init__(range(length), num_replicas=size, rank=rank, shuffle=shuffle, seed=seed)  # type: ignore[arg-type]
        self.length = length
        self.start = start
        self.endless = endless
        self._key = name_key(seed, "elastic")

    def __len__(self) -> int:
        """Return the samples of this rank until the end of the epoch in which the sampler stands."""
        left = self.length - self.start % self.length
        return max(1, left // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        start, first, count = self.start, 0, len(self)
        while self.endless or first < count:
            last = first + _AT_ONCE if self.endless else min(first + _AT_ONCE, count)
            yield from self.at(start + self.rank + np.arange(first, last) * self.num_replicas).tolist()
            first = last

    def at(self, samples: Any) -> Any:
        """Return the index of each of the run's samples (N,): random access."""
        epoch, place = np.divmod(np.asarray(samples, dtype=np.int64), self.length)
        return permute(place, self.length, extend_key(self._key, epoch)) if self.shuffle else place

    def set_epoch(self, epoch: int) -> None:
        """Take no notice: the order follows from the samples consumed."""

    def state_dict(self, consumed: int) -> dict[str, int]:
        """Return the state after ``consumed`` samples in all, which the training loop counts."""
        return {"consumed": consumed, "length": self.length, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after the samples that the state says were consumed.

        Raises:
            ValueError: the data set has another length, or the seed is another.
        """
        for name, value in (("length", self.length), ("seed", self.seed)):
            if state[name] != value:
                raise ValueError(
                    f"The checkpoint was made with {name}={state[name]} and the sampler has {name}={value}."
                )
        self.start = state["consumed"]
