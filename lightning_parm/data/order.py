"""Sample index -> (source, logical shard, window), and reading it: the whole order as a pure function."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lightning_parm.data.mixture import Mixture
from lightning_parm.data.shards import count_shards
from lightning_parm.data.shuffle import name_key
from lightning_parm.data.sources.format import Tokens
from lightning_parm.data.sources.source import Source
from lightning_parm.data.windows import Windows

Int64 = npt.NDArray[np.int64]
Segments = Sequence[tuple[int, Sequence[float]]]


class Order:
    """The global order of samples over all sources.

    ``sample(i)`` depends on the sources, the seed, the sequence length, the number of logical shards and the mix;
    never on ranks, workers or batch sizes.

    Args:
        sources: the data sets of the mix.
        sequence_length: L; a sample is L + 1 tokens.
        num_logical_shards: K, a power of two, fixed for the life of a run.
        seed: another seed is another order.
        shuffle: ``False`` keeps the order of the files.

    Raises:
        ValueError: a source is smaller than one window.
    """

    def __init__(
        self, sources: Sequence[Source], sequence_length: int, num_logical_shards: int, seed: int, shuffle: bool = True
    ) -> None:
        self.sources = list(sources)
        self.width = sequence_length + 1
        self.num_lanes = num_logical_shards
        self.windows: list[Windows] = []
        for source in sources:
            if source.num_tokens < self.width:
                raise ValueError(
                    f"Source {source.name!r} has {source.num_tokens} tokens in {source.num_documents} documents, less "
                    f"than one window of sequence_length + 1 = {self.width}. Add data or shorten sequence_length."
                )
            num_shards = count_shards(source.num_tokens, sequence_length, num_logical_shards)
            key = name_key(seed, source.name)
            self.windows.append(Windows(source.ends, source.part_first, sequence_length, num_shards, key, shuffle))
        self.dtype = np.result_type(*(source.dtype for source in sources))

    def locate(self, samples: Int64, mixture: Mixture) -> tuple[Int64, Int64, Int64]:
        """Return source, logical shard and window of each sample (N,)."""
        source, ticket = mixture.choose(samples)
        num_shards = np.array([windows.num_shards for windows in self.windows])[source]
        return source, ticket % num_shards, ticket // num_shards

    def read(self, samples: Int64, mixture: Mixture) -> Tokens:
        """Return the tokens of the samples: (N, L + 1) in the sources' own integer type."""
        out = np.empty((len(samples), self.width), dtype=self.dtype)
        source, shard, window = self.locate(samples, mixture)
        for number in np.unique(source).tolist():
            rows = np.flatnonzero(source == number)
            self.sources[number].fill(self.windows[number].pieces(shard[rows], window[rows]), rows, out)
        return out
