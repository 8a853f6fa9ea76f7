"""Every primitive's backward is the transpose of its forward, even and uneven, and gradcheck's on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from torch import Tensor
from torch.autograd import gradcheck

from lightning_parm.moe import collectives
from lightning_parm.moe.collectives import (
    all_to_all,
    exchange_sizes,
    gather,
    gather_partial,
    reduce,
    reduce_scatter,
    replicate,
    scale_gradient,
    split,
)
from lightning_parm.moe.wire import Work, sum_float32


def _total(value: Tensor) -> float:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item()


def _transposed(rank: int, world: int, uneven: bool) -> None:
    group = dist.group.WORLD
    assert group is not None
    sizes = [2, 0, 3] if uneven else [2] * world
    counts = [[(r + 2 * s) % 3 if uneven else 2 for s in range(world)] for r in range(world)]  # [source][target]
    send, receive = counts[rank], [counts[source][rank] for source in range(world)]
    primitives: dict[str, tuple[int, int, Callable[[Tensor], Tensor]]] = {
        "all_to_all": (sum(send), sum(receive), lambda x: all_to_all(x, send, receive, group).wait()),
        "gather_partial": (sizes[rank], sum(sizes), lambda x: gather_partial(x, sizes, group).wait()),
        "reduce_scatter": (sum(sizes), sizes[rank], lambda x: reduce_scatter(x, sizes, group).wait()),
    }
    generator = torch.Generator().manual_seed(rank)
    for name, (rows, results, primitive) in primitives.items():
        x = torch.randn(rows, 2, 2, generator=generator, dtype=torch.float64, requires_grad=True)
        y = primitive(x)
        assert y.shape == (results, 2, 2), name
        gradient = torch.randn(y.shape, generator=generator, dtype=torch.float64)
        y.backward(gradient)
        assert x.grad is not None
        assert abs(_total((y * gradient).sum()) - _total((x * x.grad).sum())) < 1e-12, name

    whole = torch.randn(sum(sizes), 2, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    first = sum(sizes[:rank])
    x = whole.clone().requires_grad_()
    y = split(x, sizes, group).wait()
    assert torch.equal(y, whole[first : first + sizes[rank]])
    y.backward(y.detach())
    assert torch.equal(x.grad, whole)
    x = whole[first : first + sizes[rank]].clone().requires_grad_()
    y = gather(x, sizes, group).wait()
    assert torch.equal(y, whole)
    y.backward(2 * whole)  # the same on all peers
    assert torch.equal(x.grad, 2 * x)

    x = torch.full((2,), float(rank), requires_grad=True)
    y = reduce(x, group).wait()
    assert y.tolist() == [sum(range(world))] * 2
    y.backward(torch.tensor([1.0, 2.0]))
    assert x.grad.tolist() == [1.0, 2.0]
    x = torch.ones(2, requires_grad=True)
    y = replicate(x, group).wait()
    assert torch.equal(y, x)
    y.backward(torch.full((2,), rank + 1.0))
    assert x.grad.tolist() == [sum(range(1, world + 1))] * 2
    assert exchange_sizes(rank + 3, group, torch.device("cpu")) == [3 + r for r in range(world)]


@pytest.mark.parametrize("uneven", [False, True])
def test_backward_is_the_transpose_of_forward(uneven: bool) -> None:
    run_ranks(3, _transposed, uneven)


def _checked(rank: int, world: int) -> None:
    group = dist.group.WORLD
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    for primitive in (
        lambda x: all_to_all(x, [4], [4], group).wait(),
        lambda x: split(x, [4], group).wait(),
        lambda x: gather(x, [4], group).wait(),
        lambda x: gather_partial(x, [4], group).wait(),
        lambda x: reduce_scatter(x, [4], group).wait(),
        lambda x: reduce(x, group).wait(),
        lambda x: replicate(x, group).wait(),
    ):
        assert gradcheck(lambda x, primitive=primitive: primitive(x).sin(), (x,))
    assert gradcheck(lambda x: all_to_all(x.t(), [2], [2], group).wait(), (x,))  # not contiguous


def test_gradients_are_numerically_right_through_start_and_wait() -> None:
    run_ranks(1, _checked)


def test_without_a_group_every_primitive_is_the_identity() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    for pending in (
        all_to_all(x, [2], [2], None),
        split(x, [2], None),
        gather(x, [2], None),
        gather_partial(x, [2], None),
        reduce_scatter(x, [2], None),
        reduce(x, None),
    ):
        assert pending.wait() is x
    assert replicate(x, None).wait() is x
    assert scale_gradient(x, 1.0) is x
    assert exchange_sizes(5, None, torch.device("cpu")) == [5]


def test_partial_sums_round_once() -> None:
    parts = [torch.tensor([256.0]).bfloat16(), torch.tensor([1.0]).bfloat16(), torch.tensor([1.0]).bfloat16()]
    assert sum_float32(parts).item() == 258.0
    assert parts[0].item() == 256.0


def _many(rank: int, world: int) -> list[str]:
    """Start and wait, forward and backward, of two exchanges in flight together."""
    log: list[str] = []
    original = collectives.start_all_to_all

    class Watched:
        def __init__(self, work: Work, number: int) -> None:
            self.work, self.number = work, number

        def wait(self) -> None:
            log.append(f"wait {self.number}")
            self.work.wait()

    def call(buffer: Tensor, rows: Tensor, *args: Any) -> Watched:
        log.append(f"start {int(rows[0, 0])}")
        return Watched(original(buffer, rows, *args), int(rows[0, 0]))

    collectives.start_all_to_all = call
    tokens = [torch.full((2, 1), float(number), requires_grad=True) for number in (1, 2)]
    pending = [all_to_all(x, [1, 1], [1, 1], dist.group.WORLD) for x in tokens]
    first, second = (each.wait() for each in pending)
    (first * 10 + second * 20).sum().backward()
    return log


def test_exchanges_overlap_in_forward_and_in_backward() -> None:
    expected = ["start 1", "start 2", "wait 1", "wait 2", "start 20", "start 10", "wait 20", "wait 10"]
    assert run_ranks(2, _many) == [expected] * 2
