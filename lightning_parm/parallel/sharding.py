"""Parameters, gradients and optimizer state sharded over data-parallel ranks, by torch's FSDP2 (``fully_shard``).

=================  ======================  =====================================================================
parameter          sharded over            dim
=================  ======================  =====================================================================
dense              data_parallel           the first; of a tensor-parallel one the largest that is not cut yet
expert             expert_data_parallel    the largest that is cut neither over ep nor over esp: M of both weights
no dim fits        not at all              it stays on every replica, and its gradient is averaged as always
=================  ======================  =====================================================================

Blocks (members of a ``ModuleList``) are gathered when they run and given back after; all else in the module is one more
unit, gathered while a step runs. Both kinds of parameters of a block travel beside each other, each over its own ranks.

A module that optimises by hand steps in the middle of what would gather that last unit. There every module that holds
parameters itself is a unit, gathered whenever it is called and given back after; what belongs to no such call stays on
every replica: parameters of the LightningModule itself and of a ``ParameterList``, and tied ones.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only

from lightning_parm.moe import MoE, Topology
from lightning_parm.moe.collectives import scale_gradient
from lightning_parm.moe.experts import Experts
from lightning_parm.parallel.placement import moe_layers

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def shard(module: nn.Module, topology: Topology, dense_mesh: DeviceMesh, sparse_mesh: DeviceMesh) -> None:
    """Shard ``module`` in place, unless it or its ``configure_model`` did that; replicas must be equal before.

    Args:
        module: A model whose dense layers and mixtures are cut over the ranks already.
        topology: The sizes.
        dense_mesh: The ranks by data_parallel and tensor_parallel.
        sparse_mesh: The ranks by expert_data_parallel, expert_parallel and expert_shard.
    """
    if units_of(module):
        return
    plan: dict[nn.Parameter, ShardPlacementResult] = {}
    dense = FSDPMeshInfo(dense_mesh["data_parallel"], shard_mesh_dim=0)
    sparse = FSDPMeshInfo(sparse_mesh["expert_data_parallel"], shard_mesh_dim=0)
    if topology.data_parallel_size == topology.expert_data_parallel_size:
        sparse = dense  # the same ranks: one process group takes one description
    of_experts: set[nn.Parameter] = set()
    for _, layer in moe_layers(module):
        for name, cuts in layer.expert_placements().items():
            parameter = layer.get_parameter(name)
            of_experts.add(parameter)
            dim = _free_dim(parameter, set(cuts), topology.expert_data_parallel_size)
            if dim is not None and topology.expert_data_parallel_size > 1:
                plan[parameter] = ShardPlacementResult(Shard(dim), sparse)
    for parameter in module.parameters():
        if parameter not in of_experts and parameter.dim() > 0 and topology.data_parallel_size > 1:
            dim = _dense_dim(parameter, topology.data_parallel_size)
            if dim is not None:
                plan[parameter] = ShardPlacementResult(Shard(dim), dense)
    by_hand = isinstance(module, LightningModule) and not module.automatic_optimization
    units = [*_called(module)] if by_hand else [*_blocks(module), module]
    if by_hand:
        kept = _tied(module) | ({*module.parameters()} - {p for unit in units for p in unit.parameters()})
        plan = {parameter: cut for parameter, cut in plan.items() if parameter not in kept}
    whole = {parameter for parameter in module.parameters() if parameter not in plan}
    for _, layer in moe_layers(module):
        _scale_fresh_gradients(layer.experts, set(plan), topology)
    for unit in units:
        if by_hand:
            unit.register_forward_hook(_own_output)
        again = True if by_hand else None  # None: the outermost unit stays gathered from forward to backward
        fully_shard(
            unit, mesh=dense.mesh, reshard_after_forward=again, shard_placement_fn=plan.get, ignored_params=whole
        )
    if isinstance(module, LightningModule) and not by_hand:
        for step in STEPS:
            register_fsdp_forward_method(module, step)
            if step != "training_step":
                setattr(module, step, _then_give_back(module, getattr(module, step)))
        # torch fears for the hook on what self(...) returns; that on what the step returns, its loss, is enough
        warnings.filterwarnings("ignore", rf"FSDP2-wrapped module \({type(module).__name__}\) returned a view")


def units_of(module: nn.Module) -> list[FSDPModule]:
    """Every part of ``module`` that is gathered and given back on its own, whoever sharded it; found once, for speed.

    Example:
        >>> units_of(nn.Linear(2, 2))
        []
    """
    return [child for child in module.modules() if isinstance(child, FSDPModule)]


def synchronise(units: Iterable[FSDPModule], active: bool) -> None:
    """Whether the next backward pass averages the gradients of sharded parameters, or keeps and adds them up."""
    for unit in units:
        unit.set_requires_gradient_sync(active, recurse=False)


def give_back(units: Iterable[FSDPModule]) -> None:
    """Free what is gathered, so that the parameters of the module are the shards; no communication."""
    for unit in units:
        unit.reshard()


def _then_give_back(module: nn.Module, step: Callable[..., Any]) -> Callable[..., Any]:
    """No backward follows an evaluation, which would free what ``module`` itself has gathered."""
    units = units_of(module)

    @wraps(step)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        output = step(*args, **kwargs)
        give_back(units)
        return output

    return evaluate


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Members of the outermost module lists, those with parameters."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from (block for block in child if any(True for _ in block.parameters()))
        else:
            yield from _blocks(child)


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Blocks, mixtures and the outermost modules that hold parameters themselves; inner ones before outer ones."""
    for child in module.children():
        container = isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict))
        holds = isinstance(child, MoE) or any(True for _ in child.parameters(recurse=False))
        if isinstance(child, nn.ModuleList):
            for block in child:
                if isinstance(block, (nn.ModuleList, nn.ModuleDict)):
                    yield from _called(block)
                elif any(True for _ in block.parameters()):
                    yield block
        elif holds and not container:
            yield from _blocks(child)
            yield child
        else:
            yield from _called(child)


