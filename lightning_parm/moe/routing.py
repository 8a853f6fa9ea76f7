"""From the router's choices to rows sorted by expert, and back: by sort and index, in O(k S M) memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_parm.moe.layout import sum_rows


@dataclass(frozen=True)
class Choice:
    """Which expert gets which token, and how much its result counts.

    Attributes:
        expert: ``(S, k)`` int64.
        weight: ``(S, k)``, differentiable.
    """

    expert: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Routing:
    """Rows in the order in which they are sent, and the way back to their tokens.

    Attributes:
        counts: Rows per chunk, mp peer and expert, ``(chunks, peers, E)`` int64.
        source: The choice (token * k + j) that each row serves, ``(R,)``.
        slots: The row of each choice, ``(S, k)``.
        weight: ``(S, k)``.

    Example:
        >>> choice = Choice(torch.tensor([[1], [0], [1]]), torch.full((3, 1), 0.5))
        >>> routing = arrange(choice, num_experts=2)
        >>> x = torch.tensor([[10.0], [20.0], [30.0]])
        >>> routing.dispatch(x).flatten(), routing.counts.flatten()
        (tensor([20., 10., 30.]), tensor([1, 2]))
        >>> routing.combine(routing.dispatch(x)).flatten()
        tensor([ 5., 10., 15.])
    """

    counts: Tensor
    source: Tensor
    slots: Tensor
    weight: Tensor

    def dispatch(self, x: Tensor) -> Tensor:
        """Tokens ``(S, M)`` -> rows ``(R, M)``, sorted by chunk, peer and expert."""
        token = self.source // self.slots.shape[1]
        rows: Tensor = _Dispatch.apply(x, token, self.slots)  # type: ignore[no-untyped-call]
        return rows

    def combine(self, rows: Tensor) -> Tensor:
        """Results ``(R, M)`` -> the weighted sum for every token ``(S, M)``, accumulated in float32."""
        y: Tensor = _Combine.apply(rows, self.weight, self.source, self.slots)  # type: ignore[no-untyped-call]
        return y

    def chunks(self, sizes: Sequence[int]) -> list[Routing]:
        """One routing for each range of tokens, ``sizes[i]`` rows each; see :func:`arrange`."""
        num_tokens, top_k = self.slots.shape
        parts, row = [], 0
        for (first, last), rows in zip(token_ranges(num_tokens, len(sizes)), sizes, strict=True):
            parts.append(
                replace(
                    self,
                    source=self.source[row : row + rows] - first * top_k,
                    slots=self.slots[first:last] - row,
                    weight=self.weight[first:last],
                )
            )
            row += rows
        return parts


def arrange(choice: Choice, num_experts: int, chunks: int = 1, peers: int | None = None) -> Routing:
    """Sort the chosen rows for sending.

    Args:
        choice: What the router chose.
        num_experts: E.
        chunks: Parts that are sent one after another: ranges of tokens, or of rows if ``peers`` is given.
        peers: mp peers that share the rows out, by dealing them like cards: every peer and chunk gets its share of
            every expert.
    """
    expert = choice.expert.flatten()
    num_tokens, top_k = choice.expert.shape
    if peers is None:
        token = torch.arange(num_tokens, device=expert.device).repeat_interleave(top_k)
        part = token * chunks // max(num_tokens, 1)
        order = None
    else:
        order = expert.argsort(stable=True)
        row = torch.arange(expert.numel(), device=expert.device)
        part = (row // peers % chunks) * peers + row % peers
        expert = expert[order]
    parts = chunks * (peers or 1)
    keys, source = (part * num_experts + expert).sort(stable=True)
    edges = torch.arange(parts * num_experts + 1, device=expert.device)
    counts = torch.searchsorted(keys, edges).diff().view(chunks, peers or 1, num_experts)
    source = source if order is None else order[source]
    slots = torch.empty_like(source).scatter_(0, source, torch.arange(len(source), device=source.device))
    return Routing(counts, source, slots.view(num_tokens, top_k), choice.weight)


def token_ranges(num_tokens: int, chunks: int) -> list[tuple[int, int]]:
    """First and last token of every chunk.

    Example:
        >>> token_ranges(5, 2)
        [(0, 3), (3, 5)]
    """
    starts = [-(-chunk * num_tokens // chunks) for chunk in range(chunks + 1)]
    return list(pairwise(starts))


class _Dispatch(torch.autograd.Function):
    """Forward the token of each row; backward the sum of each token's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return sum_rows(gradient, slots.t()), None, None


class _Combine(torch.autograd.Function):
    """Forward the weighted sum of each token's rows; backward each row's weighted token, and the weights' products."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, source: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, source, slots)
        total = rows.new_zeros((slots.shape[0], rows.shape[1]), dtype=weight.dtype)
        for column, factor in zip(slots.t(), weight.t(), strict=True):
            total.addcmul_(rows.index_select(0, column).to(total.dtype), factor.unsqueeze(1))
        return total.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weight, source, slots = ctx.saved_tensors
        of_row = weight.flatten().index_select(0, source).unsqueeze(1)
        wide = gradient.to(weight.dtype)
        row_gradient = (wide.index_select(0, source // slots.shape[1]) * of_row).to(rows.dtype)
        products = [(wide * rows.index_select(0, column)).sum(-1) for column in slots.t()]
        return row_gradient, torch.stack(products, -1), None, None
