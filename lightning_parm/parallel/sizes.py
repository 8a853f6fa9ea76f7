"""The sizes of a run: what the strategies of the Trainer and of Fabric know of them, and what follows for data."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import nn

from lightning_parm.moe import Topology
from lightning_parm.parallel.placement import moe_layers
from lightning_parm.parallel.workers import seed_workers


class SizedStrategy:
    """Stands before a strategy of Lightning's among a class's bases; the class's constructor sets the three sizes.

    Example:
        >>> from lightning.fabric.strategies import DDPStrategy
        >>> class Halves(SizedStrategy, DDPStrategy):
        ...     tensor_parallel_size, expert_parallel_size, expert_shard_size = 2, "auto", "auto"
        >>> Halves()._resolve(world_size=4, rank=3).data_parallel_rank
        1
    """

    tensor_parallel_size: int
    expert_parallel_size: int | Literal["auto"]
    expert_shard_size: int | Literal["auto"]
    num_nodes: int
    num_processes: int
    _topology: Topology | None = None
    _topology_exists: ClassVar[str] = "once the processes have been set up."

    @property
    def topology(self) -> Topology:
        """Sizes and groups of the run; under Fabric those of the model set up last.

        Raises:
            RuntimeError: Before the processes have been set up.
        """
        if self._topology is None:
            raise RuntimeError(f"strategy.topology exists {self._topology_exists}")
        return self._topology

    def _resolve(self, world_size: int, rank: int, module: nn.Module | None = None) -> Topology:
        return Topology.resolve(
            world_size,
            rank,
            self.tensor_parallel_size,
            self.expert_parallel_size,
            self.expert_shard_size,
            num_experts=[layer.num_experts for _, layer in moe_layers(module)] if module is not None else (),
        )

    def _configure_launcher(self) -> None:
        self._resolve(self.num_nodes * self.num_processes, rank=0)  # wrong sizes fail before any process is started
        super()._configure_launcher()  # type: ignore[misc]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Data-parallel size and rank: the ranks of a tensor-parallel group read the same batches."""
        if self._topology is None:
            default: dict[str, Any] = super().distributed_sampler_kwargs  # type: ignore[misc]
            return default
        return {"num_replicas": self._topology.data_parallel_size, "rank": self._topology.data_parallel_rank}

    def process_dataloader(self, dataloader: Any) -> Any:
        """Let workers of tensor-parallel peers, which read the same samples, draw the same random numbers."""
        return seed_workers(dataloader, self.topology.data_parallel_rank)


def check_data_parallel(data_parallel: str) -> str:
    """What the user asked for, if it is known.

    Raises:
        ValueError: If it is not.
    """
    if data_parallel not in ("replicate", "shard"):
        raise ValueError(f"data_parallel={data_parallel!r} is unknown; choose 'replicate' or 'shard'.")
    return data_parallel
