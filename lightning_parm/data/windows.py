"""Window j of a logical shard -> the pieces of documents that it is made of.

A logical shard's stream is one epoch after another without a seam; within an epoch its fragments (the parts of files
that lie in it) come in a keyed order, and the documents of a fragment in a keyed order. Window j is the tokens
``[j*L, j*L + L + 1)`` of that stream.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lightning_parm.data.pieces import Pieces
from lightning_parm.data.shards import shard_bounds
from lightning_parm.data.shuffle import extend_key, permute

Int64 = npt.NDArray[np.int64]


class Windows:
    """The windows of one source.

    Args:
        ends: (D + 1,) running sum of the documents' delimited lengths, from 0.
        part_first: (P + 1,) first document of each part of a file.
        sequence_length: L; a window is L + 1 tokens and the next one starts L tokens later.
        num_shards: logical shards of this source.
        key: 64 bits from the seed and the source's name.
        shuffle: ``False`` keeps the order of the files.
        complete: end with the last token instead of going on with the next epoch; the last window is then shorter.

    >>> windows = Windows(np.array([0, 5, 9, 20]), np.array([0, 3]), 8, 1, key=7, shuffle=False)
    >>> pieces = windows.pieces(np.array([0, 0]), np.array([0, 2]))  # the second crosses into the next epoch
    >>> list(zip(pieces.row.tolist(), pieces.document.tolist(), pieces.start.tolist(), pieces.size.tolist()))
    [(0, 0, 0, 5), (0, 1, 0, 4), (1, 2, 7, 4), (1, 0, 0, 5)]
    """

    def __init__(
        self,
        ends: Int64,
        part_first: Int64,
        sequence_length: int,
        num_shards: int,
        key: int,
        shuffle: bool = True,
        complete: bool = False,
    ) -> None:
        self.ends = ends
        self.part_first = part_first
        self.sequence_length = sequence_length
        self.num_shards = num_shards
        self.key = key
        self.shuffle = shuffle
        self.complete = complete
        self.num_tokens = int(ends[-1])
        self._layouts = _Layouts()

    def count(self, once: bool) -> int:
        """Return the windows in one epoch; with ``once`` those that lie in it whole, with their last label.

        >>> Windows(np.array([0, 20]), np.array([0, 1]), 5, 1, key=0).count(once=False)
        4
        """
        share = self.num_tokens // self.num_shards
        if self.complete:
            return -(-(share - 1) // self.sequence_length)
        return self.num_shards * ((share - once) // self.sequence_length)

    def pieces(self, shards: Int64, windows: Int64) -> Pieces:
        """Return the pieces of the windows ``windows`` (N,) of the logical shards ``shards`` (N,)."""
        low, high = self._range(shards)
        share = high - low
        epoch, start = np.divmod(windows * self.sequence_length, share)
        row, column, length = np.arange(len(shards)), np.zeros_like(shards), self.sequence_length + 1
        stop = np.minimum(start + length, share)
        spill = np.flatnonzero((start + length > share) & (not self.complete))
        requests = [(row, column, shards, epoch, start, stop)]
        while spill.size:  # a window that crosses the end of an epoch goes on at the start of the next
            row, epoch, shards, share = row[spill], epoch[spill] + 1, shards[spill], share[spill]
            column = column[spill] + stop[spill] - start[spill]
            start = np.zeros_like(row)
            stop = np.minimum(length - column, share)
            spill = np.flatnonzero(length - column > share)
            requests.append((row, column, shards, epoch, start, stop))
        row, column, shards, epoch, start, stop = (np.concatenate(parts) for parts in zip(*requests, strict=True))
        if len(requests) > 1:
            order = np.lexsort((column, row))
            row, column, shards, epoch, start, stop = (x[order] for x in (row, column, shards, epoch, start, stop))
        return self._cut(row, column, shards, epoch, start, stop)

    def _cut(self, row: Int64, column: Int64, shards: Int64, epoch: Int64, start: Int64, stop: Int64) -> Pieces:
        base = self._place(shards, epoch)
        layouts = self._layouts
        running = layouts.running[: layouts.used + 1]
        first = np.searchsorted(running, base + start, side="right") - 1
        last = np.searchsorted(running, base + stop, side="left")
        counts = last - first
        request = np.repeat(np.arange(len(row)), counts)
        entry = np.arange(len(request)) - np.repeat(np.cumsum(counts) - counts - first, counts)
        begin = np.maximum(running[entry], (base + start)[request])
        end = np.minimum(running[entry + 1], (base + stop)[request])
        document = layouts.documents[entry]
        low, _ = self._range(shards[request])
        skipped = np.maximum(low - self.ends[document], 0)  # only a shard's first document starts before its share
        return Pieces(
            row=row[request],
            column=column[request] + begin - (base + start)[request],
            document=document,
            start=begin - running[entry] + skipped,
            size=end - begin,
        )

    def _place(self, shards: Int64, epochs: Int64) -> Int64:
        """Return where in the running sum the layout of each (shard, epoch) starts, laying out what is missing."""
        pairs = list(zip(shards.tolist(), epochs.tolist(), strict=True))
        known = self._layouts.base
        missing = [pair for pair in dict.fromkeys(pairs) if pair not in known]
        if missing:
            if self._layouts.is_full():
                self._layouts.clear()
                missing = list(dict.fromkeys(pairs))
            chosen = np.array(missing, dtype=np.int64)
            self._layouts.add(missing, *self._lay_out(chosen[:, 0], chosen[:, 1]))
        return np.array([known[pair] for pair in pairs], dtype=np.int64)

    def _lay_out(self, shards: Int64, epochs: Int64) -> tuple[Int64, Int64, Int64]:
        """Return the documents of the shards' epochs in order, the tokens of each, and the documents per shard."""
        low, high = self._range(shards)
        first = np.searchsorted(self.ends, low, side="right") - 1
        last = np.searchsorted(self.ends, high, side="left")
        part_low = np.searchsorted(self.part_first, first, side="right") - 1
        parts = np.searchsorted(self.part_first, last, side="left") - part_low
        lane, place = _enumerate(parts)
        keys = extend_key(self.key, shards, epochs)
        part = part_low[lane] + (permute(place, parts[lane], keys[lane]) if self.shuffle else place)
        fragment_first = np.maximum(self.part_first[part], first[lane])
        sizes = np.minimum(self.part_first[part + 1], last[lane]) - fragment_first
        fragment, place = _enumerate(sizes)
        if self.shuffle:
            place = permute(place, sizes[fragment], extend_key(keys[lane], part)[fragment])
        document = fragment_first[fragment] + place
        begin = np.maximum(self.ends[document], low[lane][fragment])
        end = np.minimum(self.ends[document + 1], high[lane][fragment])
        return document, end - begin, last - first

    def _range(self, shards: Int64) -> tuple[Int64, Int64]:
        low = shard_bounds(shards, self.num_tokens, self.num_shards)
        return low, shard_bounds(shards + 1, self.num_tokens, self.num_shards)


