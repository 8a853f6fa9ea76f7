"""The benchmark of schedules: equal results from all orders, the physical limit, and one run on an emulated cluster."""

import io
from collections import Counter
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from distributed import run_ranks
from rich.console import Console

from lightning_parm.bench.bare import bare
from lightning_parm.bench.contest import Contest
from lightning_parm.bench.deepspeed_layer import DeepSpeedLayer, available
from lightning_parm.bench.deepspeed_order import calls as deepspeed_calls
from lightning_parm.bench.deepspeed_order import deepspeed_order
from lightning_parm.bench.emulation import why_unavailable
from lightning_parm.bench.limit import limit_seconds
from lightning_parm.bench.schedules import render, schedules
from lightning_parm.bench.training import training
from lightning_parm.moe import MoE, Topology, calibrate
from lightning_parm.moe.cost import Collective, Workload, collectives
from lightning_parm.moe.links import PUBLISHED_32_GPUS
from lightning_parm.moe.prediction import Candidate

REASON = why_unavailable()
KINDS = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")


def compare_orders(rank: int, world_size: int, static: bool, expert_parallel_size: int, shards: int) -> float:
    topology = Topology(world_size, rank, 2, expert_parallel_size, shards)
    torch.manual_seed(0)
    layer = MoE(
        8, 12, 4, top_k=2, capacity_factor=8.0 if static else None, static_shapes=static, dtype=torch.float64
    ).parallelize(topology, "plain" if shards == 2 else "s2")
    torch.manual_seed(topology.data_parallel_rank)
    x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(6, 8, dtype=torch.float64)
    results = []
    for order in (layer, lambda tokens: deepspeed_order(layer, tokens)):
        x.grad = None
        layer.zero_grad()
        y = order(x)
        y.backward(gradient)
        grads = [x.grad, *(parameter.grad for parameter in layer.parameters())]
        results.append([y.detach(), *(grad.clone() for grad in grads if grad is not None)])
    assert len(results[0]) == len(results[1]) == 5
    return max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("expert_parallel_size", "shards"), [(2, 2), (4, 1), (2, 1)])
def test_the_order_of_deepspeed_computes_the_same_layer(static: bool, expert_parallel_size: int, shards: int) -> None:
    assert max(run_ranks(4, compare_orders, static, expert_parallel_size, shards)) < 1e-12


def refuse(rank: int, world_size: int) -> None:
    layer = MoE(8, 8, 2).parallelize(Topology(world_size, rank, 2, 2, 1))
    with pytest.raises(ValueError, match="needs tensor_parallel_size = expert_shard_size, but they are 2 and 1"):
        DeepSpeedLayer(layer)
    layer = MoE(8, 8, 2).parallelize(Topology(world_size, rank, 1, 1, 2))
    with pytest.raises(ValueError, match="needs expert_shard_size = 1 or tensor_parallel_size, but they are 2 and 1"):
        deepspeed_order(layer, torch.zeros(2, 8))
    layer.topology = Topology.local()
    with pytest.raises(ValueError, match="compared with a capacity_factor only; this layer has None"):
        DeepSpeedLayer(layer)


def test_deepspeeds_own_layer_is_timed_only_where_it_exists() -> None:
    fits = {"num_tokens": 32, "model_dim": 8, "hidden_dim": 8, "num_experts": 2, "top_k": 1, "capacity_factor": 1.0}
    sizes = {"tensor_parallel_size": 2, "expert_parallel_size": 2, "expert_shard_size": 2, "static_shapes": True}
    assert available(Workload(**fits, **sizes)) == (find_spec("deepspeed") is not None)
    for change in ({"expert_shard_size": 1}, {"static_shapes": False}, {"num_tokens": 34}):
        assert not available(Workload(**{**fits, **sizes, **change}))


def test_deepspeed_and_its_order_refuse_what_they_cannot_run() -> None:
    run_ranks(2, refuse)


def run_bare(rank: int, world_size: int) -> None:
    topology = Topology(world_size, rank, 2, 2, 2)
    sizes = {"tensor_parallel_size": 2, "expert_parallel_size": 2, "expert_shard_size": 2, "static_shapes": True}
    work = Workload(32, 8, 8, 2, 2, **sizes, capacity_factor=1.25, auxiliary_loss=False, num_matrices=2)
    cpu = torch.device("cpu")
    contest = Contest(topology, work, "gelu", cpu)
    reached: list[int] = []
    contest.layer.experts.register_forward_pre_hook(lambda _, inputs: reached.append(len(inputs[0])))
    for candidate in map(Candidate, ("baseline", "plain", "s0", "s1", "s2", "deepspeed")):
        contest.both(partial(contest.forward, candidate))
        assert work.rows_at_experts(candidate.schedule) == reached.pop()
        calls = deepspeed_calls(work) if candidate.schedule == "deepspeed" else collectives(work, *candidate)
        action = bare(candidate, calls, work, topology, cpu)
        with ExitStack() as stack:
            spies = {
                kind: stack.enter_context(patch.object(calibrate, name, wraps=getattr(calibrate, name)))
                for kind, name in ((kind, f"start_{kind}") for kind in KINDS)
            }
            action()
        assert Counter({kind: spy.call_count for kind, spy in spies.items()}) == Counter(call.kind for call in calls)


