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
        b_in = b_out = None
        if self.b_in is not None and self.b_out is not None:
            shards = self.topology.expert_shard_size  # their sum has one bias; each sees the bias's whole gradient
            b_in = prepare(self.b_in).to(rows.dtype).flatten(1)
            b_out = scale_gradient(prepare(self.b_out).to(rows.dtype) / shards, shards)
        w_in = w_in.flatten(1, 2)
        apply = _grouped if _has_kernel(rows, w_in) else _one_by_one
        return apply(rows, w_in, w_out, b_in, b_out, per_expert, self.activation)


def _as_it_is(weight: Tensor) -> Tensor:
    return weight


def _swiglu(hidden: Tensor) -> Tensor:
    gate, up = hidden.chunk(2, -1)
    return F.silu(gate).mul_(up)


def _swiglu_backward(gradient: Tensor, hidden: Tensor) -> Tensor:
    """Into one buffer, with ``silu(gate)`` recomputed, so that only ``hidden`` was kept."""
    gate, up = hidden.chunk(2, -1)
    result = torch.empty_like(hidden)
    of_gate, of_up = result.chunk(2, -1)
    torch.mul(F.silu(gate), gradient, out=of_up)
    torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=of_gate)
    return result


#: Each with its backward, ``(gradient, input) -> gradient of the input``.
_ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "swiglu": (_swiglu, _swiglu_backward),
    "gelu": (F.gelu, torch.ops.aten.gelu_backward),
    "relu_squared": (lambda hidden: F.relu(hidden).square_(), lambda gradient, hidden: gradient * F.relu(hidden) * 2),
}


class _Activate(torch.autograd.Function):
    """Forward an activation; backward its own, keeping only the input."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.activation = activation
        return _ACTIVATIONS[activation][0](hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _ACTIVATIONS[ctx.activation][1](gradient.contiguous(), *ctx.saved_tensors), None


def _grouped(
    rows: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    b_in: Tensor | None,
    b_out: Tensor | None,
    per_expert: Sequence[int],
    activation: str,
) -> Tensor:
    """All experts at once, in two grouped kernels."""
    hidden: Tensor = _GroupedKernel.apply(rows, w_in, per_expert)  # type: ignore[no-untyped-call]
    if b_in is not None:
        hidden = hidden + _per_row(b_in, per_expert)
    hidden = _Activate.apply(hidden, activation)  # type: ignore[no-untyped-call]
    out: Tensor = _GroupedKernel.apply(hidden, w_out, per_expert)  # type: ignore[no-untyped-call]
    return out if b_out is None else out + _per_row(b_out, per_expert)


def _one_by_one(
    rows: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    b_in: Tensor | None,
    b_out: Tensor | None,
    per_expert: Sequence[int],
    activation: str,
) -> Tensor:
    """One expert after the other, so that what lies between its two products stays small and near."""
    out: Tensor = _OneByOne.apply(rows, w_in, w_out, b_in, b_out, per_expert, activation)  # type: ignore[no-untyped-call]
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
    """Forward ``rows[segment] @ weight[e]^T`` of all experts in one kernel; backward both gradients."""

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


class _OneByOne(torch.autograd.Function):
    """Forward ``act(rows w_in^T + b_in) w_out^T + b_out`` by expert; backward all gradients, each written once.

    An expert without rows has zero gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        w_in: Tensor,
        w_out: Tensor,
        b_in: Tensor | None,
        b_out: Tensor | None,
        per_expert: Sequence[int],
        activation: str,
    ) -> Tensor:
        ctx.segments, ctx.activation = _segments(per_expert), activation
        out = torch.empty_like(rows)
        hidden = []
        for expert, (first, last) in enumerate(ctx.segments):
            inner = rows.new_empty(last - first, w_in.shape[1])
            torch.mm(rows[first:last], w_in[expert].t(), out=inner)
            if b_in is not None:
                inner += b_in[expert]
            torch.mm(_ACTIVATIONS[activation][0](inner), w_out[expert].t(), out=out[first:last])
            if b_out is not None:
                out[first:last] += b_out[expert]
            hidden.append(inner)
        ctx.save_for_backward(rows, w_in, w_out, *hidden)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, w_in, w_out, *hidden = ctx.saved_tensors
        of_rows, of_w_in, of_w_out = (
            torch.empty_like(tensor) if needed else None
            for tensor, needed in zip((rows, w_in, w_out), ctx.needs_input_grad, strict=False)
        )
        of_b_in = rows.new_empty(w_in.shape[:2]) if ctx.needs_input_grad[3] else None
        of_b_out = rows.new_empty(w_out.shape[:2]) if ctx.needs_input_grad[4] else None
        forward, backward = _ACTIVATIONS[ctx.activation]
        for expert, ((first, last), inner) in enumerate(zip(ctx.segments, hidden, strict=True)):
            own = gradient[first:last]
            if of_w_out is not None:
                torch.mm(own.t(), forward(inner), out=of_w_out[expert])
            of_inner = backward(torch.mm(own, w_out[expert]), inner)
            if of_w_in is not None:
                torch.mm(of_inner.t(), rows[first:last], out=of_w_in[expert])
            if of_rows is not None:
                torch.mm(of_inner, w_in[expert], out=of_rows[first:last])
            if of_b_in is not None:
                torch.sum(of_inner, 0, out=of_b_in[expert])
            if of_b_out is not None:
                torch.sum(own, 0, out=of_b_out[expert])
        return of_rows, of_w_in, of_w_out, of_b_in, of_b_out, None, None


def _segments(per_expert: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise([0, *accumulate(per_expert)]))


def _per_row(bias: Tensor, per_expert: Sequence[int]) -> Tensor:
    repeats = torch.tensor(per_expert, dtype=torch.int64).to(bias.device, non_blocking=True)
    return bias.repeat_interleave(repeats, dim=0, output_size=sum(per_expert))
