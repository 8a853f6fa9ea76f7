"""From the router's choices to rows sorted by expert, and back: by sort and index, in O(k S M) memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_parm.moe.collectives import first_order
from lightning_parm.moe.layout import each, pick, sum_rows

DropPolicy = Literal["position", "probability"]


@dataclass(frozen=True)
class Choice:
    """Which expert gets which token, and how much its result counts.

    Attributes:
        expert: ``(S, k)`` int64.
        weight: ``(S, k)``, differentiable.
        kept: ``(S, k)`` bool, ``False`` for choices that are not sent; ``None`` if all are.
        position: ``(S, k)`` int64, place among the choices of the same expert; only with a capacity.
    """

    expert: Tensor
    weight: Tensor
    kept: Tensor | None = None
    position: Tensor | None = None


class Places(NamedTuple):
    """Where to pick rows.

    Attributes:
        at: Indices.
        missing: Where, with one more dim of size 1, nothing is to be picked; ``None`` if nowhere.
    """

    at: Tensor
    missing: Tensor | None


def _places(index: Tensor, gaps: bool) -> Places:
    if not gaps:
        return Places(index, None)
    missing = index < 0
    if missing.device.type == "cpu" and not missing.any():  # to look is cheap where nothing runs ahead
        return Places(index, None)
    return Places(index.clamp_min(0), missing.unsqueeze(-1))


@dataclass(frozen=True)
class Routing:
    """Rows in the order in which they are sent, and the way back to their tokens.

    Attributes:
        counts: Rows per chunk, mp peer and expert, ``(chunks, peers, E)`` int64.
        source: The choice (token * k + j) that each row serves, ``(R,)``; -1 for padding.
        slots: The row of each choice, ``(S, k)``; -1 for choices that are not sent.
        weight: ``(S, k)``.
        gaps: Whether there may be any -1.
        static: Every entry of ``counts``, where that is known beforehand.

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
    gaps: bool = False
    static: int | None = None

    def dispatch(self, x: Tensor) -> Tensor:
        """Tokens ``(S, M)`` -> rows ``(R, M)``, sorted by chunk, peer and expert."""
        rows: Tensor = _Dispatch.apply(x, *self._tokens, *self._slots)  # type: ignore[no-untyped-call]
        return rows

    def combine(self, rows: Tensor, weight: Tensor | None = None) -> Tensor:
        """Results ``(R, M)`` -> the weighted sum for every token ``(S, M)``, accumulated in float32.

        Args:
            rows: Of the experts.
            weight: ``(S, k)``, in place of the routing's own.
        """
        y: Tensor = _Combine.apply(  # type: ignore[no-untyped-call]
            rows, self.weight if weight is None else weight, self._choices[0], *self._tokens, *self._slots
        )
        return y

    @cached_property
    def _choices(self) -> Places:
        """The choice of each row."""
        return _places(self.source, self.gaps)

    @cached_property
    def _tokens(self) -> Places:
        """The token of each row."""
        (at, missing), top_k = self._choices, self.slots.shape[1]
        return Places(at if top_k == 1 else at.div(top_k, rounding_mode="floor"), missing)

    @cached_property
    def _slots(self) -> Places:
        """The rows of each token, ``(k, S)``."""
        return _places(self.slots.t(), self.gaps)

    def trimmed(self, rows: int) -> Routing:
        """Without the choices that were sorted behind the first ``rows`` because they are not sent."""
        if not self.gaps or self.static is not None:
            return self
        return replace(self, source=self.source[:rows], slots=self.slots.where(self.slots < rows, -1))

    def chunks(self, sizes: Sequence[int]) -> list[Routing]:
        """One routing for each range of tokens, ``sizes[i]`` rows each; see :func:`arrange`."""
        if len(sizes) == 1:
            return [self]
        num_tokens, top_k = self.slots.shape
        parts, row = [], 0
        for (first, last), rows in zip(token_ranges(num_tokens, len(sizes)), sizes, strict=True):
            parts.append(
                replace(
                    self,
                    source=self.source[row : row + rows] - first * top_k,
                    slots=(self.slots[first:last] - row).clamp_min(-1),
                    weight=self.weight[first:last],
                )
            )
            row += rows
        return parts


def capacity(num_tokens: int, top_k: int, num_experts: int, factor: float) -> int:
    """C, the most rows an expert takes: ``factor`` times its mean share of ``k S`` rows, rounded up.

    Example:
        >>> capacity(num_tokens=10, top_k=2, num_experts=8, factor=1.25)
        4
    """
    return math.ceil(factor * top_k * num_tokens / num_experts - 1e-9)


def drop(
    choice: Choice, num_experts: int, lengths: Sequence[int], capacities: Sequence[int], policy: DropPolicy
) -> Choice:
    """Mark the choices beyond each expert's capacity as not kept.

    Args:
        choice: What the router chose.
        num_experts: E.
        lengths: Tokens of each part of the batch.
        capacities: C of each part; parts fill their experts independently.
        policy: Who goes first: ``"position"`` the earlier token, ``"probability"`` the larger weight.

    Example:
        >>> choice = Choice(torch.zeros(3, 1, dtype=torch.int64), torch.tensor([[0.2], [0.9], [0.5]]))
        >>> drop(choice, 1, [3], [2], "position").kept.flatten()
        tensor([ True,  True, False])
        >>> drop(choice, 1, [3], [2], "probability").kept.flatten()
        tensor([False,  True,  True])
    """
    device, shape = choice.expert.device, choice.expert.shape
    keys, limit, before = choice.expert.flatten(), capacities[0], None
    if len(lengths) > 1:
        table = torch.tensor([list(lengths), list(capacities), [0, *accumulate(capacities)][:-1]])
        table = table.to(device, non_blocking=True)
        part = torch.arange(len(lengths), device=device).repeat_interleave(table[0], output_size=shape[0])
        keys = (part.unsqueeze(1) * num_experts + choice.expert).flatten()
        limit, before = table[1:, part].unsqueeze(-1)
    if policy == "probability":
        first = choice.weight.detach().flatten().argsort(descending=True, stable=True)
        keys, by_key = keys[first].sort(stable=True)
        order = first[by_key]
    else:
        keys, order = keys.sort(stable=True)
    place = torch.arange(keys.numel(), device=device) - torch.searchsorted(keys, keys)
    position = torch.empty_like(place).scatter_(0, order, place).view(shape)
    return replace(choice, kept=position < limit, position=position if before is None else position + before)


