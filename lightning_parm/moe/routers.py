"""Routers (the paper's gate): which experts each token goes to, and the statistics of its balance losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.autocast_mode import is_autocast_available

from lightning_parm.moe.collectives import first_order
from lightning_parm.moe.experts import Prepare
from lightning_parm.moe.routing import Choice, capacity

RouterKind = Literal["softmax", "sigmoid", "expert_choice", "uniform"]


class Part(NamedTuple):
    """A run of tokens with statistics and noise of its own: tokens ``[first, last)`` of stream ``stream``."""

    stream: int
    first: int
    last: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.last - self.first


class Router(nn.Module):
    """Scores every expert for every token, in float32 whatever the precision around it, and picks the best.

    ``"softmax"``: the k most probable experts. ``"sigmoid"``: the k experts with the highest independent score plus a
    bias that is no parameter; :meth:`update_bias` moves it against the load (DeepSeek-V3, sec. 2.1.2), and it touches
    the choice only, never the weight. ``"expert_choice"``: every expert takes its best ``f k S / E`` tokens, so a token
    may have any number of experts (Zhou et al., 2022); it looks at later tokens, so it is not causal. ``"uniform"``:
    experts in turn, whatever the scores, for benchmarks.

    Ties go to the lowest expert. A token with NaN scores goes to valid experts, and its weights are NaN.

    Args:
        model_dim: M.
        num_experts: E.
        top_k: k, experts per token.
        kind: How scores become choices.
        normalize: Whether a token's k weights are scaled to sum to 1.
        scale: Factor on all weights (DeepSeek's ``routed_scaling_factor``).
        num_groups: Groups of consecutive experts; a token's experts come from its best ``num_chosen_groups`` only. A
            group is as good as its two best experts together.
        num_chosen_groups: Groups a token may use.
        capacity_factor: f of expert choice.
        jitter: While training the router's input is multiplied by noise from ``[1 - jitter, 1 + jitter]``.
        device: Where the parameters are made.
        dtype: Their type.

    Raises:
        ValueError: If k experts cannot be chosen.

    Example:
        >>> router = Router(model_dim=4, num_experts=3, top_k=2)
        >>> router.reset_parameters(seed=0)
        >>> choice, _ = router(torch.randn(5, 4))
        >>> choice.expert.shape, torch.allclose(choice.weight.sum(-1), torch.ones(5))
        (torch.Size([5, 2]), True)
    """

    bias: Tensor | None

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        top_k: int,
        kind: RouterKind = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        num_groups: int = 1,
        num_chosen_groups: int = 1,
        capacity_factor: float | None = None,
        jitter: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if kind not in get_args(RouterKind):
            raise ValueError(f"router={kind!r} is unknown; choose one of {', '.join(get_args(RouterKind))}.")
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k={top_k} must be between 1 and num_experts={num_experts}.")
        if num_groups < 1 or num_experts % num_groups or not 1 <= num_chosen_groups <= num_groups:
            raise ValueError(
                f"num_groups={num_groups} must divide num_experts={num_experts}, and num_chosen_groups="
                f"{num_chosen_groups} must be between 1 and num_groups."
            )
        if top_k > num_experts // num_groups * num_chosen_groups:
            raise ValueError(
                f"top_k={top_k} is more than the {num_experts // num_groups * num_chosen_groups} experts of "
                f"num_chosen_groups={num_chosen_groups} groups; choose more groups."
            )
        self.num_experts = num_experts
        self.top_k = top_k
        self.kind = kind
        self.normalize = normalize
        self.scale = scale
        self.num_groups = num_groups
        self.num_chosen_groups = num_chosen_groups
        self.capacity_factor = capacity_factor
        self.jitter = jitter
        self.weight = nn.Parameter(torch.empty(num_experts, model_dim, device=device, dtype=dtype))
        bias = torch.zeros(num_experts, device=device) if kind == "sigmoid" else None
        self.register_buffer("bias", bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """As always, but the bias keeps its precision: its small steps would round to nothing in half precision."""
        bias = self.bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if bias is not None and self.bias is not None and self.bias.dtype.itemsize < bias.dtype.itemsize:
            self.bias = bias.to(self.bias.device)
        return self

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Uniform in ``1/sqrt(M)``, as ``torch.nn.Linear``; no bias. Until then the weight is uninitialised."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        self.weight.uniform_(-bound, bound, generator=torch.Generator(self.weight.device).manual_seed(seed))
        if self.bias is not None:
            self.bias.zero_()

    @torch.no_grad()
    def update_bias(self, load: Tensor, rate: float) -> None:
        """Raise the bias of experts below the mean load by ``rate`` and lower it above.

        Args:
            load: ``(E,)``, tokens of each expert, of all ranks.
            rate: Speed (DeepSeek-V3: 0.001).

        Raises:
            RuntimeError: If the router has no bias.

        Example:
            >>> router = Router(model_dim=4, num_experts=2, top_k=1, kind="sigmoid")
            >>> router.update_bias(torch.tensor([9.0, 1.0]), rate=0.1)
            >>> router.bias
            tensor([-0.1000,  0.1000])
        """
        if self.bias is None:
            raise RuntimeError(f"Only router='sigmoid' balances its load by a bias, this one is {self.kind!r}.")
        self.bias += rate * (load.mean() - load).sign()

    def forward(
        self,
        x: Tensor,
        prepare: Prepare | None = None,
        parts: Sequence[Part] | None = None,
        seed: int = 0,
        differentiable: bool = True,
    ) -> tuple[Choice, Tensor]:
        """Choose experts.

        Args:
            x: ``(S, M)``.
            prepare: Applied to the weight first; schedules correct its gradient with it.
            parts: Which tokens these are; one part by default.
            seed: Of the jitter; ranks that route the same tokens pass the same.
            differentiable: Whether the statistics are, which costs time.

        Returns:
            The choice, and statistics ``(parts, 2 E + 2)``: per expert the tokens that chose it and the sum of its
            probabilities, then the sum of squared log partition functions and the number of tokens.
        """
        parts = parts or [Part(0, 0, len(x))]
        lengths = [part.length for part in parts]
        weight = self.weight if prepare is None else prepare(self.weight)
        has_autocast = is_autocast_available(x.device.type)  # not on meta
        with torch.autocast(x.device.type, enabled=False) if has_autocast else nullcontext():
            dtype = torch.promote_types(x.dtype, torch.float32)
            x = x.to(dtype)
            if self.jitter and self.training:
                x = x * torch.cat([self._noise(part, seed, x) for part in parts])
            logits = F.linear(x, weight.to(dtype))
            normal = logits.log_softmax(-1)
            scores = logits.sigmoid() if self.kind == "sigmoid" else normal.exp()
            choice = (
                self._expert_choice(scores, lengths) if self.kind == "expert_choice" else self._top_k(scores, parts)
            )
            with nullcontext() if differentiable else torch.no_grad():
                probabilities = scores / scores.sum(-1, keepdim=True) if self.kind == "sigmoid" else scores
                partition = (logits - normal)[:, 0]
                sent = choice.weight.new_ones(()) if choice.kept is None else choice.kept.to(dtype)
                columns = (choice.expert, sent.expand_as(choice.expert), probabilities, partition)
                if len(parts) == 1:
                    return choice, _statistics(*columns).unsqueeze(0)
                each = zip(*(torch.split(column, lengths) for column in columns), strict=True)
                return choice, torch.stack([_statistics(*part) for part in each])

    def _top_k(self, scores: Tensor, parts: Sequence[Part]) -> Choice:
        if self.kind == "uniform":
            k, device = self.top_k, scores.device
            turns = [torch.arange(part.first * k, part.last * k, device=device) for part in parts]
            turn = turns[0] if len(turns) == 1 else torch.cat(turns)
            expert = turn.remainder_(self.num_experts).view(-1, k)
        else:
            ranked = scores.detach() if self.bias is None else scores.detach() + self.bias
            if self.num_groups > 1:
                ranked = self._within_groups(ranked)
            # a stable sort, so that ties go to the lowest expert on every device
            expert = ranked.argsort(dim=-1, descending=True, stable=True)[:, : self.top_k]
        weight = scores.gather(-1, expert)
        if self.normalize:
            weight = _Shares.apply(weight)  # type: ignore[no-untyped-call]
        return Choice(expert, weight if self.scale == 1.0 else weight * self.scale)

    def _within_groups(self, ranked: Tensor) -> Tensor:
        """Scores with ``-inf`` for the experts outside a token's best groups."""
        grouped: Tensor = ranked.unflatten(-1, (self.num_groups, -1))
        score = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
        best = score.argsort(dim=-1, descending=True, stable=True)[:, : self.num_chosen_groups]
        allowed = torch.zeros_like(score, dtype=torch.bool).scatter_(1, best, True)
        return grouped.masked_fill(~allowed.unsqueeze(-1), -math.inf).flatten(1)

    def _expert_choice(self, scores: Tensor, lengths: list[int]) -> Choice:
        """Every expert's best tokens, listed token by token; as wide as the busiest token's list."""
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        for part, mark in zip(torch.split(scores.detach(), lengths), torch.split(chosen, lengths), strict=True):
            most = capacity(len(part), self.top_k, self.num_experts, self.capacity_factor or 1.0)
            best = part.argsort(dim=0, descending=True, stable=True)[:most]
            mark.scatter_(0, best, True)
        width = int(chosen.sum(-1).max()) if len(scores) else 1
        expert = chosen.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[:, : max(width, 1)]
        return Choice(expert, scores.gather(-1, expert) * self.scale, kept=chosen.gather(-1, expert))

    def _noise(self, part: Part, seed: int, x: Tensor) -> Tensor:
        """The same for the same tokens on every rank: drawn for the whole stream up to the part's end."""
        generator = torch.Generator(x.device).manual_seed((seed + part.stream * 0x9E3779B97F4A7C15) % 2**63)
        noise = torch.empty((part.last, x.shape[1]), device=x.device, dtype=x.dtype)
        return noise.uniform_(1 - self.jitter, 1 + self.jitter, generator=generator)[part.first :]


def _statistics(expert: Tensor, sent: Tensor, probabilities: Tensor, partition: Tensor) -> Tensor:
    """Of one part, ``(2 E + 2,)``: choices ``(S, k)``, probabilities ``(S, E)``, log partition functions ``(S,)``."""
    load = probabilities.new_zeros(probabilities.shape[1]).scatter_add_(0, expert.flatten(), sent.flatten())
    squares = partition.square().sum(0, keepdim=True)
    return torch.cat([load, probabilities.sum(0), squares, squares.new_full((1,), len(partition))])


class _Shares(torch.autograd.Function):
    """Forward the last dim's shares of its sum; backward in as few operations."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        total = weight.sum(-1, keepdim=True).clamp_min_(torch.finfo(weight.dtype).tiny)
        shares = weight / total
        ctx.save_for_backward(shares, total)
        return shares

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        shares, total = ctx.saved_tensors
        of_weight: Tensor = (gradient - (gradient * shares).sum(-1, keepdim=True)).div_(total)
        return of_weight