def _own_output(_: nn.Module, __: Any, output: Any) -> Any:
    """Copies what is a view, such as what ``nn.Linear`` returns: FSDP2's hook on a view is lost when it is changed."""
    return tree_map_only(Tensor, lambda t: t.clone() if t.requires_grad and t._base is not None else t, output)


def _tied(module: nn.Module) -> set[nn.Parameter]:
    uses = Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))
    return {parameter for parameter, number in uses.items() if number > 1}


def _free_dim(tensor: Tensor, taken: set[int | None], size: int) -> int | None:
    """The largest dim of the local part of ``tensor`` that is not taken and that ``size`` divides, if there is one."""
    shape = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).shape
    free = [dim for dim, length in enumerate(shape) if dim not in taken and length % size == 0]
    return max(free, key=lambda dim: shape[dim], default=None)


def _dense_dim(parameter: nn.Parameter, size: int) -> int | None:
    if not isinstance(parameter, DTensor):
        return 0
    taken: set[int | None] = {placement.dim for placement in parameter.placements if isinstance(placement, Shard)}
    return _free_dim(parameter, taken, size)


def _scale_fresh_gradients(experts: Experts, sharded: set[nn.Parameter], topology: Topology) -> None:
    """FSDP divides the sum over edp by N_EDP, but the tokens are those of N_DP ranks."""
    names = [name for name, parameter in experts.named_parameters() if parameter in sharded]
    factor = topology.expert_data_parallel_size / topology.data_parallel_size
    if not names or factor == 1.0:
        return

    def hook(experts: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        rows, per_expert, prepare = (*args, None)[:3]
        gathered = [experts.get_parameter(name) for name in names]  # other objects than the shards

        def scaled(weight: Tensor) -> Tensor:
            scale = any(weight is parameter for parameter in gathered)
            prepared: Tensor = prepare(weight) if prepare is not None else weight
            return scale_gradient(prepared, factor) if scale else prepared

        return rows, per_expert, scaled

    experts.register_forward_pre_hook(hook)
