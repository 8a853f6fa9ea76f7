"""The dense float64 reference: every expert on every token, one token at a time, and the losses by their formulas."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_parm.moe.layer import MoE
from lightning_parm.moe.topology import Topology

ACTIVATIONS = {
    "swiglu": lambda h: F.silu(h[:, 0]) * h[:, 1],
    "gelu": lambda h: F.gelu(h[:, 0]),
    "relu_squared": lambda h: F.relu(h[:, 0]) ** 2,
}


def full_layer(seed: int = 0, dtype: torch.dtype = torch.float64, **kwargs: object) -> MoE:
    """A layer whose every parameter, biases included, is random; equal in every process."""
    layer = MoE(**kwargs, dtype=dtype)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
        if layer.router.bias is not None:
            layer.router.bias.copy_(torch.linspace(-0.3, 0.3, layer.num_experts))
    return layer


def batch(stream: int, count: int, dim: int) -> tuple[Tensor, Tensor]:
    """Tokens of one data-parallel rank, and the gradient of its loss with respect to the output."""
    generator = torch.Generator().manual_seed(1000 + stream)
    x, gradient = torch.randn(2, count, dim, generator=generator, dtype=torch.float64)
    return x.clone(), gradient.clone()


def cuts(total: int, parts: int) -> list[tuple[int, int]]:
    """The ranges into which tokens are split over mp: as even as possible, longer ones spread first."""
    return list(pairwise(math.ceil(part * total / parts) for part in range(parts + 1)))


def choose(layer: MoE, x: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """``(S, E)`` bool of the chosen experts before dropping, and ``(S, E)`` weights of the kept ones.

    ``first`` is the number of the first token, which the uniform router counts from.
    """
    router, k, num_experts = layer.router, layer.top_k, layer.num_experts
    logits = x @ router.weight.T
    scores = torch.sigmoid(logits) if router.kind == "sigmoid" else torch.softmax(logits, -1)
    chosen = torch.zeros(len(x), num_experts, dtype=torch.bool)
    if router.kind == "expert_choice":
        most = math.ceil((layer.capacity_factor or 1.0) * k * len(x) / num_experts - 1e-9)
        for e in range(num_experts):
            for s in sorted(range(len(x)), key=lambda s: -scores[s, e].item())[:most]:
                chosen[s, e] = True
        return chosen, scores * chosen
    for s, row in enumerate(scores.tolist()):
        if router.bias is not None:
            row = [value + shift for value, shift in zip(row, router.bias.tolist(), strict=True)]
        size = num_experts // router.num_groups
        groups = [range(g * size, (g + 1) * size) for g in range(router.num_groups)]
        groups.sort(key=lambda group: -sum(sorted((row[e] for e in group), reverse=True)[:2]))
        allowed = [e for group in groups[: router.num_chosen_groups] for e in group]
        best = sorted(allowed, key=lambda e: (-row[e], e))[:k]
        if router.kind == "uniform":
            best = [((first + s) * k + j) % num_experts for j in range(k)]
        chosen[s, best] = True
    weight = scores * chosen
    if router.normalize:
        weight = weight / weight.sum(-1, keepdim=True)
    weight = weight * router.scale
    kept = chosen.clone()
    if layer.capacity_factor is not None:
        most = math.ceil(layer.capacity_factor * k * len(x) / num_experts - 1e-9)
        for e in range(num_experts):
            queue = [s for s in range(len(x)) if chosen[s, e]]
            if layer.drop_policy == "probability":
                queue.sort(key=lambda s: (-weight[s, e].item(), s))
            kept[queue[most:], e] = False
    return chosen, weight * kept


def network(experts: torch.nn.Module, expert: int, x: Tensor) -> Tensor:
    """One expert on all tokens, by einsum."""
    hidden = torch.einsum("sm,ghm->sgh", x, experts.w_in[expert])
    if experts.b_in is not None:
        hidden = hidden + experts.b_in[expert]
    out = ACTIVATIONS[experts.activation](hidden) @ experts.w_out[expert].T
    return out if experts.b_out is None else out + experts.b_out[expert]


def dense(layer: MoE, x: Tensor, parts: int = 1) -> tuple[Tensor, Tensor]:
    """Output for tokens ``(S, M)`` and the choices of each expert, when each of ``parts`` ranges is routed alone."""
    starts = [0] * parts if layer.sequence_parallel else [first for first, _ in cuts(len(x), parts)]
    done = [choose(layer, x[a:b], start) for (a, b), start in zip(cuts(len(x), parts), starts, strict=True)]
    chosen, weight = (torch.cat(each) for each in zip(*done, strict=True))
    y = sum(weight[:, [e]] * network(layer.experts, e, x) for e in range(layer.num_experts))
    if layer.shared_experts is not None:
        y = y + network(layer.shared_experts, 0, x)
    return y, chosen.sum(0).to(x.dtype)


def auxiliary(layer: MoE, x: Tensor, load: Tensor) -> Tensor:
    """Balance loss and z-loss of tokens ``(S, M)``, with the load ``(E,)`` of the scope."""
    logits = x @ layer.router.weight.T
    scores = torch.sigmoid(logits) if layer.router.kind == "sigmoid" else torch.softmax(logits, -1)
    count = max(len(x), 1)
    probability = (scores / scores.sum(-1, keepdim=True)).sum(0) / count
    balance = layer.num_experts * (load / max(load.sum().item(), 1.0) * probability).sum()
    z = (torch.logsumexp(logits, -1) ** 2).sum() / count
    return layer.balance_loss_weight * balance + layer.z_loss_weight * z


def shard(full: Tensor, dims: tuple[int | None, int | None], topology: Topology) -> Tensor:
    """This rank's part of a full expert parameter (or of its gradient)."""
    for dim, axis in zip(dims, ("expert_parallel", "expert_shard"), strict=True):
        if dim is not None:
            full = full.chunk(topology.size(axis), dim)[getattr(topology, f"{axis}_rank")]
    return full
