"""The dense float64 reference: every expert on every token, weighted; and a layer made to hold given weights."""

from __future__ import annotations

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


def full_layer(seed: int = 0, **kwargs: object) -> MoE:
    """A float64 layer whose every parameter, biases included, is random; equal in every process."""
    layer = MoE(**kwargs, dtype=torch.float64)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return layer


def network(experts: torch.nn.Module, expert: int, x: Tensor) -> Tensor:
    """One expert on all tokens, by einsum."""
    hidden = torch.einsum("sm,ghm->sgh", x, experts.w_in[expert])
    if experts.b_in is not None:
        hidden = hidden + experts.b_in[expert]
    out = ACTIVATIONS[experts.activation](hidden) @ experts.w_out[expert].T
    return out if experts.b_out is None else out + experts.b_out[expert]


def gates(layer: MoE, x: Tensor) -> Tensor:
    """``(S, E)``: how much every expert counts for every token."""
    probabilities = (x @ layer.router.weight.T).softmax(-1)
    best = probabilities.topk(layer.top_k, -1)
    weight = best.values / best.values.sum(-1, keepdim=True)
    return torch.zeros_like(probabilities).scatter(1, best.indices, weight)


def dense(layer: MoE, x: Tensor) -> Tensor:
    """Output for tokens ``(S, M)`` when nothing is dropped."""
    gate = gates(layer, x)
    y = sum(gate[:, [e]] * network(layer.experts, e, x) for e in range(layer.num_experts))
    return y if layer.shared_experts is None else y + network(layer.shared_experts, 0, x)


def tokens(seed: int, count: int, dim: int) -> tuple[Tensor, Tensor]:
    """Tokens of one data-parallel rank, and the gradient of its loss with respect to the output."""
    generator = torch.Generator().manual_seed(1000 + seed)
    x, gradient = torch.randn(2, count, dim, generator=generator, dtype=torch.float64)
    return x.clone(), gradient.clone()


def shard(full: Tensor, dims: tuple[int | None, int | None], topology: Topology) -> Tensor:
    """This rank's part of a full expert parameter (or of its gradient)."""
    for dim, axis in zip(dims, ("expert_parallel", "expert_shard"), strict=True):
        if dim is not None:
            full = full.chunk(topology.size(axis), dim)[getattr(topology, f"{axis}_rank")]
    return full
