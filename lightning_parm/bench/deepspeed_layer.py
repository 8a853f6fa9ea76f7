"""DeepSpeed's own MoE layer as a competitor, with the weights of one of ours; needs deepspeed (the extra ``bench``)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parm.moe import MoE, Topology
from lightning_parm.moe.collectives import reduce, replicate
from lightning_parm.moe.cost import Workload
from lightning_parm.moe.experts import Experts


def available(work: Workload) -> bool:
    """Whether DeepSpeed is installed and has a layer for this: N_ESP = N_MP, and a capacity that mp peers can share."""
    capacity = work.rows(work.num_tokens) // work.num_experts
    fits = work.static_shapes and capacity % work.tensor_parallel_size == 0
    return find_spec("deepspeed") is not None and fits and work.tensor_parallel_size == work.expert_shard_size


class DeepSpeedLayer(nn.Module):
    """``deepspeed.moe.layer.MoE`` over the ranks of a topology, its experts cut over mp peers as Megatron does it.

    It routes by a router of its own, which changes no size: with a capacity, every expert is padded to it.

    Args:
        ours: The parallelised layer whose topology, sizes and weights it takes.

    Raises:
        ValueError: If N_ESP is not N_MP, or nothing is dropped.
    """

    def __init__(self, ours: MoE) -> None:
        super().__init__()
        topology = ours.topology
        if topology.tensor_parallel_size != topology.expert_shard_size:
            raise ValueError(
                f"DeepSpeed's layer needs tensor_parallel_size = expert_shard_size, but they are "
                f"{topology.tensor_parallel_size} and {topology.expert_shard_size}."
            )
        if ours.capacity_factor is None:
            raise ValueError("DeepSpeed's layer is compared with a capacity_factor only; this layer has None.")
        layers = _deepspeed(topology)
        self.layer = layers.MoE(
            ours.model_dim,
            _Expert(ours.experts, 0),
            ours.num_experts,
            ep_size=topology.expert_parallel_size,
            k=ours.top_k,
            capacity_factor=ours.capacity_factor,
            min_capacity=0,
            use_rts=False,
            enable_expert_tensor_parallelism=topology.tensor_parallel_size > 1,
            top2_2nd_expert_sampling=False,
        )
        local = len(ours.experts.w_in)
        self.layer.deepspeed_moe.experts.deepspeed_experts = nn.ModuleList(
            _Expert(ours.experts, expert) for expert in range(local)
        )
        gate = self.layer.deepspeed_moe.gate
        torch.nn.init.normal_(gate.wg.weight, generator=torch.Generator().manual_seed(0))  # equal on all ranks
        self.layer.to(ours.experts.w_in.device)
        self.layer.set_deepspeed_parallelism()

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens ``(S, M)``, equal on mp peers, to ``(S, M)``."""
        y: Tensor = self.layer(x)[0]
        return y


class _Expert(nn.Module):
    """One expert's shard: its hidden dim is cut over mp peers, so inputs' gradients and outputs are summed there."""

    def __init__(self, experts: Experts, index: int) -> None:
        super().__init__()
        self.inner = Experts(experts.w_in.shape[-1], experts.w_in.shape[2], 1, experts.activation)
        self.inner.load_state_dict({name: value[index : index + 1] for name, value in experts.state_dict().items()})
        # DeepSpeed copies experts, and groups cannot be copied
        self.group: Callable[[], dist.ProcessGroup | None] = partial(experts.topology.group, "expert_shard")

    def forward(self, rows: Tensor) -> Tensor:
        """Map ``(..., M)`` to ``(..., M)``."""
        group = self.group()
        flat = replicate(rows.reshape(-1, rows.shape[-1]), group).wait()
        return reduce(self.inner(flat, [len(flat)]), group).wait().view(rows.shape)


class _ParallelUnit:
    """What DeepSpeed asks of Megatron's ``mpu``."""

    def __init__(self, topology: Topology) -> None:
        self.get_tensor_model_parallel_rank = lambda: topology.tensor_parallel_rank
        self.get_tensor_model_parallel_world_size = lambda: topology.tensor_parallel_size
        self.get_tensor_model_parallel_group = lambda: topology.group("tensor_parallel")
        self.get_data_parallel_world_size = lambda: topology.data_parallel_size
        self.get_data_parallel_rank = lambda: topology.data_parallel_rank
        self.get_data_parallel_group = lambda: topology.group("data_parallel")


def _deepspeed(topology: Topology) -> Any:
    """Its module of layers, with its groups set up beside ours."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import deepspeed  # type: ignore[import-not-found]
    from deepspeed.moe import layer  # type: ignore[import-not-found]
    from deepspeed.utils import groups  # type: ignore[import-not-found]

    if not deepspeed.comm.is_initialized():
        # compiled at the first use, for AllReduces of inference inside one machine
        import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
        deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
        gather = deepspeed.comm.all_gather_into_tensor
        # gloo takes only flat tensors; the bytes are the same
        deepspeed.comm.all_gather_into_tensor = lambda out, part, **options: gather(out, part.flatten(), **options)
    groups.mpu = _ParallelUnit(topology) if topology.tensor_parallel_size > 1 else None
    return layer
