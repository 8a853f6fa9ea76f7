"""From rows of tokens to what a model takes: inputs, labels, and what else was asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lightning_parm.data.order import PADS, STARTS, Int64, Marks
from lightning_parm.data.sources.format import Tokens

Batch = dict[str, torch.Tensor]
IGNORED = -100
"""The label that torch's cross entropy leaves out."""


@dataclass(frozen=True)
class BatchMaker:
    """Widens tokens to int64 and adds what attention and loss need to respect documents.

    Args:
        document_ids: add ``document_ids`` (B, L): 0, 1, 2, ... in each row, for attention within documents.
        position_ids: add ``position_ids`` (B, L) that start again at 0 with every document.
        mask_document_starts: give the label ``-100`` where the next token is the first of another document.
        pin_memory: put the tensors into page-locked memory, from which copies to a GPU run beside the computation.
        transform: called with every sample, a dictionary of (L,) tensors, before collation.
        collate: makes a batch of a list of samples; ``None`` stacks them.
    """

    document_ids: bool = False
    position_ids: bool = False
    mask_document_starts: bool = False
    pin_memory: bool = False
    transform: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    collate: Callable[[list[dict[str, Any]]], Any] | None = None

    @property
    def needs_marks(self) -> bool:
        """Whether it has to be known which tokens start a document."""
        return self.document_ids or self.position_ids or self.mask_document_starts

    def __call__(self, samples: Int64, tokens: Tokens, marks: Marks | None) -> Any:
        """Return the batch of the rows ``tokens`` (B, L + 1)."""
        batch = {
            "input_ids": self._widen(tokens[:, :-1]),
            "labels": self._widen(tokens[:, 1:]),
            "sample_index": self._widen(samples),
        }
        if marks is not None:
            ignored = marks[:, 1:] == PADS
            if self.mask_document_starts:
                ignored |= marks[:, 1:] == STARTS
            batch["labels"].numpy()[ignored] = IGNORED
            starts = marks[:, :-1] == STARTS
            if self.document_ids:
                batch["document_ids"] = self._widen(np.maximum(np.cumsum(starts, axis=1) - 1, 0))
            if self.position_ids:
                places = np.arange(starts.shape[1])
                batch["position_ids"] = self._widen(places - np.maximum.accumulate(places * starts, axis=1))
        if self.transform is None and self.collate is None:
            return batch
        rows = [{name: values[row] for name, values in batch.items()} for row in range(len(samples))]
        if self.transform is not None:
            rows = [self.transform(row) for row in rows]
        return torch.utils.data.default_collate(rows) if self.collate is None else self.collate(rows)

    def _widen(self, values: Any) -> torch.Tensor:
        wide = torch.empty(values.shape, dtype=torch.int64, pin_memory=self.pin_memory)
        wide.numpy()[...] = values
        return wide