def arrange(choice: Choice, num_experts: int, chunks: int = 1, peers: int | None = None) -> Routing:
    """Sort the kept choices for sending.

    Args:
        choice: What is chosen and kept.
        num_experts: E.
        chunks: Parts that are sent one after another: ranges of tokens, or of rows if ``peers`` is given.
        peers: mp peers that share the rows out, by dealing them like cards: every peer and chunk gets its share of
            every expert.
    """
    keys, (num_tokens, top_k) = choice.expert.flatten(), choice.expert.shape
    parts = chunks * (peers or 1)
    row = torch.arange(keys.numel(), device=keys.device)
    if peers is None and chunks > 1:
        keys = row // top_k * chunks // max(num_tokens, 1) * num_experts + keys
    if choice.kept is not None:
        keys = keys.masked_fill(~choice.kept.flatten(), parts * num_experts)  # behind all that is sent
    keys, source = keys.sort(stable=True)
    if peers is not None and parts > 1:
        dealt = (row // peers % chunks * peers + row % peers) * num_experts + keys
        if choice.kept is not None:
            dealt = dealt.where(keys < num_experts, parts * num_experts)
        keys, by_key = dealt.sort(stable=True)
        source = source[by_key]
    edges = torch.arange(parts * num_experts + 1, device=keys.device)
    counts = torch.searchsorted(keys, edges).diff().view(chunks, peers or 1, num_experts)
    slots = torch.empty_like(source).scatter_(0, source, row).view(num_tokens, top_k)
    return Routing(counts, source, slots, choice.weight, gaps=choice.kept is not None)


def arrange_static(choice: Choice, num_experts: int, width: int, chunks: int = 1, peers: int = 1) -> Routing:
    """As :func:`arrange`, but every expert has ``width`` rows, whether it fills them or not: nothing is data-dependent.

    Args:
        choice: What is chosen and kept; with positions.
        num_experts: E.
        width: C, at least every kept position + 1; rounded up to a multiple of ``chunks * peers``.
        chunks: Parts that are sent one after another.
        peers: mp peers that share the rows out.
    """
    assert choice.position is not None
    assert choice.kept is not None
    parts = chunks * peers
    width = -(-width // parts)
    cell, place = choice.expert, choice.position
    if parts > 1:  # dealt as in arrange, for each expert by itself
        cell, place = place % parts * num_experts + cell, place // parts
    slots = cell * width + place
    rows = parts * num_experts * width
    slots = slots.where(choice.kept, rows).flatten()
    source = slots.new_full((rows + 1,), -1)
    source.scatter_(0, slots, torch.arange(slots.numel(), device=slots.device))
    counts = slots.new_full((chunks, peers, num_experts), width)
    slots = slots.where(slots < rows, -1).view(choice.expert.shape)
    return Routing(counts, source[:rows], slots, choice.weight, gaps=True, static=width)


def token_ranges(num_tokens: int, chunks: int) -> list[tuple[int, int]]:
    """First and last token of every chunk.

    Example:
        >>> token_ranges(5, 2)
        [(0, 3), (3, 5)]
    """
    return list(pairwise(-(-chunk * num_tokens // chunks) for chunk in range(chunks + 1)))


class _Dispatch(torch.autograd.Function):
    """Forward the token of each row; backward the sum of each token's rows."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, token: Tensor, empty: Tensor | None, slots: Tensor, unsent: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(slots, unsent)
        return pick(x, token, empty)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return sum_rows(gradient, *ctx.saved_tensors), None, None, None, None


class _Combine(torch.autograd.Function):
    """Forward the weighted sum of each token's rows; backward each row's weighted token, and the weights' products."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        choice: Tensor,
        token: Tensor,
        empty: Tensor | None,
        slots: Tensor,
        unsent: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, choice, token, empty, slots, unsent)
        total: Tensor | None = None
        for at, missing, factor in zip(slots, each(unsent, slots), weight.t().unsqueeze(-1), strict=True):
            part = pick(rows, at, missing).to(weight.dtype)
            total = part.mul_(factor) if total is None else total.addcmul_(part, factor)
        assert total is not None
        return total.to(rows.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, choice, token, empty, slots, unsent = ctx.saved_tensors
        wide = gradient.to(weight.dtype)
        of_row = pick(weight.view(-1, 1), choice, empty)
        row_gradient = pick(wide, token, empty).mul_(of_row).to(rows.dtype)
        picked = (pick(rows, *places).to(weight.dtype) for places in zip(slots, each(unsent, slots), strict=True))
        products = [part.mul_(wide).sum(-1) for part in picked]
        return row_gradient, torch.stack(products, -1), None, None, None, None, None
