"""Documents as samples: one document a row, cut or padded to the row's length, in a keyed order for every epoch."""

from __future__ import annotations

import numpy as np

from lightning_parm.data.pieces import Int64, Pieces
from lightning_parm.data.shuffle import extend_key, permute


class Documents:
    """The documents of one source; it answers like :class:`~lightning_parm.data.windows.Windows`.

    Args:
        ends: (D + 1,) running sum of the documents' delimited lengths, from 0.
        width: L + 1, the longest piece of a document that is taken.
        key: 64 bits from the seed and the source's name.
        shuffle: ``False`` keeps the order of the files.

    >>> documents = Documents(np.array([0, 5, 9, 20]), width=8, key=7, shuffle=False)
    >>> documents.pieces(np.array([0, 0]), np.array([2, 3])).size.tolist()
    [8, 5]
    """

    num_shards = 1

    def __init__(self, ends: Int64, width: int, key: int, shuffle: bool = True) -> None:
        self.ends = ends
        self.width = width
        self.key = key
        self.shuffle = shuffle

    def count(self, once: bool) -> int:
        """Return the documents of one epoch."""
        return len(self.ends) - 1

    def pieces(self, shards: Int64, tickets: Int64) -> Pieces:
        """Return one piece a row: the start of each document."""
        size = self.count(once=True)
        epoch, document = np.divmod(tickets, size)
        if self.shuffle:
            document = permute(document, size, extend_key(self.key, epoch))
        lengths = np.minimum(self.ends[document + 1] - self.ends[document], self.width)
        zeros = np.zeros_like(document)
        return Pieces(np.arange(len(document)), zeros, document, zeros, lengths)
