"""Both views of the ranks agree, wrong sizes are named with the sizes that work, groups are shared and minimal."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks

from lightning_parm.moe.topology import Topology

DIVISORS = {world: [size for size in range(1, world + 1) if world % size == 0] for world in (1, 2, 3, 4, 6, 8)}
SIZES = [
    (world, mp, ep, esp)
    for world, divisors in DIVISORS.items()
    for mp, ep, esp in product(divisors, repeat=3)
    if world % (ep * esp) == 0
]


@pytest.mark.parametrize(("world", "mp", "ep", "esp"), SIZES)
def test_every_rank_is_its_coordinates_in_both_views(world: int, mp: int, ep: int, esp: int) -> None:
    for rank in range(world):
        topology = Topology(world, rank, mp, ep, esp)
        assert topology.data_parallel_rank * mp + topology.tensor_parallel_rank == rank
        sparse = (topology.expert_data_parallel_rank * ep + topology.expert_parallel_rank) * esp
        assert sparse + topology.expert_shard_rank == rank
        assert topology.data_parallel_size * mp == topology.expert_data_parallel_size * ep * esp == world


@pytest.mark.parametrize(("world", "mp", "ep", "esp"), SIZES)
def test_every_axis_partitions_the_world_and_the_shards_are_neighbours(world: int, mp: int, ep: int, esp: int) -> None:
    topology = Topology(world, 0, mp, ep, esp)
    for axis in (
        "data_parallel",
        "tensor_parallel",
        "expert_data_parallel",
        "expert_parallel",
        "expert_shard",
        "fused",
    ):
        partition = topology._partition(axis)
        assert sorted(rank for group in partition for rank in group) == list(range(world))
        assert {len(group) for group in partition} == {topology.size(axis)}
    with torch.device("meta"):  # ranks are no tensors of the user's
        assert topology._partition("fused") == partition
    for group in topology._partition("expert_shard") + topology._partition("tensor_parallel"):
        assert list(group) == list(range(group[0], group[0] + len(group)))


def test_auto_takes_the_largest_sizes_that_divide_ranks_and_experts() -> None:
    def sizes(*args: int, experts: tuple[int, ...], **kwargs: int) -> tuple[int, int, int]:
        topology = Topology.resolve(*args, num_experts=experts, **kwargs)
        return topology.expert_parallel_size, topology.expert_shard_size, topology.expert_data_parallel_size

    assert sizes(8, 0, experts=(8,)) == (8, 1, 1)
    assert sizes(8, 0, 2, experts=(8, 4)) == (4, 2, 1)
    assert sizes(8, 0, 2, experts=(6,)) == (2, 2, 2)
    assert sizes(6, 0, 2, experts=(8,)) == (1, 2, 3)
    assert sizes(8, 0, 4, experts=(8,), expert_parallel_size=8) == (8, 1, 1)
    assert sizes(4, 0, experts=()) == (4, 1, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"world_size": 6, "tensor_parallel_size": 4},
            r"tensor_parallel_size=4 .* 6 ranks; choose one of \[1, 2, 3, 6",
        ),
        ({"world_size": 4, "expert_parallel_size": 2, "expert_shard_size": 3}, r"is 6, which does not divide the 4 r"),
        ({"world_size": 4, "rank": 4}, "rank is 4, but the 4 ranks count from 0"),
        ({"world_size": 4, "expert_shard_size": 0}, "expert_shard_size is 0, but every size is at least 1"),
    ],
)
def test_wrong_sizes_are_refused_with_the_numbers_and_what_would_work(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Topology(**{"rank": 0, **arguments})
    arguments = {"rank": 0, "expert_parallel_size": 1, "expert_shard_size": 1, **arguments}
    with pytest.raises(ValueError, match=message):
        Topology.resolve(**arguments)


def test_experts_that_do_not_divide_are_refused_with_the_sizes_that_work() -> None:
    with pytest.raises(ValueError, match=r"expert_parallel_size=4 does not divide .* \[6\].* choose one of \[1, 2\]"):
        Topology.resolve(8, 0, expert_parallel_size=4, expert_shard_size=2, num_experts=[6, 6])


def test_groups_need_a_process_group_of_the_same_size_and_a_known_axis() -> None:
    with pytest.raises(RuntimeError, match="has 2 ranks but the default process group is not initialised"):
        Topology(2, 0, expert_parallel_size=2).group("expert_parallel")
    with pytest.raises(ValueError, match="no axis is called 'ep'"):
        Topology.local().group("ep")  # type: ignore[arg-type]
    assert Topology.local().group("fused") is None


def _check_groups(rank: int, world: int) -> None:
    before = len(dist.distributed_c10d._world.pg_map)
    first = Topology(world, rank, tensor_parallel_size=2, expert_parallel_size=2, expert_shard_size=1)
    groups = {axis: first.group(axis) for axis in ("tensor_parallel", "expert_parallel", "fused", "data_parallel")}
    assert first.group("expert_shard") is None
    assert groups["tensor_parallel"] is groups["expert_parallel"] is groups["fused"]  # the same ranks, one group
    made = len(dist.distributed_c10d._world.pg_map)
    assert made == before + 2
    again = Topology(world, rank, tensor_parallel_size=2, expert_parallel_size=2)
    assert again.group("tensor_parallel") is groups["tensor_parallel"]
    assert again.group("data_parallel") is groups["data_parallel"]
    assert Topology(world, rank, expert_parallel_size=world).group("fused") is dist.group.WORLD
    assert len(dist.distributed_c10d._world.pg_map) == made

    dense, sparse = first.dense_mesh("cpu"), first.sparse_mesh("cpu")
    assert dense.mesh_dim_names == ("data_parallel", "tensor_parallel")
    assert sparse.mesh_dim_names == ("expert_data_parallel", "expert_parallel", "expert_shard")
    assert list(dense.get_coordinate()) == [first.data_parallel_rank, first.tensor_parallel_rank]
    assert list(sparse.get_coordinate()) == [first.expert_data_parallel_rank, first.expert_parallel_rank, 0]
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=dense.get_group("data_parallel"))
    assert total.item() == sum(r for r in range(world) if r % 2 == rank % 2)

    with pytest.raises(RuntimeError, match=f"has {2 * world} ranks but the default process group has {world}"):
        Topology(2 * world, rank, tensor_parallel_size=2).group("tensor_parallel")


def test_groups_are_made_once_shared_between_equal_partitions_and_only_where_needed() -> None:
    run_ranks(4, _check_groups)


def test_groups_wait_no_longer_than_the_default_group() -> None:
    def rank_main(rank: int, world_size: int) -> list[float]:
        topology = Topology(world_size, rank, 2, 2, 1)
        groups = [topology.group("tensor_parallel"), topology.group("data_parallel"), dist.group.WORLD]
        return [g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups if g is not None]

    assert run_ranks(4, rank_main, timeout=45.0)[0] == [45.0, 45.0, 45.0]
