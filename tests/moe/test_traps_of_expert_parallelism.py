"""The known ways in which expert parallelism goes wrong silently, one test each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from moe.equality import Case, compare
from moe.reference import batch, full_layer, shard

from lightning_parm.moe import collectives, experts, schedules, stages, transport
from lightning_parm.moe.layer import MoE
from lightning_parm.moe.topology import Topology

SIZES = {"model_dim": 6, "hidden_dim": 8, "num_experts": 4}


def _as_it_is(rows: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return rows


def _not_summed(rows: torch.Tensor, _: Any) -> collectives.Pending:
    return collectives.Pending(rows)


LOSSES = (("balance_loss_weight", 0.3),)
MUTATIONS = {
    "duplicates of mp peers are not scaled away": (
        schedules, "scale_gradient", _as_it_is, Case(2, 2, 1, "baseline"), "gradient of experts.w_in is off",
    ),
    "tokens of esp peers are not averaged in the router": (
        schedules, "scale_gradient", _as_it_is, Case(1, 1, 2, "baseline"), "gradient of router.weight is off",
    ),
    "the router's gradient is not summed over the split tokens": (
        schedules, "replicate", _not_summed, Case(2, 2, 1, "s1"), "mp peers' gradient of router.weight is off",
    ),
    "the shards' input gradients are not summed": (
        stages, "replicate", _not_summed, Case(2, 1, 2, "plain"), "input gradient is off",
    ),
    "the shards' outputs are not summed": (
        stages, "reduce", _not_summed, Case(2, 1, 2, "plain"), "output is off",
    ),
    "tokens of which each shard has a part are not summed": (
        schedules, "reduce", _not_summed, Case(2, 1, 2, "s0"), "output is off",
    ),
    "the rows' or the weights' gradients, of which each shard has a part, are not summed": (
        schedules, "replicate", _not_summed, Case(2, 1, 2, "s0"), "input gradient is off",
    ),
    "statistics are not averaged before the balance loss multiplies them": (
        schedules, "reduce", _not_summed, Case(2, 2, 1, "s1", settings=LOSSES), "input gradient is off",
    ),
    "the second hop's gradients are sliced instead of summed": (
        transport, "gather_partial", collectives.gather, Case(1, 1, 2, "s1", "two_hop"), "input gradient is off",
    ),
    "a shared bias gets a share of its gradient": (
        experts, "scale_gradient", _as_it_is, Case(1, 1, 2, "s1", settings=(("expert_bias", True),)),
        "gradient of experts.b_out is off",
    ),
}  # fmt: skip


def _mutated(rank: int, world: int, module: Any, name: str, wrong: Callable[..., Any], case: Case) -> str:
    setattr(module, name, wrong)  # in this forked process only
    try:
        compare(rank, world, [case])
    except AssertionError as error:
        return str(error.__cause__)
    return "nothing"


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_reference_notices_when(mutation: str) -> None:
    module, name, wrong, case, message = MUTATIONS[mutation]
    assert run_ranks(2, compare, [case]) == [1, 1]
    found = run_ranks(2, _mutated, module, name, wrong, case)
    assert any(message in each for each in found), found


def _expert_gradients(rank: int, world: int) -> None:
    for schedule in ("baseline", "plain", "s1", "s2"):
        topology = Topology(world, rank, tensor_parallel_size=1, expert_parallel_size=2)
        layer = full_layer(**SIZES).parallelize(topology, schedule)  # type: ignore[arg-type]
        x, gradient = batch(rank, 3, 6)
        layer(x).backward(gradient)
        found = layer.experts.w_out.grad
        block = full_layer(**SIZES)
        for peer in (rank // 2 * 2, rank // 2 * 2 + 1):
            x, gradient = batch(peer, 3, 6)
            block(x).backward(gradient)
        torch.testing.assert_close(found, shard(block.experts.w_out.grad, (0, 2), topology), rtol=0, atol=1e-12)


def test_an_expert_gradient_is_the_sum_over_the_tokens_of_its_fused_block() -> None:
    run_ranks(4, _expert_gradients)


def _dropping(rank: int, world: int) -> list[torch.Tensor]:
    x, _ = batch(rank // 2, 8, 6)
    outputs = []
    for schedule in ("plain", "s0", "s2", "baseline", "s1"):
        layer = full_layer(**SIZES, capacity_factor=0.5)
        outputs.append(layer.parallelize(Topology(world, rank, 2, 2, 2), schedule)(x).detach())  # type: ignore[arg-type]
        assert 0 < layer.dropped_share < 1
    return outputs


def test_with_a_capacity_all_schedules_agree_but_s1_which_drops_per_slice() -> None:
    for plain, s0, s2, baseline, s1 in run_ranks(4, _dropping):
        torch.testing.assert_close(s0, plain, rtol=0, atol=1e-12)
        torch.testing.assert_close(s2, plain, rtol=0, atol=1e-12)
        torch.testing.assert_close(baseline, plain, rtol=0, atol=1e-12)
        assert not torch.allclose(s1, plain)


def test_a_token_without_any_expert_left_gives_zero() -> None:
    layer = full_layer(model_dim=6, hidden_dim=8, num_experts=1, top_k=1, capacity_factor=0.5)
    x, _ = batch(0, 4, 6)
    y = layer(x)
    assert bool(y[:2].any())
    assert not bool(y[2:].any())
    assert layer.dropped_share == 0.5


def _noise(rank: int, world: int) -> list[torch.Tensor]:
    torch.manual_seed(rank)  # as after work that differs between ranks
    topology = Topology(world, rank, 2, 2, 2)
    x = batch(0, 5, 6)[0]
    results = []
    for schedule in ("s2", "baseline"):
        layer = full_layer(**SIZES, jitter=0.5).parallelize(topology, schedule)  # type: ignore[arg-type]
        results.append(layer(x).detach())
        torch.testing.assert_close(layer.eval()(x), full_layer(**SIZES)(x), rtol=0, atol=1e-12)
    return results


def test_noise_is_equal_on_mp_peers_and_different_on_dp_peers() -> None:
    first, its_peer, second, its_other_peer = run_ranks(4, _noise)
    for schedule in range(2):
        assert torch.equal(first[schedule], its_peer[schedule])
        assert torch.equal(second[schedule], its_other_peer[schedule])
        assert not torch.allclose(first[schedule], second[schedule])


def _ragged(rank: int, world: int) -> list[list[str]]:
    logs = []
    for schedule, counts in (("s1", (3, 4)), ("s2", (3, 4)), ("s1", (0, 1)), ("s2", (0, 0)), ("baseline", (0, 3))):
        layer = full_layer(**SIZES, top_k=1).parallelize(Topology(world, rank, 1, 2, 1), schedule, "two_hop", 2)  # type: ignore[arg-type]
        with torch.no_grad():
            layer.router.weight.zero_()  # ties, so every token goes to expert 0
        log: list[str] = []
        for name in ("all_to_all_single", "all_gather_single", "reduce_scatter_single", "all_reduce"):
            setattr(dist, name, _logged(getattr(dist, name), name, log))
        layer(batch(rank, counts[rank], 6)[0].requires_grad_()).sum().backward()
        for parameter in layer.experts.parameters():
            assert parameter.grad is not None
            assert not bool(parameter.grad[1:].any())
            assert bool(parameter.grad[0].any()) == (rank == 0 and sum(counts) > 0)
        logs.append(log)
    return logs


def _logged(function: Callable[..., Any], name: str, log: list[str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        log.append(name)
        return function(*args, **kwargs)

    return call


def test_ragged_batches_and_idle_experts_neither_hang_nor_leave_gradients_out() -> None:
    first, second = run_ranks(2, _ragged)
    assert first == second  # every rank issues the same collectives
    assert all(first)


def _initial(rank: int, world: int, mp: int, ep: int, esp: int, meta: bool) -> dict[str, torch.Tensor]:
    topology = Topology(world, rank, mp, ep, esp)
    torch.manual_seed(11)
    if meta:
        layer = MoE(**SIZES, num_shared_experts=1, expert_bias=True, device="meta").parallelize(topology)
        torch.manual_seed(11 + rank)  # rank 0's seed counts
        layer.to_empty(device="cpu").reset_parameters()
    else:
        layer = MoE(**SIZES, num_shared_experts=1, expert_bias=True).parallelize(topology)
    torch.manual_seed(11)
    whole = MoE(**SIZES, num_shared_experts=1, expert_bias=True)
    for name, parameter in layer.named_parameters():
        expected = whole.get_parameter(name)
        torch.testing.assert_close(
            parameter, shard(expected, layer.expert_placements().get(name, (None, None)), topology), rtol=0, atol=0
        )
    return dict(layer.named_parameters())


@pytest.mark.parametrize(("mp", "ep", "esp"), [(1, 4, 1), (2, 2, 2), (4, 1, 4), (1, 1, 1)])
@pytest.mark.parametrize("meta", [False, True])
def test_an_expert_starts_with_the_same_weights_at_any_topology(mp: int, ep: int, esp: int, meta: bool) -> None:
    run_ranks(4, _initial, mp, ep, esp, meta)


def test_no_two_experts_start_equal() -> None:
    w_in = MoE(**SIZES).experts.w_in
    assert all(not torch.equal(w_in[a], w_in[b]) for a in range(4) for b in range(a))


def _changing(rank: int, world: int) -> None:
    layer = full_layer(**SIZES).parallelize(Topology(world, rank, 2, 2, 2))
    x, gradient = batch(rank // 2, 5, 6)
    seen = []
    for schedule, kind, chunks in (
        ("s1", "fused", 1),
        ("s2", "two_hop", 3),
        ("plain", "fused", 1),
        ("s0", "fused", 2),
        ("auto", "auto", "auto"),
    ):
        layer.schedule, layer.transport, layer.chunks = schedule, kind, chunks  # type: ignore[assignment]
        layer.zero_grad()
        layer(x).backward(gradient)
        seen.append([parameter.grad.clone() for parameter in layer.parameters()])
    for other in seen[1:]:
        torch.testing.assert_close(other, seen[0], rtol=0, atol=1e-12)


def test_the_schedule_may_change_between_two_batches() -> None:
    run_ranks(4, _changing)
