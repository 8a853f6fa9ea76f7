"""Sends between pairs of ranks give what gloo's own collectives give, in any number and order, and never hang."""

from __future__ import annotations

import time
from datetime import timedelta
from itertools import product

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from torch import Tensor

from lightning_parm.moe import wire
from lightning_parm.moe.wire import Work, start_all_gather, start_all_reduce, start_all_to_all, start_reduce_scatter

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)


def _values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Small whole numbers, whose sums every type holds exactly."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _same(rank: int, world: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    for dtype, rows, seed in product(TYPES, (0, 1, 5), (0, 1)):
        # some ranks send nothing to some, and with seed 1 the first sends nothing at all
        sent = [[(3 * s + 5 * r + rows) % 4 * (r > 0 or not seed) for r in range(world)] for s in range(world)]
        send, receive = sent[rank], [row[rank] for row in sent]
        mine = _values((sum(send), 3), dtype, rank)
        ours, theirs = (mine.new_full((sum(receive), 3), 99) for _ in range(2))
        start_all_to_all(ours, mine, receive, send, group).wait()
        dist.all_to_all_single(theirs, mine, receive, send, group=group)
        assert torch.equal(ours, theirs)
        if not rows:
            continue
        part, whole = _values((rows,), dtype, rank), _values((world * rows,), dtype, rank + 9)
        ours, theirs = (torch.empty_like(whole) for _ in range(2))
        start_all_gather(ours, part, group).wait()
        dist.all_gather_single(theirs, part, group=group)
        assert torch.equal(ours, theirs)
        ours, theirs = (torch.empty_like(part) for _ in range(2))
        start_reduce_scatter(ours, whole, [rows] * world, group).wait()
        theirs = whole.clone()
        dist.all_reduce(theirs, group=group)
        assert torch.equal(ours, theirs.chunk(world)[rank])
        before = whole.clone()
        start_all_reduce(whole, group).wait()
        assert torch.equal(whole, theirs)
        assert torch.equal(before, _values((world * rows,), dtype, rank + 9))


@pytest.mark.parametrize("world", [2, 3, 5])
def test_results_are_those_of_the_backend(world: int) -> None:
    run_ranks(world, _same)


def _sums(rank: int, world: int) -> list[Tensor]:
    group = dist.group.WORLD
    assert group is not None
    sums = []
    for count in (1, 1000, wire._SMALL // 4):  # the last goes through the backend
        buffer = torch.randn(count, generator=torch.Generator().manual_seed(rank))
        start_all_reduce(buffer, group).wait()
        sums.append(buffer)
    return sums


def test_a_sum_is_the_same_on_all_ranks_to_the_last_bit() -> None:
    first, *others = run_ranks(4, _sums)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def _crowd(rank: int, world: int) -> None:
    """Many exchanges of different kinds and sizes in flight, waited for in an order of each rank's own."""
    group = dist.group.WORLD
    assert group is not None
    expected: list[tuple[Tensor, Tensor]] = []
    works: list[Work] = []
    for index in range(30):
        rows = 1 + (7 * index) % 11
        everyone = torch.arange(world * world * rows).view(world, world, rows).float() + 1000 * index
        mine, received = everyone[rank].flatten(), torch.empty(world * rows)
        if index % 3 == 0:
            works.append(start_all_to_all(received, mine, [rows] * world, [rows] * world, group))
            expected.append((received, everyone[:, rank].flatten()))
        elif index % 3 == 1:
            works.append(start_all_gather(received, mine[:rows].clone(), group))
            expected.append((received, everyone[:, 0].flatten()))
        else:
            works.append(start_reduce_scatter(received[:rows], mine, [rows] * world, group))
            expected.append((received[:rows], everyone[:, rank].sum(0)))
    for index in torch.randperm(30, generator=torch.Generator().manual_seed(rank)).tolist():
        works[index].wait()
    for result, wanted in expected:
        assert torch.equal(result, wanted)


def test_exchanges_in_flight_together_do_not_mix() -> None:
    run_ranks(4, _crowd)


def _alone(rank: int, world: int) -> float:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    assert group is not None
    started = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError):
            start_reduce_scatter(torch.empty(3), torch.ones(6), [3, 3], group).wait()
    dist.barrier()
    return time.monotonic() - started


def test_a_peer_that_stays_away_ends_the_wait() -> None:
    assert max(run_ranks(2, _alone)) < 30


def _own_sends(rank: int, world: int) -> Tensor:
    group = dist.group.WORLD
    assert group is not None
    received, other = torch.empty(2), torch.empty(2)
    mine = dist.irecv(received, 1 - rank) if rank else dist.isend(torch.tensor([1.0, 2.0]), 1)
    start_all_to_all(other, torch.zeros(2), [1, 1], [1, 1], group).wait()
    assert mine is not None
    mine.wait()
    return received if rank else torch.tensor([1.0, 2.0])


def test_a_programs_own_sends_are_left_alone() -> None:
    first, second = run_ranks(2, _own_sends)
    assert torch.equal(first, second)


def _uneven(rank: int, world: int) -> tuple[Tensor, Tensor]:
    group = dist.group.WORLD
    assert group is not None
    sizes = [2, 0, 3]
    rows = _values((5, 2), torch.float32, rank)
    ours, theirs = (torch.empty(sizes[rank], 2) for _ in range(2))
    start_reduce_scatter(ours, rows, sizes, group).wait()
    wire._is_gloo = lambda group, rows: False  # as on another backend
    start_reduce_scatter(theirs, rows, sizes, group).wait()
    return ours, theirs


def test_uneven_sums_are_scattered_on_any_backend() -> None:
    whole = torch.stack([_values((5, 2), torch.float32, rank) for rank in range(3)]).sum(0)
    results = run_ranks(3, _uneven)
    for path in range(2):
        assert torch.equal(torch.cat([result[path] for result in results]), whole)
