"""This rank's shard of E experts, each a two-layer network, applied to rows sorted by expert in grouped products."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parm.moe.collectives import first_order, scale_gradient
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
        weights = _Weights(w_in.flatten(1, 2), w_out, b_in, b_out)
        apply = _grouped if _has_kernel(rows, weights.w_in) else _one_by_one
        return apply(rows, weights, per_expert, self.activation)


def _as_it_is(weight: Tensor) -> Tensor:
    return weight


class _Activation(NamedTuple):
    """A function and its backward, both into tensors that are there already, so that experts can share them.

    Attributes:
        forward: ``(hidden, out)``.
        backward: ``(gradient, hidden, out, activated)``; what :attr:`forward` gave is computed again into
            ``activated``, where that is wanted, so that nothing but ``hidden`` is ever kept.
    """

    forward: Callable[[Tensor, Tensor], object]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor | None], object]


def _swiglu(hidden: Tensor, out: Tensor) -> None:
    gate, up = hidden.chunk(2, -1)
    torch.ops.aten.silu(gate, out=out)
    out *= up


def _swiglu_backward(gradient: Tensor, hidden: Tensor, out: Tensor, activated: Tensor | None) -> None:
    gate, up = hidden.chunk(2, -1)
    of_gate, of_up = out.chunk(2, -1)
    torch.ops.aten.silu(gate, out=of_up)
    if activated is not None:
        torch.mul(of_up, up, out=activated)
    of_up *= gradient
    torch.mul(gradient, up, out=of_gate)
    torch.ops.aten.silu_backward(of_gate, gate, grad_input=of_gate)


def _gelu(hidden: Tensor, out: Tensor) -> None:
    torch.ops.aten.gelu(hidden, out=out)


def _gelu_backward(gradient: Tensor, hidden: Tensor, out: Tensor, activated: Tensor | None) -> None:
    if activated is not None:
        _gelu(hidden, activated)
    torch.ops.aten.gelu_backward(gradient, hidden, grad_input=out)


def _relu_squared(hidden: Tensor, out: Tensor) -> None:
    torch.clamp_min(hidden, 0, out=out).square_()


def _relu_squared_backward(gradient: Tensor, hidden: Tensor, out: Tensor, activated: Tensor | None) -> None:
    torch.clamp_min(hidden, 0, out=out)
    if activated is not None:
        torch.mul(out, out, out=activated)
    out *= gradient
    out *= 2


_ACTIVATIONS = {
    "swiglu": _Activation(_swiglu, _swiglu_backward),
    "gelu": _Activation(_gelu, _gelu_backward),
    "relu_squared": _Activation(_relu_squared, _relu_squared_backward),
}


class _Activate(torch.autograd.Function):
    """Forward an activation; backward its own, keeping only the input."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, width: int, activation: str) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.activation = _ACTIVATIONS[activation]
        out = hidden.new_empty(len(hidden), width)
        ctx.activation.forward(hidden, out)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (hidden,) = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden)
        ctx.activation.backward(gradient, hidden, of_hidden, None)
        return of_hidden, None, None


class _Weights(NamedTuple):
    """What is applied to the rows, in their type: ``(E, G*H, M)``, ``(E, M, H)``, ``(E, G*H)`` and ``(E, M)``."""

    w_in: Tensor
    w_out: Tensor
    b_in: Tensor | None
    b_out: Tensor | None


def _grouped(rows: Tensor, weights: _Weights, per_expert: Sequence[int], activation: str) -> Tensor:
    """All experts at once, in two grouped kernels."""
    w_in, w_out, b_in, b_out = weights
    # contiguous, for the shared experts' rows are the user's own, and the kernel does not take any strides
    hidden: Tensor = _GroupedKernel.apply(rows.contiguous(), w_in, per_expert)  # type: ignore[no-untyped-call]
    if b_in is not None:
        hidden = hidden + _per_row(b_in, per_expert)
    hidden = _Activate.apply(hidden, w_out.shape[2], activation)  # type: ignore[no-untyped-call]
    out: Tensor = _GroupedKernel.apply(hidden, w_out, per_expert)  # type: ignore[no-untyped-call]
    return out if b_out is None else out + _per_row(b_out, per_expert)


def _one_by_one(rows: Tensor, weights: _Weights, per_expert: Sequence[int], activation: str) -> Tensor:
    """One expert after the other, so that what lies between its two products stays small and near."""
    out: Tensor = _OneByOne.apply(rows, per_expert, activation, *weights)  # type: ignore[no-untyped-call]
    return out


