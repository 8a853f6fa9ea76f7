"""Differentiable collectives over rows (dim 0), started now and waited for later, in forward and in backward alike.

Every primitive is a pair of linear maps that are each other's transpose: the first docstring line says which collective
runs in forward and which in backward. A group of ``None`` has one rank and makes every primitive the identity.

Starting and waiting are two autograd nodes. Autograd runs nodes in the reverse of the order in which forward made
them, so a forward that starts one exchange, computes, and then waits has a backward that does the same: waiting became
starting. On CUDA an asynchronous collective runs on its communicator's own stream; launching makes that stream wait for
the current one, waiting makes the current stream wait for it, and the process group keeps the tensors alive between.
So collectives of one group follow one another, and those of different groups may run at once, launched in the same
order on every rank as NCCL asks of programs with several communicators. Groups of the same ranks are one group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parm.moe.wire import (
    Work,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
)

Group = dist.ProcessGroup | None
Land = Callable[[], Tensor]
Launch = Callable[[Tensor], tuple[Tensor, Land]]  # rows -> (a buffer in flight, how to wait for the result)
P = ParamSpec("P")
R = TypeVar("R")


def first_order(backward: Callable[P, R]) -> Callable[P, R]:
    """A backward that is not differentiated itself, and says so where torch would leave it out of the sum.

    Raises:
        RuntimeError: If a graph of the gradients is asked for.
    """

    @wraps(backward)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_grad_enabled():
            raise RuntimeError("An MoE layer has no second derivatives; compute gradients without create_graph=True.")
        return backward(*args, **kwargs)

    return checked


class Pending:
    """A collective in flight; ``wait()`` gives its result, differentiably.

    Example:
        >>> reduce(torch.ones(3), None).wait()
        tensor([1., 1., 1.])
    """

    def __init__(self, buffer: Tensor, transfer: _Transfer | None = None) -> None:
        self._buffer = buffer
        self._transfer = transfer

    def wait(self) -> Tensor:
        """The result; blocks the host on gloo and only the current stream on NCCL."""
        if self._transfer is None:
            return self._buffer
        result: Tensor = _Wait.apply(self._buffer, self._transfer)  # type: ignore[no-untyped-call]
        return result


class _Transfer:
    """What runs in each direction, and how to wait for what is in flight."""

    def __init__(self, forward: Launch, backward: Launch) -> None:
        self.forward = forward
        self.backward = backward
        self.land: Land | None = None

    def launch(self, launch: Launch, rows: Tensor) -> Tensor:
        buffer, self.land = launch(rows.contiguous())
        return buffer

    def landed(self) -> Tensor:
        assert self.land is not None, "waited for a collective that was never started"
        land, self.land = self.land, None  # lets go of the buffers
        return land()


class _Start(torch.autograd.Function):
    """Forward: start the collective; backward: wait for the one that ``_Wait`` started."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        ctx.set_materialize_grads(False)
        return transfer.launch(transfer.forward, rows)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.transfer.landed(), None


