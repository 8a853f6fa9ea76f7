"""Stretches of documents that fill rows: what lies between the order of samples and the reading of files."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pieces:
    """Stretches of documents, in the order in which they fill the rows. All arrays are (N,) int64.

    Attributes:
        row: which of the asked windows the piece belongs to.
        column: where in that window the piece starts.
        document: the document's number in the source.
        start: first token taken, counted in the delimited document.
        size: number of tokens taken.
    """

    row: Int64
    column: Int64
    document: Int64
    start: Int64
    size: Int64