def _has_kernel(rows: Tensor, weight: Tensor) -> bool:
    """``grouped_mm`` needs a GPU with bfloat16 tensor cores."""
    return rows.is_cuda and _fits_kernel(rows, weight) and torch.cuda.get_device_capability(rows.device) >= (8, 0)


def _fits_kernel(rows: Tensor, weight: Tensor) -> bool:
    """It takes bfloat16 only, and rows of all factors that start at multiples of 16 bytes."""
    return rows.dtype == torch.bfloat16 and weight.shape[1] % 8 == weight.shape[2] % 8 == 0 and rows.shape[0] > 0


class _GroupedKernel(torch.autograd.Function):
    """Forward ``rows[segment] @ weight[e]^T`` of all experts in one kernel; backward both gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, per_expert: Sequence[int]) -> Tensor:
        ends = torch.tensor([*accumulate(per_expert)], dtype=torch.int32).to(rows.device, non_blocking=True)
        ctx.save_for_backward(rows, weight, ends)
        ctx.idle = [expert for expert, count in enumerate(per_expert) if not count]
        return F.grouped_mm(rows, weight.mT, offs=ends)

    @staticmethod
    @first_order
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

    An expert without rows has zero gradients. What all experts need for a moment is allocated once: the system hands
    out memory in zeroed pages, which takes longer than an activation.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, per_expert: Sequence[int], activation: str, *weights: Tensor | None) -> Tensor:
        w_in, w_out, b_in, b_out = _Weights(*weights)  # type: ignore[arg-type]
        ctx.segments, ctx.activation = _segments(per_expert), _ACTIVATIONS[activation]
        out = torch.empty_like(rows)
        hidden = [rows.new_empty(count, w_in.shape[1]) for count in per_expert]
        scratch = rows.new_empty(max(per_expert), w_out.shape[2])
        for expert, ((first, last), inner) in enumerate(zip(ctx.segments, hidden, strict=True)):
            activated = scratch[: last - first]
            torch.mm(rows[first:last], w_in[expert].t(), out=inner)
            if b_in is not None:
                inner += b_in[expert]
            ctx.activation.forward(inner, activated)
            torch.mm(activated, w_out[expert].t(), out=out[first:last])
            if b_out is not None:
                out[first:last] += b_out[expert]
        ctx.save_for_backward(rows, w_in, w_out, *hidden)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, w_in, w_out, *hidden = ctx.saved_tensors
        needed = (ctx.needs_input_grad[0], *ctx.needs_input_grad[3:])
        shapes = (rows.shape, w_in.shape, w_out.shape, w_in.shape[:2], w_out.shape[:2])
        of_rows, of_w_in, of_w_out, of_b_in, of_b_out = (
            rows.new_empty(shape) if need else None for shape, need in zip(shapes, needed, strict=True)
        )
        longest = max(last - first for first, last in ctx.segments)
        scratch = [rows.new_empty(longest, width) for width in (w_out.shape[2], w_out.shape[2], w_in.shape[1])]
        for expert, ((first, last), inner) in enumerate(zip(ctx.segments, hidden, strict=True)):
            own = gradient[first:last]
            activated, of_activated, of_inner = (each[: last - first] for each in scratch)
            torch.mm(own, w_out[expert], out=of_activated)
            ctx.activation.backward(of_activated, inner, of_inner, activated)
            if of_w_out is not None:
                torch.mm(own.t(), activated, out=of_w_out[expert])
            if of_w_in is not None:
                torch.mm(of_inner.t(), rows[first:last], out=of_w_in[expert])
            if of_rows is not None:
                torch.mm(of_inner, w_in[expert], out=of_rows[first:last])
            if of_b_in is not None:
                torch.sum(of_inner, 0, out=of_b_in[expert])
            if of_b_out is not None:
                torch.sum(own, 0, out=of_b_out[expert])
        return of_rows, None, None, of_w_in, of_w_out, of_b_in, of_b_out


def _segments(per_expert: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise([0, *accumulate(per_expert)]))


def _per_row(bias: Tensor, per_expert: Sequence[int]) -> Tensor:
    repeats = torch.tensor(per_expert, dtype=torch.int64).to(bias.device, non_blocking=True)
    return bias.repeat_interleave(repeats, dim=0, output_size=sum(per_expert))
