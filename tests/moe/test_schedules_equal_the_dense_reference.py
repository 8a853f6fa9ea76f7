"""Output and every gradient of every schedule equal the dense float64 reference, on up to 8 ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from moe.reference import dense, full_layer, shard, tokens

from lightning_parm.moe.topology import Topology

TOLERANCE = 1e-12
M, H, E = 6, 8, 4


def close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert found.shape == expected.shape, f"{what}: {tuple(found.shape)} instead of {tuple(expected.shape)}"
    error = (found - expected).abs().max().item() if found.numel() else 0.0
    assert error <= TOLERANCE * max(1.0, expected.abs().max().item() if expected.numel() else 0.0), (
        f"{what}: off by {error}"
    )


def check(rank: int, world: int, cases: list[tuple]) -> None:
    for mp, ep, esp, schedule, transport, chunks, top_k, counts in cases:
        name = f"P={world} mp={mp} ep={ep} esp={esp} {schedule} {transport} chunks={chunks} k={top_k} S={counts}"
        topology = Topology(world, rank, mp, ep, esp)
        settings = {"model_dim": M, "hidden_dim": H, "num_experts": E, "top_k": top_k}
        reference = full_layer(**settings)
        inputs = []
        for d in range(topology.data_parallel_size):
            x, gradient = tokens(d, counts[d % len(counts)], M)
            x.requires_grad_()
            y = dense(reference, x)
            y.backward(gradient)
            inputs.append((x, gradient, y))

        layer = full_layer(**settings).parallelize(topology, schedule, transport, chunks)
        x, gradient, y = inputs[topology.data_parallel_rank]
        own = x.detach().clone().requires_grad_()
        out = layer(own)
        out.backward(gradient)
        close(out, y, f"{name}: output")
        close(own.grad, x.grad, f"{name}: input gradient")
        for label, dims in layer.expert_placements().items():
            found = layer.get_parameter(label).grad
            assert found is not None, f"{name}: {label} has no gradient"
            if topology.group("expert_data_parallel") is not None:
                dist.all_reduce(found, group=topology.group("expert_data_parallel"))
            close(found, shard(reference.get_parameter(label).grad, dims, topology), f"{name}: {label} gradient")
        mean = layer.router.weight.grad.clone()
        if topology.group("data_parallel") is not None:
            dist.all_reduce(mean, group=topology.group("data_parallel"))
        close(mean, reference.router.weight.grad, f"{name}: router gradient")


def grid(world: int) -> list[tuple]:
    sizes = [n for n in range(1, world + 1) if world % n == 0]
    cases = []
    for mp in sizes:
        for ep in sizes:
            for esp in sizes:
                if world % (ep * esp) or E % ep or H % esp:
                    continue
                for schedule in ("baseline", "plain", "s1", "s2"):
                    if schedule == "plain" and mp != esp:
                        continue
                    for transport in ("fused", "two_hop"):
                        for chunks in (1, 2, 3):
                            if schedule in ("plain", "baseline") and (transport, chunks) != ("fused", 1):
                                continue
                            for top_k in (1, 2, 4):
                                cases.append((mp, ep, esp, schedule, transport, chunks, top_k, (5, 4, 0, 7)))
    return cases


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_schedule_equals_the_reference(world: int) -> None:
    run_ranks(world, check, grid(world))
