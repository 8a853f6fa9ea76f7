"""The order of collectives of DeepSpeed since 0.14.5, as a competitor: its algorithm on our primitives.

It drops the tensor-parallel duplicates before the first AlltoAll and restores them right after it::

    route, dispatch, drop | AlltoAll ep | AllGather mp | experts, AllReduce mp
    drop | AlltoAll ep | AllGather mp | combine

Where experts are whole, N_ESP = 1, nothing is restored and summed between the two AlltoAlls.
Taking its order but our router, kernels and transport of rows means that a comparison shows the order alone.
"""

from __future__ import annotations

from torch import Tensor

from lightning_parm.moe.collectives import all_to_all, gather, reduce, replicate, split
from lightning_parm.moe.cost import Collective, Workload
from lightning_parm.moe.routers import Part
from lightning_parm.moe.stages import Layer, lay_out, route


def deepspeed_order(layer: Layer, x: Tensor) -> Tensor:
    """Tokens ``(S, M)``, equal on mp peers, through the layer's experts; returns ``(S, M)``.

    Args:
        layer: A parallelised MoE layer with N_ESP 1 or N_MP, without shared experts.
        x: ``(S, M)``.

    Raises:
        ValueError: If N_ESP is neither 1 nor N_MP.
    """
    topology = layer.topology
    shards = topology.expert_shard_size
    if shards not in (1, topology.tensor_parallel_size):
        raise ValueError(
            f"The order of DeepSpeed needs expert_shard_size = 1 or tensor_parallel_size, but they are {shards} and "
            f"{topology.tensor_parallel_size}."
        )
    mp, ep = topology.group("tensor_parallel"), topology.group("expert_parallel")
    choice, _ = route(layer, x, [Part(topology.data_parallel_rank, 0, len(x))])
    routing, plan = lay_out(layer, choice, "two_hop", [len(x)], share=True)
    (peers,), (layout,) = plan.sizes, plan.layouts
    # rows from each ep peer, in the exchange that this mp peer takes part in and in those beside it
    width = topology.expert_parallel_size
    lanes = [layout.receive[first : first + width] for first in range(0, shards * width, width)]
    own = lanes[topology.expert_shard_rank]
    widths = [sum(lane) for lane in lanes]

    rows = split(routing.dispatch(x), peers, mp).wait()
    rows = all_to_all(rows, layout.send, own, ep).wait()
    if shards > 1:
        rows = replicate(gather(rows, widths, mp).wait(), mp).wait()
    rows = layout.by_source(layer.experts(layout.by_expert(rows), layout.per_expert))
    if shards > 1:
        rows = split(reduce(rows, mp).wait(), widths, mp).wait()
    rows = all_to_all(rows, own, layout.send, ep).wait()
    return routing.combine(gather(rows, peers, mp).wait())


def calls(work: Workload) -> list[Collective]:
    """What the order sends, forward and backward.

    Example:
        >>> work = Workload(num_tokens=8, model_dim=4, hidden_dim=4, num_experts=2, top_k=1, tensor_parallel_size=2,
        ...                 expert_parallel_size=2, expert_shard_size=2)
        >>> [call.kind for call in calls(work)][:5]
        ['all_to_all', 'all_to_all', 'all_gather', 'all_gather', 'all_reduce']
    """
    size = work.rows(work.num_tokens, work.tensor_parallel_size) * work.model_dim * work.element_bytes
    mp, esp, ep = work.tensor_parallel_size, work.expert_shard_size, work.expert_parallel_size
    once = [("all_to_all", "expert_parallel", ep, size // mp)] * (2 * (ep > 1))
    once += [("all_gather", "tensor_parallel", mp, size)] * ((mp > 1) + (esp > 1))
    once += [("all_reduce", "expert_shard", esp, size)] * (esp > 1)
    return [Collective(*call, backward) for backward in (False, True) for call in once]  # type: ignore[arg-type]