class _Wait(torch.autograd.Function):
    """Forward: wait for the collective; backward: start the opposite one."""

    @staticmethod
    def forward(ctx: Any, buffer: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        return transfer.landed()

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.transfer.launch(ctx.transfer.backward, gradient)
        return None, None  # the gradient travels in the transfer


def _start(rows: Tensor, forward: Launch, backward: Launch) -> Pending:
    transfer = _Transfer(forward, backward)
    return Pending(_Start.apply(rows, transfer), transfer)  # type: ignore[no-untyped-call]


def all_to_all(rows: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Pending:
    """Forward AlltoAll, ``send[i]`` rows to peer i; backward AlltoAll of the gradients the other way.

    Args:
        rows: ``(sum(send), ...)``, ordered by destination.
        send: Rows for each peer.
        receive: Rows from each peer; the result is ``(sum(receive), ...)``, ordered by source.
        group: Peers.
    """
    if group is None:
        return Pending(rows)
    return _start(rows, _exchanging(send, receive, group), _exchanging(receive, send, group))


def split(rows: Tensor, sizes: Sequence[int], group: Group) -> Pending:
    """Forward this rank's slice of replicated rows; backward AllGather of the slices' gradients."""
    if group is None:
        return Pending(rows)
    return _start(rows, _slicing(sizes, group), _gathering(sizes, group))


def gather(rows: Tensor, sizes: Sequence[int], group: Group) -> Pending:
    """Forward AllGather; backward this rank's slice, right where consumers are replicated over the group.

    Args:
        rows: ``(sizes[rank], ...)``.
        sizes: Rows that each peer holds; the result is ``(sum(sizes), ...)``.
        group: Peers whose gradients of the result are identical.
    """
    if group is None:
        return Pending(rows)
    return _start(rows, _gathering(sizes, group), _slicing(sizes, group))


def gather_partial(rows: Tensor, sizes: Sequence[int], group: Group) -> Pending:
    """Forward AllGather; backward ReduceScatter, for consumers that each see part of the gradient."""
    if group is None:
        return Pending(rows)
    return _start(rows, _gathering(sizes, group), _scattering(sizes, group))


def reduce_scatter(rows: Tensor, sizes: Sequence[int], group: Group) -> Pending:
    """Forward ReduceScatter of partial sums, ``sizes[i]`` rows to peer i; backward AllGather."""
    if group is None:
        return Pending(rows)
    return _start(rows, _scattering(sizes, group), _gathering(sizes, group))


def reduce(rows: Tensor, group: Group) -> Pending:
    """Forward AllReduce of partial sums; backward identity."""
    if group is None:
        return Pending(rows)
    return _start(rows, _summing(group), _passing)


def replicate(rows: Tensor, group: Group) -> Pending:
    """Forward identity; backward AllReduce, for what every peer uses on its own share of the tokens or weights."""
    if group is None:
        return Pending(rows)
    return _start(rows, _passing, _summing(group))


def scale_gradient(rows: Tensor, factor: float) -> Tensor:
    """Forward identity; backward multiplied by ``factor``.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> scale_gradient(x, 0.5).sum().backward()
        >>> x.grad
        tensor([0.5000, 0.5000])
    """
    if factor == 1.0:
        return rows
    return _start(rows, _passing, lambda gradient: (gradient, lambda: gradient * factor)).wait()


def lend(weight: Tensor, copy: Tensor) -> Tensor:
    """Forward ``copy``, the weight in another type; backward the gradient in the weight's own, in which it adds up.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> half = lend(weight, weight.detach().bfloat16())
        >>> half.sum().backward()
        >>> half.dtype, weight.grad.dtype
        (torch.bfloat16, torch.float32)
    """
    dtype = weight.dtype
    return _start(weight, lambda _: _passing(copy), lambda gradient: (gradient, lambda: gradient.to(dtype))).wait()


def exchange_sizes(size: int, group: Group, device: torch.device) -> list[int]:
    """How many rows every peer holds; one integer each, and one host sync on CUDA."""
    if group is None:
        return [size]
    sizes = torch.empty(dist.get_world_size(group), dtype=torch.int64, device=device)
    dist.all_gather_single(sizes, torch.full_like(sizes[:1], size), group=group)
    return sizes.tolist()


def _passing(rows: Tensor) -> tuple[Tensor, Land]:
    alias = rows.view_as(rows)  # autograd would take the input itself for a new tensor
    return alias, lambda: alias


def _exchanging(send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> Launch:
    def launch(rows: Tensor) -> tuple[Tensor, Land]:
        buffer = rows.new_empty((sum(receive), *rows.shape[1:]))
        work = start_all_to_all(buffer, rows, receive, send, group)
        return buffer, lambda: _landed(work, buffer, rows)

    return launch


def _slicing(sizes: Sequence[int], group: dist.ProcessGroup) -> Launch:
    rank = dist.get_rank(group)
    first = sum(sizes[:rank])

    def launch(rows: Tensor) -> tuple[Tensor, Land]:
        part = rows.narrow(0, first, sizes[rank])
        return part, lambda: part

    return launch


def _gathering(sizes: Sequence[int], group: dist.ProcessGroup) -> Launch:
    if len(set(sizes)) > 1:  # an uneven AllGather is an AlltoAll of whole buffers: the same bytes arrive
        mine, peers = sizes[dist.get_rank(group)], len(sizes)
        exchange = _exchanging([mine] * peers, sizes, group)
        return lambda rows: exchange(rows.repeat(peers, *[1] * (rows.dim() - 1)))

    def launch(rows: Tensor) -> tuple[Tensor, Land]:
        buffer = rows.new_empty((sum(sizes), *rows.shape[1:]))
        if not buffer.numel():
            return buffer, lambda: buffer
        work = start_all_gather(buffer.view(-1), rows.view(-1), group)
        return buffer, lambda: _landed(work, buffer, rows)

    return launch


def _scattering(sizes: Sequence[int], group: dist.ProcessGroup) -> Launch:
    mine = sizes[dist.get_rank(group)]

    def launch(rows: Tensor) -> tuple[Tensor, Land]:
        buffer = rows.new_empty((mine, *rows.shape[1:]))
        if not rows.numel():
            return buffer, lambda: buffer
        work = start_reduce_scatter(buffer, rows, sizes, group)
        return buffer, lambda: _landed(work, buffer, rows)

    return launch


def _summing(group: dist.ProcessGroup) -> Launch:
    def launch(rows: Tensor) -> tuple[Tensor, Land]:
        buffer = rows.clone()
        if not buffer.numel():
            return buffer, lambda: buffer
        work = start_all_reduce(buffer, group)
        return buffer, lambda: _landed(work, buffer)

    return launch


def _landed(work: Work, buffer: Tensor, *alive: Tensor) -> Tensor:
    """Wait for ``work``; taking the inputs as arguments keeps them alive for as long as it reads them."""
    work.wait()
    return buffer