def _enumerate(counts: Int64) -> tuple[Int64, Int64]:
    """Return for every element of groups of the given sizes its group and its place in the group."""
    group = np.repeat(np.arange(len(counts)), counts)
    return group, np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)


class _Layouts:
    """The orders of documents in use, end to end in one running sum, so that one search serves many windows.

    It holds the shards and epochs that were asked for; when three times as many documents have come in as the shards
    have, it is emptied and fills again: a few bytes a document, whatever the length of the run.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.base: dict[tuple[int, int], int] = getattr(self, "base", {})
        self.base.clear()
        self.used = 0
        self.live: dict[int, int] = {}
        self.documents = np.empty(1024, dtype=np.int64)
        self.running = np.zeros(1025, dtype=np.int64)

    def is_full(self) -> bool:
        return self.used > 3 * sum(self.live.values()) + 4096

    def add(self, pairs: list[tuple[int, int]], documents: Int64, sizes: Int64, counts: Int64) -> None:
        needed = self.used + len(documents)
        if needed > len(self.documents):
            room = max(needed, 2 * len(self.documents))
            self.documents = np.concatenate([self.documents, np.empty(room - len(self.documents), dtype=np.int64)])
            self.running = np.concatenate([self.running, np.empty(room + 1 - len(self.running), dtype=np.int64)])
        total = self.running[self.used]
        self.documents[self.used : needed] = documents
        np.cumsum(sizes, out=self.running[self.used + 1 : needed + 1])
        self.running[self.used + 1 : needed + 1] += total
        starts = self.running[self.used + np.cumsum(counts) - counts]
        for pair, start, count in zip(pairs, starts.tolist(), counts.tolist(), strict=True):
            self.base[pair] = start
            self.live[pair[0]] = count
        self.used = needed
