"""Where every rank stands: one set of ranks seen twice, as dense (dp, mp) and as sparse (edp, ep, esp) groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Axis = Literal["data_parallel", "tensor_parallel", "expert_data_parallel", "expert_parallel", "expert_shard", "fused"]
Partition = tuple[tuple[int, ...], ...]

DENSE_AXES: tuple[Axis, ...] = ("data_parallel", "tensor_parallel")
SPARSE_AXES: tuple[Axis, ...] = ("expert_data_parallel", "expert_parallel", "expert_shard")

# Groups live exactly as long as the default process group they were cut from: a second Topology of equal sizes finds
# them here instead of opening new connections, and destroying the default group forgets them. Layers ask several times
# in each pass, so groups are found by sizes too, without writing down the partition of all ranks.
_groups: WeakKeyDictionary[dist.ProcessGroup, dict[Any, dist.ProcessGroup]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Topology:
    """Sizes and ranks of all parallel groups of one job.

    The dense view is ``P = N_DP * N_MP``, the sparse view ``P = N_EDP * N_EP * N_ESP``; in both the last factor varies
    fastest, so mp and esp peers are neighbours on one node. The *fused* group is the ``N_EP * N_ESP`` block.

    Args:
        world_size: Ranks of the job, P.
        rank: This process's rank.
        tensor_parallel_size: N_MP, ranks that hold the same tokens and share the dense layers.
        expert_parallel_size: N_EP, ranks over which whole experts are spread.
        expert_shard_size: N_ESP, ranks over which one expert's hidden dim is cut.

    Raises:
        ValueError: If the sizes do not divide the world size.

    Example:
        >>> topology = Topology(8, rank=5, tensor_parallel_size=2, expert_parallel_size=2, expert_shard_size=2)
        >>> topology.data_parallel_size, topology.expert_data_parallel_size
        (4, 2)
        >>> topology.data_parallel_rank, topology.expert_parallel_rank, topology.expert_shard_rank
        (2, 0, 1)
    """

    world_size: int
    rank: int
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1
    expert_shard_size: int = 1

    def __post_init__(self) -> None:
        for name in ("world_size", "tensor_parallel_size", "expert_parallel_size", "expert_shard_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but every size is at least 1.")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank is {self.rank}, but the {self.world_size} ranks count from 0.")
        if self.world_size % self.tensor_parallel_size:
            raise ValueError(
                f"tensor_parallel_size={self.tensor_parallel_size} does not divide the {self.world_size} ranks; "
                f"choose one of {_divisors(self.world_size)}."
            )
        block = self.expert_parallel_size * self.expert_shard_size
        if self.world_size % block:
            raise ValueError(
                f"expert_parallel_size={self.expert_parallel_size} times expert_shard_size={self.expert_shard_size} is "
                f"{block}, which does not divide the {self.world_size} ranks; "
                f"make the product one of {_divisors(self.world_size)}."
            )

    @classmethod
    def local(cls) -> Topology:
        """One process that holds everything.

        Example:
            >>> Topology.local().data_parallel_size
            1
        """
        return cls(world_size=1, rank=0)

    @classmethod
    def resolve(
        cls,
        world_size: int,
        rank: int,
        tensor_parallel_size: int = 1,
        expert_parallel_size: int | Literal["auto"] = "auto",
        expert_shard_size: int | Literal["auto"] = "auto",
        num_experts: Sequence[int] = (),
    ) -> Topology:
        """Turn ``"auto"`` into sizes; pure arithmetic, so wrong sizes are found before any process starts.

        N_ESP becomes N_MP (1 where that does not fit a given N_EP), and N_EP the largest size that divides the ranks
        left and every layer's number of experts.

        Args:
            world_size: Ranks of the job.
            rank: This process's rank.
            tensor_parallel_size: N_MP.
            expert_parallel_size: N_EP or ``"auto"``.
            expert_shard_size: N_ESP or ``"auto"``.
            num_experts: E of every MoE layer of the model.

        Raises:
            ValueError: If the sizes do not divide the ranks or the experts; names the sizes that would work.

        Example:
            >>> topology = Topology.resolve(8, 0, tensor_parallel_size=2, num_experts=[6])
            >>> topology.expert_parallel_size, topology.expert_shard_size, topology.expert_data_parallel_size
            (2, 2, 2)
        """
        shard = expert_shard_size
        if shard == "auto":
            known = 1 if expert_parallel_size == "auto" else expert_parallel_size
            fits = known >= 1 and world_size % (known * tensor_parallel_size) == 0
            shard = tensor_parallel_size if fits else 1
        left = world_size // shard if shard >= 1 and world_size % shard == 0 else 1
        working = [size for size in _divisors(left) if all(experts % size == 0 for experts in num_experts)]
        expert = max(working) if expert_parallel_size == "auto" else expert_parallel_size
        topology = cls(world_size, rank, tensor_parallel_size, expert, shard)
        if expert not in working:
            raise ValueError(
                f"expert_parallel_size={expert} does not divide the numbers of experts {sorted(set(num_experts))}; "
                f"with {world_size} ranks and expert_shard_size={shard} choose one of {working}."
            )
        return topology

    @property
    def data_parallel_size(self) -> int:
        """N_DP, ranks that hold different tokens: P / N_MP."""
        return self.world_size // self.tensor_parallel_size

    @property
    def expert_data_parallel_size(self) -> int:
        """N_EDP, replicas of every expert: P / (N_EP N_ESP)."""
        return self.world_size // self.fused_size

    @property
    def fused_size(self) -> int:
        """Ranks of the block that holds every expert once: N_EP N_ESP."""
        return self.expert_parallel_size * self.expert_shard_size

    @property
    def data_parallel_rank(self) -> int:
        """Which share of the tokens this rank holds."""
        return self.rank // self.tensor_parallel_size

    @property
    def tensor_parallel_rank(self) -> int:
        """Position among the ranks that hold the same tokens."""
        return self.rank % self.tensor_parallel_size

    @property
    def expert_data_parallel_rank(self) -> int:
        """Which replica of the experts this rank belongs to."""
        return self.rank // self.fused_size

    @property
    def expert_parallel_rank(self) -> int:
        """Which range of experts this rank holds."""
        return self.rank // self.expert_shard_size % self.expert_parallel_size

    @property
    def expert_shard_rank(self) -> int:
        """Which slice of its experts' hidden dim this rank holds."""
        return self.rank % self.expert_shard_size

    def size(self, axis: Axis) -> int:
        """Ranks along ``axis``."""
        return self.fused_size if axis == "fused" else int(getattr(self, f"{axis}_size"))

    def group(self, axis: Axis) -> dist.ProcessGroup | None:
        """The process group along ``axis``, or ``None`` where this rank is alone on it.

        Groups are made at the first call, in which all ranks of the job must take part in the same order, and are
        reused by every later Topology that cuts the same default process group the same way.

        Raises:
            ValueError: If there is no such axis.
            RuntimeError: If the default process group is missing or of another size.
        """
        if axis not in get_args(Axis):
            raise ValueError(f"no axis is called {axis!r}; the axes are {', '.join(get_args(Axis))}.")
        return None if self.size(axis) == 1 else self._cut(axis)

    def dense_mesh(self, device_type: str) -> DeviceMesh:
        """The ranks as a mesh with axes ``data_parallel`` and ``tensor_parallel``; all ranks must call it."""
        return self._mesh(device_type, DENSE_AXES)

    def sparse_mesh(self, device_type: str) -> DeviceMesh:
        """The ranks as a mesh with axes ``expert_data_parallel``, ``expert_parallel`` and ``expert_shard``."""
        return self._mesh(device_type, SPARSE_AXES)

    def _mesh(self, device_type: str, axes: tuple[Axis, ...]) -> DeviceMesh:
        ranks = torch.arange(self.world_size, dtype=torch.int, device="cpu").view([self.size(axis) for axis in axes])
        return DeviceMesh.from_group([self._cut(axis) for axis in axes], device_type, ranks, mesh_dim_names=axes)

    def _cut(self, axis: Axis) -> dist.ProcessGroup:
        """This rank's group of the partition along ``axis``; the whole world is the default group itself."""
        if not dist.is_initialized() or dist.get_world_size() != self.world_size:
            found = f"has {dist.get_world_size()} ranks" if dist.is_initialized() else "is not initialised"
            raise RuntimeError(
                f"This topology has {self.world_size} ranks but the default process group {found}; call "
                "torch.distributed.init_process_group with as many ranks first."
            )
        world = dist.group.WORLD
        assert world is not None
        if self.size(axis) == self.world_size:
            return world
        groups = _groups.setdefault(world, {})
        if (self, axis) not in groups:
            partition = self._partition(axis)
            if partition not in groups:
                ranks = [list(group) for group in partition]
                groups[partition], _ = dist.new_subgroups_by_enumeration(ranks, timeout=_timeout(world))
            groups[self, axis] = groups[partition]
        return groups[self, axis]

    def _partition(self, axis: Axis) -> Partition:
        """All groups along ``axis``, as ranks of the job."""
        axes = {
            "fused": (SPARSE_AXES[0], "fused"),
            **dict.fromkeys(DENSE_AXES, DENSE_AXES),
            **dict.fromkeys(SPARSE_AXES, SPARSE_AXES),
        }[axis]
        shape, along = [self.size(name) for name in axes], axes.index(axis)
        ranks = torch.arange(self.world_size, device="cpu").view(shape).movedim(along, -1).reshape(-1, shape[along])
        return tuple(tuple(group) for group in ranks.tolist())


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """How long a group waits for its ranks. Groups cut from it wait as long; torch would give them half an hour."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
