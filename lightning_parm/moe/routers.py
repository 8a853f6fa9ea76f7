"""Routers (the paper's gate): which experts each token goes to, and what that costs in balance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parm.moe.experts import Prepare
from lightning_parm.moe.routing import Choice

RouterKind = Literal["softmax"]


class Router(nn.Module):
    """Scores every expert for every token, in float32 whatever the precision around it, and picks the best k.

    Args:
        model_dim: M.
        num_experts: E.
        top_k: k, experts per token.
        kind: How scores become choices.
        normalize: Whether a token's k weights are scaled to sum to 1.
        device: Where the parameters are made.
        dtype: Their type.

    Example:
        >>> choice, _ = Router(model_dim=4, num_experts=3, top_k=2)(torch.randn(5, 4))
        >>> choice.expert.shape, torch.allclose(choice.weight.sum(-1), torch.ones(5))
        (torch.Size([5, 2]), True)
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        top_k: int,
        kind: RouterKind = "softmax",
        normalize: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k={top_k} must be between 1 and num_experts={num_experts}.")
        self.num_experts = num_experts
        self.top_k = top_k
        self.normalize = normalize
        self.weight = nn.Parameter(torch.empty(num_experts, model_dim, device=device, dtype=dtype))
        self.reset_parameters(torch.initial_seed())

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Uniform in ``1/sqrt(M)``, as ``torch.nn.Linear``."""
        if self.weight.device.type != "meta":
            bound = 1 / math.sqrt(self.weight.shape[1])
            self.weight.uniform_(-bound, bound, generator=torch.Generator(self.weight.device).manual_seed(seed))

    def forward(
        self, x: Tensor, prepare: Prepare | None = None, segments: Sequence[int] | None = None
    ) -> tuple[Choice, Tensor]:
        """Choose experts.

        Args:
            x: ``(S, M)``.
            prepare: Applied to the weight first; schedules correct its gradient with it.
            segments: Lengths of the parts of the tokens over which the statistics are taken; all of them by default.

        Returns:
            The choice, and statistics ``(segments, 2 E + 2)``: per expert the tokens that chose it and the sum of its
            probabilities, then the sum of squared log partition functions and the number of tokens.
        """
        weight = self.weight if prepare is None else prepare(self.weight)
        with torch.autocast(x.device.type, enabled=False):
            dtype = torch.promote_types(x.dtype, torch.float32)
            logits = F.linear(x.to(dtype), weight.to(dtype))
            probabilities = logits.softmax(-1)
            # a stable sort, so that ties go to the lowest expert on every device
            expert = probabilities.argsort(dim=-1, descending=True, stable=True)[:, : self.top_k]
            share = probabilities.gather(-1, expert)
            if self.normalize:
                share = share / share.sum(-1, keepdim=True)
            load = torch.zeros_like(probabilities).scatter_(1, expert, 1.0)
            squares = logits.logsumexp(-1, keepdim=True).square()
            each = torch.cat([load, probabilities, squares, torch.ones_like(squares)], -1)
            return Choice(expert, share), torch.stack(
                [part.sum(0) for part in torch.split(each, list(segments or [len(x)]))]
            )
