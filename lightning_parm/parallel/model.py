"""A module cut over the ranks: what the strategies of the Trainer and of Fabric have in common."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_parm.moe import Topology
from lightning_parm.parallel.automatic import AutomaticSchedule
from lightning_parm.parallel.gradients import GradientReducer, clip_by_global_norm, global_norm
from lightning_parm.parallel.placement import ParameterPlacement, make_replicas_equal, moe_layers, place_parameters
from lightning_parm.parallel.sharding import give_back, shard, synchronise, units_of
from lightning_parm.parallel.state import by_position, full_tensors, load_optimizer_state, optimizer_state
from lightning_parm.parallel.tensor_parallel import cut_dense_layers


class ParallelModel:
    """A module whose MoE and dense layers are cut over the ranks; making one again of the same module changes nothing.

    Args:
        module: The model; it is changed in place.
        topology: Sizes and groups of the run.
        device: Where this rank computes.
        schedule: Of every MoE layer.
        transport: Of every MoE layer.
        chunks: Of every MoE layer.
        data_parallel: ``"replicate"``, or ``"shard"`` for parameters, gradients and optimizer state in parts over the
            ranks that hold replicas otherwise; see :mod:`lightning_parm.parallel.sharding`.
    """

    def __init__(
        self,
        module: nn.Module,
        topology: Topology,
        device: torch.device,
        schedule: Any = "auto",
        transport: Any = "auto",
        chunks: Any = "auto",
        data_parallel: str = "replicate",
    ) -> None:
        self._module = module
        self.topology = topology
        self.device = device
        self._fixed = (schedule, transport, chunks)
        self._data_parallel = data_parallel
        self._reducer: GradientReducer | None = None
        self._automatic: AutomaticSchedule | None = None
        for _, layer in moe_layers(module):
            if topology.world_size > 1 and layer.topology != topology:
                layer.auxiliary_loss = torch.zeros(())  # of an earlier forward, whose graph knows the whole parameters
                layer.parallelize(topology, schedule, transport, chunks)
        self._dense_mesh: DeviceMesh | None = getattr(module, "_device_mesh", None)  # the one that users see
        if topology.world_size > 1 and self._dense_mesh is None:
            self._dense_mesh = topology.dense_mesh(device.type)
        if topology.tensor_parallel_size > 1:
            assert self._dense_mesh is not None
            cut_dense_layers(module, self._dense_mesh["tensor_parallel"])
        self._look_around()

    def _look_around(self) -> None:
        """Find once what a batch would otherwise look for in a tree of thousands of modules."""
        self._units = units_of(self._module)
        self.placements = place_parameters(self._module, self.topology, self.device.type)
        self._placed: list[tuple[nn.Parameter, ParameterPlacement]] | None = None

    @property
    def module(self) -> nn.Module:
        """The model, with this rank's part of every parameter."""
        self.give_back()
        return self._module

    def give_back(self) -> None:
        """Free what a step or an evaluation has gathered; no communication."""
        give_back(self._units)

    def placed(self, optimizer: Optimizer | None = None) -> list[tuple[nn.Parameter, ParameterPlacement]]:
        """Every parameter with its placement, in the order of the module; of ``optimizer`` only, if one is given."""
        wanted = {id(p) for group in optimizer.param_groups for p in group["params"]} if optimizer else None
        if self._placed is None:
            self._placed = [(p, self.placements[name]) for name, p in self.module.named_parameters()]
        return [pair for pair in self._placed if wanted is None or id(pair[0]) in wanted]

    def make_replicas_equal(self) -> None:
        """Give every replica the values of the first rank that holds them, once the module is on its device.

        Replicas that are to be sharded are, from then on.
        """
        make_replicas_equal(self.module, self.placements, self.topology)
        if self._data_parallel == "shard" and self._dense_mesh is not None:
            shard(self.module, self.topology, self._dense_mesh, self.topology.sparse_mesh(self.device.type))
            self._look_around()

    # ---------------------------------------------------------------- training

    def prepare_training(self, bucket_size_bytes: int, calibrate: bool, verify_steps: int = 0) -> None:
        """Watch the gradients, to average them while backward runs, and the sizes that schedules are chosen for."""
        self.release()
        self._placed = None
        self._bucket_size_bytes = bucket_size_bytes
        self._watch_gradients()
        if calibrate:
            self._automatic = AutomaticSchedule.watch(self.module, self.topology, self._fixed, verify_steps)

    def _watch_gradients(self) -> None:
        if self._reducer is not None:
            self._reducer.remove()
        self._reducer = GradientReducer(self.placed(), self.topology.group, self._bucket_size_bytes)
        self._frozen = [parameter for parameter, _ in self.placed() if not parameter.requires_grad]

    def before_batch(self) -> None:
        """Call before every batch: before the second one, schedules are chosen for the sizes that the first had."""
        if self._automatic is not None:
            self._automatic.before_batch(self.device)

    @contextmanager
    def averaging(self, active: bool = True) -> Generator[None, None, None]:
        """Run backward within it; gradients are averaged over ranks when it ends."""
        if self._reducer is not None and any(parameter.requires_grad for parameter in self._frozen):
            self._watch_gradients()  # of what was frozen when training began, as finetuning callbacks have it
        reducer = self._reducer if active else None
        synchronise(self._units, active)
        if reducer is not None:
            reducer.start()
        yield
        self.give_back()  # nothing gathered may outlive the optimizer's step
        if reducer is not None:
            reducer.finish()

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Norm of the gradients of the whole model, equal on every rank; every rank must call it."""
        return global_norm(self.placed(), norm_type, self.device)

    def clip_gradients(self, max_norm: float, optimizer: Optimizer | None = None, norm_type: float = 2.0) -> Tensor:
        """Scale gradients so that their norm over the whole model is at most ``max_norm``; gives the norm before."""
        return clip_by_global_norm(self.placed(optimizer), max_norm, norm_type, self.device)

    def release(self) -> None:
        """Leave the module without hooks, so that another strategy may take it."""
        for watcher in (self._automatic, self._reducer):
            if watcher is not None:
                watcher.remove()
        self._automatic = self._reducer = None

    # ---------------------------------------------------------------- state

    def as_dtensors(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state of the module with DTensors for its shards, which know the whole they are part of."""
        return {
            name: self.placements[name].as_dtensor(value) if name in self.placements else value
            for name, value in state.items()
        }

    def parameters_as_dtensors(self) -> dict[str, Any]:
        """Every parameter by name, as :meth:`as_dtensors`."""
        return self.as_dtensors(dict(self.module.named_parameters()))

    def make_buffers_equal(self) -> None:
        """Give every rank the first one's buffers, those of the state; statistics of a batch norm are a rank's own."""
        for name, value in self.module.state_dict().items() if self.topology.world_size > 1 else ():
            if isinstance(value, Tensor) and not isinstance(value, DTensor) and name not in self.placements:
                dist.broadcast(value, 0)

    def state_dict(self) -> dict[str, Any]:
        """The module's state for a sharded checkpoint; every rank must call it."""
        self.make_buffers_equal()
        return self.as_dtensors(self.module.state_dict())

    def whole_state_dict(self, keep: bool) -> dict[str, Any]:
        """The module's state in whole tensors where ``keep`` is set, and nothing elsewhere; every rank must call it."""
        return full_tensors(self.state_dict().items(), keep)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Load whole tensors or DTensors, keeping this rank's part."""
        return self.module.load_state_dict(self.cut(state), strict=strict)

    def cut(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state of whole tensors or DTensors with this rank's part of each."""
        own = self.module.state_dict()
        return {
            name: self.placements[name].as_local(value, own[name]) if name in self.placements else value
            for name, value in state.items()
        }

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state by parameter name, for a sharded checkpoint."""
        return optimizer_state(optimizer, self.module, self.placements)

    def whole_optimizer_state(self, optimizer: Optimizer, keep: bool) -> dict[str, Any]:
        """The optimizer's state as torch writes it, whole, where ``keep`` is set; every rank must call it."""
        return by_position(self.optimizer_state(optimizer), keep)

    def load_optimizer_state(self, optimizer: Optimizer, saved: dict[str, Any]) -> None:
        """Load a state by names or by position, keeping this rank's part."""
        load_optimizer_state(optimizer, self.module, self.placements, saved)
