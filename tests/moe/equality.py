"""Runs a sharded layer on forked ranks and compares output, losses and every gradient with the dense reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch.distributed as dist
from moe.reference import auxiliary, batch, cuts, dense, full_layer, shard
from torch import Tensor

from lightning_parm.moe.layer import MoE
from lightning_parm.moe.topology import Topology

TOLERANCE = 1e-12
M, H, E = 6, 8, 8


@dataclass(frozen=True)
class Case:
    """One configuration: sizes, schedule, and what the layer is made with."""

    mp: int
    ep: int
    esp: int
    schedule: str
    transport: str = "fused"
    chunks: int = 1
    counts: tuple[int, ...] = (5, 4, 0, 7)
    settings: tuple[tuple[str, Any], ...] = field(default=())

    @property
    def routed_parts(self) -> int:
        """Ranges of one rank's tokens that are routed independently, which matters when something is dropped."""
        return self.mp if self.schedule == "s1" else 1


@cache
def expected(settings: tuple[tuple[str, Any], ...], counts: tuple[int, ...], dp: int, parts: int) -> tuple:
    """The reference layer with the gradients of the sum of all ranks' losses, and what each rank should see."""
    layer = full_layer(model_dim=M, hidden_dim=H, num_experts=E, **dict(settings))
    batches = [batch(stream, counts[stream % len(counts)], M) for stream in range(dp)]
    inputs = [x.requires_grad_() for x, _ in batches]
    outputs, loads = zip(*(dense(layer, x, parts) for x in inputs), strict=True)
    scope = [sum(loads)] * dp if layer.balance_scope == "global_batch" else loads
    losses = [auxiliary(layer, x, load) for x, load in zip(inputs, scope, strict=True)]
    total = sum((y * g).sum() for y, (_, g) in zip(outputs, batches, strict=True)) + sum(losses)
    total.backward()
    return layer, batches, outputs, losses, sum(loads)


def compare(rank: int, world: int, cases: list[Case]) -> int:
    """Assert equality of every case on this rank; returns how many there were."""
    for case in cases:
        topology = Topology(world, rank, case.mp, case.ep, case.esp)
        layer = full_layer(model_dim=M, hidden_dim=H, num_experts=E, **dict(case.settings))
        layer.parallelize(topology, case.schedule, case.transport, case.chunks)  # type: ignore[arg-type]
        try:
            _compare(case, layer, topology)
        except Exception as error:
            raise AssertionError(f"P={world} {case}") from error
    return len(cases)


def _compare(case: Case, layer: MoE, topology: Topology) -> None:
    reference, batches, outputs, losses, loads = expected(
        case.settings, case.counts, topology.data_parallel_size, case.routed_parts
    )
    mine = topology.data_parallel_rank
    first, last = 0, len(outputs[mine])
    if layer.sequence_parallel:
        first, last = cuts(last, case.mp)[topology.tensor_parallel_rank]
    x, gradient = (tensor.detach()[first:last] for tensor in batches[mine])
    x = x.clone().requires_grad_()
    out = layer(x)
    ((out * gradient).sum() + layer.auxiliary_loss).backward()
    close(out, outputs[mine][first:last], "output")
    close(x.grad, batches[mine][0].grad[first:last], "input gradient")
    close(layer.auxiliary_loss, losses[mine], "auxiliary loss")
    close(summed(layer.tokens_per_expert, dist.group.WORLD), loads, "tokens per expert")
    placements = layer.expert_placements()
    for name, parameter in layer.named_parameters():
        whole = reference.get_parameter(name).grad
        found = parameter.grad
        assert found is not None, f"{name} has no gradient"
        if name in placements:
            found = summed(found, topology.group("expert_data_parallel"))
            close(found, shard(whole, placements[name], topology), f"gradient of {name}")
        else:
            close(found, summed(found, topology.group("tensor_parallel")) / case.mp, f"mp peers' gradient of {name}")
            close(summed(found, topology.group("data_parallel")), whole, f"gradient of {name}")


def summed(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    tensor = tensor.detach().clone()
    if group is not None:
        dist.all_reduce(tensor, group=group)
    return tensor


def close(found: Tensor | None, wanted: Tensor, what: str) -> None:
    """Assert an error of at most 1e-12, relative to the largest entry."""
    assert found is not None, f"{what} is missing"
    assert found.shape == wanted.shape, f"{what} is {tuple(found.shape)} instead of {tuple(wanted.shape)}"
    if found.numel():
        error, scale = (found - wanted).abs().max().item(), max(1.0, wanted.abs().max().item())
        assert error <= TOLERANCE * scale, f"{what} is off by {error}"
