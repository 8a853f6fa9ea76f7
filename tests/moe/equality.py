"""Runs a sharded layer on forked ranks and compares output, losses and every gradient with the dense reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from moe.reference import auxiliary, batch, cuts, dense, full_layer, shard
from torch import Tensor

from lightning_parm.moe.layer import MoE
from lightning_parm.moe.topology import Topology

TOLERANCE = 1e-12
M, H, E = 6, 8, 8
LOAD = "the load, tokens per expert"


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

    def reference(self, world: int) -> tuple:
        """What all ranks together should have; asked for before the ranks are forked, it is computed only once.

        Tokens of one rank that are routed in several ranges, as by s1, differ from others when something is dropped.
        """
        return expected(self.settings, self.counts, world // self.mp, self.mp if self.schedule == "s1" else 1)


@cache
def _parameters(settings: tuple[tuple[str, Any], ...]) -> dict[str, Tensor]:
    return full_layer(model_dim=M, hidden_dim=H, num_experts=E, **dict(settings)).state_dict()


def _fresh(settings: tuple[tuple[str, Any], ...]) -> MoE:
    """:func:`full_layer`, but with shared storage and without drawing anything, which would take most of the time."""
    layer = MoE(M, H, E, device="meta", dtype=torch.float64, **dict(settings))
    layer.load_state_dict(_parameters(settings), assign=True)
    layer._load = torch.zeros(E)
    return layer


@cache
def expected(settings: tuple[tuple[str, Any], ...], counts: tuple[int, ...], dp: int, parts: int) -> tuple:
    """The reference layer with the gradients of the sum of all ranks' losses, and what each rank should see."""
    layer = _fresh(settings)
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
        layer = _fresh(case.settings)
        layer.parallelize(topology, case.schedule, case.transport, case.chunks)  # type: ignore[arg-type]
        try:
            _compare(case, layer, topology)
        except Exception as error:
            raise AssertionError(f"P={world} {case}") from error
    return len(cases)


def _compare(case: Case, layer: MoE, topology: Topology) -> None:
    reference, batches, outputs, losses, loads = case.reference(topology.world_size)
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
    found = {name: parameter.grad for name, parameter in layer.named_parameters() if parameter.grad is not None}
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert found.keys() == wanted.keys(), f"no gradient of {wanted.keys() - found.keys()}"
    placements = layer.expert_placements()
    shards = summed({name: found.pop(name) for name in placements}, topology.group("expert_data_parallel"))
    for name, total in shards.items():
        close(total, shard(wanted[name], placements[name], topology), f"gradient of {name}")
    mp = summed({**found, LOAD: layer.tokens_per_expert}, topology.group("tensor_parallel"))
    for name, gradient in found.items():
        close(gradient, mp[name] / case.mp, f"mp peers' gradient of {name}")
    for name, total in summed({**found, LOAD: mp[LOAD]}, topology.group("data_parallel")).items():
        close(total, loads if name == LOAD else wanted[name], f"gradient of {name}")


def summed(tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Every tensor's sum over the group, in one collective."""
    if group is None:
        return tensors
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors.values()])
    dist.all_reduce(flat, group=group)
    parts = flat.split([tensor.numel() for tensor in tensors.values()])
    return {name: part.view_as(tensor) for (name, tensor), part in zip(tensors.items(), parts, strict=True)}


def close(found: Tensor | None, wanted: Tensor, what: str) -> None:
    """Assert an error of at most 1e-12, relative to the largest entry."""
    assert found is not None, f"{what} is missing"
    assert found.shape == wanted.shape, f"{what} is {tuple(found.shape)} instead of {tuple(wanted.shape)}"
    if found.numel():
        error, scale = (found - wanted).abs().max().item(), max(1.0, wanted.abs().max().item())
        assert error <= TOLERANCE * scale, f"{what} is off by {error}"
