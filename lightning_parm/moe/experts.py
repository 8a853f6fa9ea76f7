"""This rank's shard of E experts, each a two-layer network, applied to rows sorted by expert in grouped products."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parm.moe.collectives import scale_gradient
from lightning_parm.moe.topology import Topology

Activation = Literal["swiglu", "gelu", "relu_squared"]
Prepare = Callable[[Tensor], Tensor]


class Experts(nn.Module):
    """E experts ``x -> act(x w_in^T + b_in) w_out^T + b_out`` in a few big parameters.

    Args:
        model_dim: M.
        hidden_dim: H.
        num_experts: E.
        activation: ``"swiglu"`` has G = 2 input matrices, gate and up; ``"gelu"`` and ``"relu_squared"`` one.
        bias: Whether both layers have one.
        device: Where the parameters are made.
        dtype: Their type.

    Attributes:
        w_in: ``(E, G, H, M)``, cut over ep in dim 0 and over esp in dim 2.
        w_out: ``(E, M, H)``, cut over ep in dim 0 and over esp in dim 2.
        b_in: ``(E, G, H)`` or ``None``, cut as ``w_in``.
        b_out: ``(E, M)`` or ``None``, cut over ep; every esp peer adds its share of it.

    Example:
        >>> experts = Experts(model_dim=4, hidden_dim=8, num_experts=2)
        >>> experts.reset_parameters(seed=0)
        >>> experts(torch.randn(5, 4), [2, 3]).shape
        torch.Size([5, 4])
    """

    def __init__(
        self,
        model_dim: int,
        hidden_dim: int,
        num_experts: int,
        activation: Activation = "swiglu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation={activation!r} is unknown; choose one of {', '.join(_ACTIVATIONS)}.")
        self.hidden_dim = hidden_dim
        self.activation = activation
        self.topology = Topology.local()
        matrices = 2 if activation == "swiglu" else 1

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.w_in = parameter(num_experts, matrices, hidden_dim, model_dim)
        self.w_out = parameter(num_experts, model_dim, hidden_dim)
        self.b_in = parameter(num_experts, matrices, hidden_dim) if bias else None
        self.b_out = parameter(num_experts, model_dim) if bias else None

    def placements(self) -> dict[str, tuple[int | None, int | None]]:
        """For every parameter the dim cut over ep and the dim cut over esp; ``None`` is not cut."""
        cuts: dict[str, tuple[int | None, int | None]] = {"w_in": (0, 2), "w_out": (0, 2)}
        return {**cuts, "b_in": (0, 2), "b_out": (0, None)} if self.b_in is not None else cuts

    def shard(self, topology: Topology) -> None:
        """Keep this rank's share of full parameters, which must be equal on all ranks (or on the meta device)."""
        for name, (expert_dim, hidden_dim) in self.placements().items():
            parameter = self.get_parameter(name)
            share = parameter.data.chunk(topology.expert_parallel_size, expert_dim or 0)[topology.expert_parallel_rank]
            if hidden_dim is not None:
                share = share.chunk(topology.expert_shard_size, hidden_dim)[topology.expert_shard_rank]
            parameter.data = share.clone()
        self.topology = topology

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Uniform in ``1/sqrt(fan in)``; expert e is drawn from ``seed + e``, so its weights depend on no topology.

        Until then the parameters are uninitialised.
        """
        first = self.topology.expert_parallel_rank * self.w_in.shape[0]
        bounds = {"w_in": self.w_in.shape[-1], "b_in": self.w_in.shape[-1]}
        for name, (_, hidden_dim) in self.placements().items():
            parameter = self.get_parameter(name)
            bound = 1 / math.sqrt(bounds.get(name, self.hidden_dim))
            shape = list(parameter.shape[1:])
            if hidden_dim is not None:
                shape[hidden_dim - 1] = self.hidden_dim
            for expert, weight in enumerate(parameter):
                generator = torch.Generator(parameter.device).manual_seed((seed + first + expert) % 2**63)
                full = torch.empty(shape, device=parameter.device, dtype=parameter.dtype)
                full.uniform_(-bound, bound, generator=generator)
                if hidden_dim is not None:
                    full = full.chunk(self.topology.expert_shard_size, hidden_dim - 1)[self.topology.expert_shard_rank]
                weight.copy_(full)

    def forward(self, rows: Tensor, per_expert: Sequence[int], prepare: Prepare | None = None) -> Tensor:
        """Apply the experts to their rows.

        Args:
            rows: ``(R, M)``, sorted by expert.
            per_expert: Rows of each local expert, R together.
            prepare: Applied to every parameter first; schedules correct gradients with it.

        Returns:
            ``(R, M)``; this esp peer's partial sums if the hidden dim is cut.
        """
        prepare = prepare or _as_it_is
        w_in, w_out = (prepare(weight).to(rows.dtype) for weight in (self.w_in, self.w_out))
        hidden = grouped_product(rows, w_in.flatten(1, 2), per_expert)
        if self.b_in is not None:
            hidden = hidden + _per_row(prepare(self.b_in).to(rows.dtype).flatten(1), per_expert)
        out = grouped_product(_ACTIVATIONS[self.activation](hidden), w_out, per_expert)
        if self.b_out is not None:
            shards = self.topology.expert_shard_size  # their sum has one bias; each sees the bias's whole gradient
            share = scale_gradient(prepare(self.b_out).to(rows.dtype) / shards, shards)
            out = out + _per_row(share, per_expert)
        return out


def _as_it_is(weight: Tensor) -> Tensor:
    return weight


class _SwiGLU(torch.autograd.Function):
    """Forward ``silu(gate) * up``; backward into one buffer, keeping only the input."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        gate, up = hidden.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (hidden,) = ctx.saved_tensors
        gate, up = hidden.chunk(2, -1)
        result = torch.empty_like(hidden)
        of_gate, of_up = result.chunk(2, -1)
        torch.mul(F.silu(gate), gradient, out=of_up)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=of_gate)
        return result


