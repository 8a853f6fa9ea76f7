"""Where each parameter of a model lives on the ranks, and what follows for gradients, norms and checkpoints.

=====================  =========================  ==========================  =====================================
parameter              same values on             gradient averaged over      in a sharded checkpoint
=====================  =========================  ==========================  =====================================
replicated             all ranks                  data_parallel               one full tensor
expert shard of a MoE  expert_data_parallel       expert_data_parallel        DTensor on the sparse mesh
the same, sharded      nobody                     nobody: FSDP did it         DTensor on the sparse mesh
tensor-parallel        data_parallel              data_parallel               DTensor on the dense mesh, as it is
sharded over           whatever its mesh leaves   nobody: FSDP did it         DTensor, as it is
data_parallel
=====================  =========================  ==========================  =====================================
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from lightning_parm.moe import MoE, Topology
from lightning_parm.moe.topology import Axis


@dataclass(frozen=True)
class ParameterPlacement:
    """Where one parameter lives.

    Args:
        reduce_axis: Axis of the topology over which gradients are averaged; None where its own mesh reduces them.
        num_copies: Ranks of the world that hold the same values.
        gradient_scale: Factor for each fresh gradient, so that averaging over ``reduce_axis`` is all that is left. An
            expert's gradient is a sum over the tokens of its fused group, hence N_EDP / N_DP.
        mesh: Mesh of the DTensor that stands for a part of an expert at the checkpoint's door; None for others.
        placements: Placements on ``mesh``.
    """

    reduce_axis: Axis | None
    num_copies: int
    gradient_scale: float = 1.0
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()

    def as_dtensor(self, local: Tensor) -> Tensor:
        """The DTensor whose shard on this rank is ``local``; other parameters are returned as they are."""
        if self.mesh is None or (isinstance(local, DTensor) and local.device_mesh == self.mesh):
            return local
        return DTensor.from_local(_local(local), self.mesh, self.placements, run_check=False)

    def as_local(self, value: Tensor, like: Tensor) -> Tensor:
        """Cut ``value``, full or a DTensor, to what this rank holds of ``like``; no communication."""
        if self.mesh is not None:
            if value.shape == like.shape and getattr(value, "device_mesh", None) == getattr(like, "device_mesh", None):
                return value
            if not isinstance(value, DTensor):
                value = distribute_tensor(value.to(like.device), self.mesh, self.placements, src_data_rank=None)
            local = value.to_local()
            if isinstance(like, DTensor):
                return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False)
            return local
        if isinstance(like, DTensor) and not isinstance(value, DTensor):
            return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
        return value if isinstance(like, DTensor) else _local(value)

    def full_shape(self, part: Tensor) -> torch.Size:
        """Shape of the whole parameter of which ``part`` is what this rank holds."""
        if self.mesh is None:
            return part.shape
        shape = list(_local(part).shape)
        for dim, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                shape[placement.dim] *= self.mesh.size(dim)
        return torch.Size(shape)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def moe_layers(module: nn.Module) -> Iterator[tuple[str, MoE]]:
    """Every MoE layer of ``module`` with its name, each once, in the order of the module tree.

    Example:
        >>> [name for name, _ in moe_layers(nn.Sequential(nn.Linear(4, 4), MoE(4, 8, 2)))]
        ['1']
    """
    for name, child in module.named_modules():
        if isinstance(child, MoE):
            yield name, child


def place_parameters(module: nn.Module, topology: Topology, device_type: str) -> dict[str, ParameterPlacement]:
    """The placement of every parameter of ``module``, by its name; tied parameters appear under each of their names.

    Args:
        module: A model whose MoE layers are parallelised over ``topology``.
        topology: The sizes and groups of the run.
        device_type: Device type of the meshes, for instance ``"cuda"``.
    """
    world_size = topology.world_size
    experts: dict[str, ParameterPlacement] = {}
    for prefix, layer in moe_layers(module):
        if layer.topology.world_size == 1:
            continue
        for name, dims in layer.expert_placements().items():
            parameter = layer.get_parameter(name)
            sharded = isinstance(parameter, DTensor)
            replicas = 1 if sharded else topology.expert_data_parallel_size
            placements: list[Placement] = [parameter.placements[0] if isinstance(parameter, DTensor) else Replicate()]
            for dim, size in zip(dims, (topology.expert_parallel_size, topology.expert_shard_size), strict=True):
                placements.append(Replicate() if dim is None else Shard(dim))
                replicas *= size if dim is None else 1
            experts[f"{prefix}.{name}" if prefix else name] = ParameterPlacement(
                reduce_axis=None if sharded else "expert_data_parallel",
                num_copies=replicas,
                gradient_scale=1.0 if sharded else topology.expert_data_parallel_size / topology.data_parallel_size,
                mesh=topology.sparse_mesh(device_type),
                placements=tuple(placements),
            )
    placed: dict[str, ParameterPlacement] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in experts:
            placed[name] = experts[name]
        elif isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            axes = mesh.mesh_dim_names or ()
            shards = math.prod(mesh.size(d) for d, p in enumerate(parameter.placements) if isinstance(p, Shard))
            placed[name] = ParameterPlacement(
                reduce_axis=None if "data_parallel" in axes else "data_parallel", num_copies=world_size // shards
            )
        else:
            placed[name] = ParameterPlacement(reduce_axis="data_parallel", num_copies=world_size)
    return placed


def check_groups(optimizer: Optimizer) -> None:
    """Fused and foreach kernels take the parameters of a group together, which must then lie on the same ranks.

    Raises:
        ValueError: If such a group mixes whole parameters and shards, or shards over different ranks.
    """
    for index, group in enumerate(optimizer.param_groups):
        meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in group["params"]}
        kernels = [name for name in ("fused", "foreach") if group.get(name)]
        if kernels and len(meshes) > 1:
            raise ValueError(
                f"{kernels[0]}=True in group {index} of {type(optimizer).__name__}, whose parameters are spread over "
                f"the ranks in {len(meshes)} ways: torch's kernel cannot take them together. Leave {kernels[0]} out, "
                "or give the parameters of each way (of each device_mesh, those without one too) a group of their own."
            )


def make_replicas_equal(module: nn.Module, placements: dict[str, ParameterPlacement], topology: Topology) -> None:
    """Give every replica the values of the first rank that holds them, whatever the ranks' seeds; all ranks call it."""
    replicated = [buffer for buffer in module.buffers() if not isinstance(buffer, DTensor)]
    by_axis: dict[Axis, list[Tensor]] = {
        "tensor_parallel": list(replicated),
        "data_parallel": list(replicated),
        "expert_data_parallel": [],
    }
    for name, parameter in module.named_parameters():
        placement = placements[name]
        if placement.reduce_axis is not None:
            shard = _local(parameter).detach()
            by_axis[placement.reduce_axis].append(shard)
            if placement.num_copies == topology.world_size:
                by_axis["tensor_parallel"].append(shard)
    for axis, tensors in by_axis.items():
        group = topology.group(axis)
        if group is not None:
            source = dist.get_global_rank(group, 0)
            for tensor in tensors:
                dist.broadcast(tensor, source, group=group)
