"""Gradients across ranks: averaged in buckets while backward still runs, and their global norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parm.moe.topology import Axis
from lightning_parm.parallel.placement import ParameterPlacement


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _as_placed(grad: Tensor, parameter: nn.Parameter) -> Tensor:
    """``grad`` placed like its parameter: a partial one, of a norm on a cut sequence, is summed over its own mesh."""
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
        return grad.redistribute(parameter.device_mesh, parameter.placements)
    return grad


class _Bucket:
    """Parameters whose gradients travel together: one flat buffer, and a flag a parameter that says it was used.

    Views into the buffer become the gradients, so nothing is copied back.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.parameters = parameters
        self.group = group
        shards = [_local(parameter) for parameter in parameters]
        sizes = [shard.numel() for shard in shards]
        self.flat = torch.zeros(sum(sizes) + len(sizes), dtype=shards[0].dtype, device=shards[0].device)
        self.views = [
            part.view(shard.shape) for part, shard in zip(self.flat[: sum(sizes)].split(sizes), shards, strict=True)
        ]
        self.used = self.flat[sum(sizes) :]
        self.work: Any = None
        self.reset()

    def reset(self) -> None:
        self.work = None
        self.ready = [False] * len(self.parameters)
        self.num_missing = len(self.parameters)

    def fill(self, index: int) -> None:
        """Move the gradient of one parameter into the buffer."""
        parameter, view = self.parameters[index], self.views[index]
        grad = parameter.grad
        assert grad is not None
        shard = _local(_as_placed(grad, parameter))
        if shard.data_ptr() != view.data_ptr():
            view.copy_(shard)
        if isinstance(parameter, DTensor):
            parameter.grad = DTensor.from_local(
                view,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        else:
            parameter.grad = view
        self.num_missing -= not self.ready[index]
        self.ready[index] = True

    def launch(self) -> None:
        """Start the average; a parameter without a gradient here counts as zeros."""
        self.used.fill_(1.0)
        for index, ready in enumerate(self.ready):
            if not ready:
                self.views[index].zero_()
                self.used[index] = 0.0
        self.flat.mul_(1.0 / self.group.size())  # before the sum, as DistributedDataParallel does: bf16 keeps its range
        self.work = dist.all_reduce(self.flat, group=self.group, async_op=True)

    def wait(self) -> None:
        """Finish the average. A parameter that no rank used keeps ``grad=None``, as in a one-process run."""
        self.work.wait()
        unused = [index for index, ready in enumerate(self.ready) if not ready]
        if unused:  # the only case that reads values back from the device
            used_somewhere = self.used.tolist()
            for index in unused:
                if used_somewhere[index] > 0:
                    self.parameters[index].grad = torch.zeros_like(self.parameters[index])
                    _local(self.parameters[index].grad).copy_(self.views[index])  # type: ignore[arg-type]
        self.reset()


class GradientReducer:
    """Averages gradients over the group of each parameter, in buckets, while backward still runs.

    Buckets hold parameters of one group and data type in reverse order of definition, the order in which backward
    tends to reach them, and are launched strictly in that order on every rank, whatever order gradients arrive in.

    Args:
        parameters: ``(parameter, placement)`` in an order that is the same on all ranks.
        group_of: Gives the process group along an axis; None for a group of one rank.
        bucket_size_bytes: Size at which a bucket is closed.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[nn.Parameter, ParameterPlacement]],
        group_of: Callable[[Axis], dist.ProcessGroup | None],
        bucket_size_bytes: int = 25 * 2**20,
    ) -> None:
        self._handles: list[Any] = []
        self._buckets: list[_Bucket] = []
        self._alone: list[nn.Parameter] = []
        self._active = False
        self._next = 0
        opened: dict[tuple[Axis, torch.dtype, torch.device], list[nn.Parameter]] = {}
        closed: list[tuple[Axis, list[nn.Parameter]]] = []
        for parameter, placement in reversed(list(parameters)):
            if not parameter.requires_grad:
                continue
            if placement.gradient_scale != 1.0:
                scale = placement.gradient_scale
                self._handles.append(parameter.register_hook(lambda grad, scale=scale: grad * scale))
            axis = placement.reduce_axis
            if axis is None or group_of(axis) is None:
                if isinstance(parameter, DTensor):
                    self._alone.append(parameter)
                continue
            shard = _local(parameter)
            key = (axis, shard.dtype, shard.device)
            opened.setdefault(key, []).append(parameter)
            if sum(_local(p).numel() for p in opened[key]) * shard.element_size() >= bucket_size_bytes:
                closed.append((axis, opened.pop(key)))
        closed.extend((key[0], bucket) for key, bucket in opened.items())
        for axis, members in closed:
            group = group_of(axis)
            assert group is not None
            bucket = _Bucket(members, group)
            self._buckets.append(bucket)
            for index, parameter in enumerate(members):
                self._handles.append(
                    parameter.register_post_accumulate_grad_hook(
                        lambda _, bucket=bucket, index=index: self._on_gradient(bucket, index)
                    )
                )

    def _on_gradient(self, bucket: _Bucket, index: int) -> None:
        if not self._active:
            return
        if bucket.work is not None:
            raise RuntimeError(
                f"A parameter of shape {tuple(bucket.parameters[index].shape)} received a second gradient in one "
                "backward pass after its average had started, so it would be wrong. Use torch.utils.checkpoint with "
                "use_reentrant=False, or share the parameter within one checkpointed segment only."
            )
        bucket.fill(index)
        while self._next < len(self._buckets) and not self._buckets[self._next].num_missing:
            self._buckets[self._next].launch()
            self._next += 1

    def start(self) -> None:
        """Call before a backward pass whose gradients are to be averaged."""
        for bucket in self._buckets:
            bucket.reset()
        self._next = 0
        self._active = True

    def finish(self) -> None:
        """Launch the buckets that backward did not fill, and wait for all."""
        self._active = False
        for bucket in self._buckets[self._next :]:
            for index, parameter in enumerate(bucket.parameters):
                if not bucket.ready[index] and parameter.grad is not None:
                    bucket.fill(index)  # accumulated by an earlier backward pass only
            bucket.launch()
        for bucket in self._buckets:
            bucket.wait()
        for parameter in self._alone:
            if parameter.grad is not None:
                parameter.grad = _as_placed(parameter.grad, parameter)

    def remove(self) -> None:
        """Take all hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._buckets.clear()
        self._alone.clear()


def global_norm(
    parameters: Iterable[tuple[nn.Parameter, ParameterPlacement]], norm_type: float = 2.0, device: Any = "cpu"
) -> Tensor:
    """Norm of all gradients of the whole model, the same on every rank: one all-reduce of one number.

    Each rank counts a gradient by the share that it holds of it: values that ``num_copies`` ranks hold count
    1/``num_copies`` each, so shards are counted once and replicas are not counted again.

    Args:
        parameters: ``(parameter, placement)`` of this rank.
        norm_type: Order of the norm; ``float("inf")`` for the largest absolute value.
        device: Device of the result.

    Returns:
        A 0-dim float32 tensor, float64 where all gradients are.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for parameter, placement in parameters:
        if parameter.grad is not None:
            by_copies.setdefault(placement.num_copies, []).append(_local(parameter.grad))
    grads = [grad for members in by_copies.values() for grad in members]
    wide = torch.float64 if grads and all(grad.dtype == torch.float64 for grad in grads) else torch.float32
    infinite = norm_type == float("inf")
    total = torch.zeros((), dtype=wide, device=device)
    for copies, members in by_copies.items():
        norms = torch.stack([torch.linalg.vector_norm(grad, norm_type, dtype=wide) for grad in members])
        total = torch.maximum(total, norms.max()) if infinite else total + norms.pow(norm_type).sum() / copies
    if dist.is_initialized():
        dist.all_reduce(total, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM)
    return total if infinite else total.pow(1.0 / norm_type)


def clip_by_global_norm(
    parameters: Sequence[tuple[nn.Parameter, ParameterPlacement]],
    max_norm: float,
    norm_type: float = 2.0,
    device: Any = "cpu",
) -> Tensor:
    """Scale all gradients by one factor, the same on every rank, so that their global norm is at most ``max_norm``.

    Returns:
        The norm before clipping, 0-dim.
    """
    norm = global_norm(parameters, norm_type, device)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter, _ in parameters:
        if parameter.grad is not None:
            grad = _local(parameter.grad)
            grad.mul_(factor.to(grad.dtype))
    return norm


def clip_by_value(parameters: Iterable[tuple[nn.Parameter, ParameterPlacement]], limit: float) -> None:
    """Clamp every element of every gradient to ``[-limit, limit]``; torch's own cannot take DTensors beside tensors."""
    for parameter, _ in parameters:
        if parameter.grad is not None:
            _local(parameter.grad).clamp_(-limit, limit)


class AgreedGradScaler(torch.amp.GradScaler):
    """A gradient scaler that finds an overflow anywhere, so that all ranks skip a step and shrink their scales alike.

    torch's own for sharded models cannot take DTensors and tensors together; this one looks at what each rank holds.

    Args:
        like: The scaler whose settings and scale it goes on with.
        device_type: Of the gradients.

    Example:
        >>> AgreedGradScaler(torch.amp.GradScaler("cpu", init_scale=4.0), "cpu").get_scale()
        4.0
    """

    def __init__(self, like: torch.amp.GradScaler, device_type: str) -> None:
        super().__init__(device_type, enabled=like.is_enabled())
        self.load_state_dict(like.state_dict())

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    grad = _local(parameter.grad)
                    by_dtype.setdefault(grad.dtype, []).append(grad._values() if grad.is_sparse else grad)
        if torch.float16 in by_dtype and not allow_fp16:
            raise ValueError(
                "The gradients to unscale are float16, too narrow to hold them unscaled: keep the parameters in "
                "float32 (precision='16-mixed', not '16-true')."
            )
        for grads in by_dtype.values():
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
        if dist.is_initialized():
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)
        return {found_inf.device: found_inf}