def _swiglu(hidden: Tensor) -> Tensor:
    result: Tensor = _SwiGLU.apply(hidden)  # type: ignore[no-untyped-call]
    return result


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": _swiglu,
    "gelu": F.gelu,
    "relu_squared": lambda hidden: F.relu(hidden).square(),
}


def grouped_product(rows: Tensor, weight: Tensor, per_expert: Sequence[int]) -> Tensor:
    """Each expert's rows times its matrix: ``(R, K)`` and ``(E, N, K)`` -> ``(R, N)``.

    One kernel where torch has one for the device and type, otherwise one product per expert; never one per token, and
    never padded to the longest expert.

    Example:
        >>> weight = torch.tensor([[[2.0]], [[3.0]]])
        >>> grouped_product(torch.ones(3, 1), weight, [1, 2]).flatten()
        tensor([2., 3., 3.])
    """
    product = _GroupedKernel if _has_kernel(rows, weight) else _SegmentedProduct
    out: Tensor = product.apply(rows, weight, per_expert)  # type: ignore[no-untyped-call]
    return out


def _has_kernel(rows: Tensor, weight: Tensor) -> bool:
    """``grouped_mm`` needs a GPU with bfloat16 tensor cores, and rows of all factors at multiples of 16 bytes."""
    return (
        rows.is_cuda
        and rows.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(rows.device) >= (8, 0)
        and weight.shape[1] % 8 == weight.shape[2] % 8 == 0
        and rows.shape[0] > 0
    )


class _GroupedKernel(torch.autograd.Function):
    """Forward and backward as :class:`_SegmentedProduct`, all experts in one ``grouped_mm`` each."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, per_expert: Sequence[int]) -> Tensor:
        ends = torch.tensor([*accumulate(per_expert)], dtype=torch.int32).to(rows.device, non_blocking=True)
        ctx.save_for_backward(rows, weight, ends)
        ctx.idle = [expert for expert, count in enumerate(per_expert) if not count]
        return F.grouped_mm(rows, weight.mT, offs=ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        row_gradient = F.grouped_mm(gradient, weight, offs=ends) if ctx.needs_input_grad[0] else None
        weight_gradient = None
        if ctx.needs_input_grad[1]:
            weight_gradient = F.grouped_mm(gradient.t(), rows, offs=ends)
            for expert in ctx.idle:  # no kernel promises to write the product of nothing
                weight_gradient[expert].zero_()
        return row_gradient, weight_gradient, None


class _SegmentedProduct(torch.autograd.Function):
    """Forward ``rows[segment] @ weight[e]^T``; backward both factors' gradients, zero for an expert without rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, per_expert: Sequence[int]) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.segments = _segments(per_expert)
        out = rows.new_empty((rows.shape[0], weight.shape[1]))
        for (first, last), matrix in zip(ctx.segments, weight, strict=True):
            torch.mm(rows[first:last], matrix.t(), out=out[first:last])
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        row_gradient = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        weight_gradient = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for expert, (first, last) in enumerate(ctx.segments):
            if row_gradient is not None:
                torch.mm(gradient[first:last], weight[expert], out=row_gradient[first:last])
            if weight_gradient is not None:
                torch.mm(gradient[first:last].t(), rows[first:last], out=weight_gradient[expert])
        return row_gradient, weight_gradient, None


def _segments(per_expert: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise([0, *accumulate(per_expert)]))


def _per_row(bias: Tensor, per_expert: Sequence[int]) -> Tensor:
    repeats = torch.tensor(per_expert, dtype=torch.int64).to(bias.device, non_blocking=True)
    return bias.repeat_interleave(repeats, dim=0, output_size=sum(per_expert))