def test_bare_schedules_send_and_multiply_what_the_layer_does() -> None:
    run_ranks(4, run_bare)


def compare_layers(rank: int, world_size: int) -> float:
    topology = Topology(world_size, rank, 2, 2, 2)
    torch.manual_seed(0)
    layer = MoE(
        8, 12, 4, 1, 8.0, "gelu", normalize_weights=False, static_shapes=True, num_shared_experts=0
    ).parallelize(topology, "plain")
    theirs = DeepSpeedLayer(layer)
    with torch.no_grad():
        layer.router.weight.copy_(theirs.layer.deepspeed_moe.gate.wg.weight)
    torch.manual_seed(topology.data_parallel_rank)
    x = torch.randn(6, 8, requires_grad=True)
    results = []
    for run in (layer, theirs):
        x.grad = None
        y = run(x)
        y.square().sum().backward()
        results.append((y.detach(), x.grad))
    return max(float((ours - other).abs().max()) for ours, other in zip(*results, strict=True))


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed: pip install -e '.[bench]'")
@pytest.mark.filterwarnings("ignore")  # not ours
def test_deepspeeds_own_layer_computes_the_same_from_the_same_weights() -> None:
    assert max(run_ranks(4, compare_layers, timeout=180)) < 1e-5


def test_the_limit_counts_what_the_busiest_link_must_carry() -> None:
    topology = Topology(4, 0, 2, 2, 2)  # on two nodes of two ranks

    def limit(kind: str, axis: str, inter: float = 1.0, intra: float = float("inf")) -> float:
        size = topology.size(axis)  # type: ignore[arg-type]
        call = Collective(kind, axis, size, num_bytes=80, backward=False)  # type: ignore[arg-type]
        return limit_seconds([call], topology, 2, inter, intra)

    assert limit("all_to_all", "fused") == 80  # two ranks send half of their bytes out
    assert limit("all_to_all", "fused", float("inf"), 1.0) == 40  # and a quarter to each other
    assert limit("all_to_all", "expert_parallel") == 80
    assert limit("all_gather", "tensor_parallel") == 0  # inside a node
    assert limit("all_gather", "tensor_parallel", float("inf"), 1.0) == 80
    assert limit("all_reduce", "expert_shard", float("inf"), 1.0) == 2 * limit(
        "reduce_scatter", "expert_shard", float("inf"), 1.0
    )
    assert limit("all_gather", "fused") == 40  # half of the result enters a node, once


def test_without_a_cluster_it_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="start this with torchrun, or add --emulate nodes=2"):
        schedules()


@pytest.mark.parametrize(("batch", "steps"), [(3, 12), (4, 4)])
def test_a_training_benchmark_that_cannot_compare_is_refused(batch: int, steps: int) -> None:
    message = f"global_batch_size={batch} must be a multiple of the 4 ranks, and steps={steps} at least 5"
    with pytest.raises(ValueError, match=message):
        training(global_batch_size=batch, steps=steps)


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_an_emulated_run_times_predicts_and_draws_every_candidate(tmp_path: Path) -> None:
    PUBLISHED_32_GPUS.save(tmp_path / "links.json")
    result = schedules(
        model_dim=32,
        hidden_dim=32,
        sequence_length=32,
        max_chunks=1,
        repetitions=2,
        emulate="nodes=2,per_node=2,inter=4mbit",
        calibration=str(tmp_path / "links.json"),
        plot=str(tmp_path / "plot.svg"),
    )
    names = {row["candidate"] for row in result["candidates"]}
    assert names == {"baseline", "deepspeed", "plain", "s0", "s1 fused", "s1 two_hop", "s2 fused", "s2 two_hop"}
    assert result["choice"] in names - {"baseline", "deepspeed"}
    assert result["largest_difference"] < 1e-5
    for row in result["candidates"]:
        assert row["lowest_ms"] <= row["median_ms"] <= row["highest_ms"]
        assert row["limit_ms"] > 0
    by_name = {row["candidate"]: row for row in result["candidates"]}
    assert by_name["baseline"]["limit_ms"] == pytest.approx(2 * by_name["plain"]["limit_ms"], rel=0.1)
    assert by_name["baseline"]["median_ms"] > by_name["baseline"]["limit_ms"] * 0.5
    assert (tmp_path / "plot.svg").read_text().startswith("<?xml")
    console = Console(width=160, file=io.StringIO())
    console.print(render(result))
    assert result["choice"] in console.file.getvalue()  # type: ignore[attr-defined]
    assert render({"candidates": []}) == ""
