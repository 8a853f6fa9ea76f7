"""Every router's choice in plain and in awkward cases: ties, NaN, groups, biases, idle experts, wrong numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed import run_ranks
from moe.reference import batch, full_layer

from lightning_parm.moe.layer import MoE
from lightning_parm.moe.routers import Router
from lightning_parm.moe.topology import Topology


def made(**kwargs: Any) -> Router:
    router = Router(**{"model_dim": 4, "num_experts": 4, "top_k": 2, "dtype": torch.float64, **kwargs})
    with torch.no_grad():
        router.weight.copy_(torch.eye(4))  # the scores are the token
    return router


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_ties_go_to_the_lowest_expert(kind: str) -> None:
    choice, _ = made(kind=kind)(torch.zeros(3, 4, dtype=torch.float64))
    assert choice.expert.tolist() == [[0, 1]] * 3
    torch.testing.assert_close(choice.weight, torch.full((3, 2), 0.5, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "uniform", "expert_choice"])
def test_a_nan_token_goes_to_valid_experts_and_spoils_no_other_token(kind: str) -> None:
    layer = full_layer(model_dim=6, hidden_dim=8, num_experts=4, router=kind)
    x, _ = batch(0, 5, 6)
    y = layer(x)
    x[2, 3] = torch.nan
    spoiled = layer(x)
    others = [0, 1, 3, 4]
    assert bool(spoiled[others].isfinite().all())
    assert kind == "expert_choice" or bool(spoiled[2].isnan().any())
    if kind != "expert_choice":  # there a NaN token takes the place of another
        torch.testing.assert_close(spoiled[others], y[others], rtol=0, atol=1e-12)


def test_k_of_one_and_of_all_experts() -> None:
    x = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    assert made(top_k=1)(x)[0].expert.tolist() == [[1]]
    assert made(top_k=1)(x)[0].weight.tolist() == [[1.0]]
    assert made(top_k=4)(x)[0].expert.tolist() == [[1, 3, 2, 0]]


def test_weights_may_stay_probabilities_and_be_scaled() -> None:
    x = torch.tensor([[0.0, 3.0, 1.0, 2.0]], dtype=torch.float64)
    choice, _ = made(normalize=False, scale=2.0)(x)
    torch.testing.assert_close(choice.weight, 2 * x.softmax(-1)[:, [1, 3]])


def test_the_sigmoid_bias_moves_the_choice_but_not_the_weight() -> None:
    router = made(kind="sigmoid", top_k=1, normalize=False)
    assert router.bias is not None
    x = torch.tensor([[0.0, 1.0, 0.5, 0.0]])
    router.bias[3] = 1.0
    choice, _ = router(x)
    assert choice.expert.tolist() == [[3]]
    assert choice.weight.item() == 0.5
    assert "bias" in router.state_dict()


def test_groups_are_ranked_by_their_two_best_experts() -> None:
    x = torch.tensor([[5.0, 0.1, 3.0, 3.5]]).log()
    assert made(num_groups=2, num_chosen_groups=1)(x)[0].expert.tolist() == [[3, 2]]
    assert made(num_groups=2, num_chosen_groups=2)(x)[0].expert.tolist() == [[0, 3]]


def test_expert_choice_fills_every_expert_equally() -> None:
    router = made(kind="expert_choice", capacity_factor=1.5)
    choice, statistics = router(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
    assert choice.kept is not None
    assert choice.expert[choice.kept].bincount(minlength=4).tolist() == [6] * 4
    assert statistics[0, :4].tolist() == [6.0] * 4


def test_uniform_gives_every_expert_equally_many_tokens() -> None:
    choice, _ = made(kind="uniform")(torch.randn(6, 4))
    assert choice.expert.flatten().bincount(minlength=4).tolist() == [3] * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top_k": 5}, "top_k=5 must be between 1 and num_experts=4"),
        ({"top_k": 0}, "top_k=0 must be between 1"),
        ({"kind": "hash"}, "router='hash' is unknown; choose one of softmax, sigmoid, expert_choice, uniform"),
        ({"num_groups": 3}, "num_groups=3 must divide num_experts=4"),
        ({"num_groups": 0}, "num_groups=0 must divide num_experts=4"),
        ({"num_groups": 2, "num_chosen_groups": 3}, "num_chosen_groups=3 must be between 1 and num_groups"),
        ({"num_groups": 4, "num_chosen_groups": 1}, "top_k=2 is more than the 1 experts of num_chosen_groups=1"),
    ],
)
def test_choices_that_cannot_be_made_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(**arguments)


def test_scores_are_float32_under_autocast() -> None:
    router = Router(4, 4, 2)
    router.reset_parameters(0)
    with torch.autocast("cpu", torch.bfloat16):
        assert router(torch.randn(3, 4))[0].weight.dtype == torch.float32


def _balanced_by_bias(rank: int, world: int) -> list[float]:
    layer = full_layer(model_dim=6, hidden_dim=8, num_experts=4, top_k=1, router="sigmoid")
    layer.parallelize(Topology(world, rank, 1, 2, 1), "s1")
    assert layer.router.bias is not None
    layer.router.bias.zero_()
    x = torch.randn(512, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)) + 0.5
    spreads = []
    for _ in range(60):
        layer(x)
        load = layer.tokens_per_expert.clone()
        torch.distributed.all_reduce(load)
        spreads.append((load.max() / load.mean()).item())
        layer.update_router_bias(rate=0.02)
    layer.eval()(x)
    before = layer.router.bias.clone()
    layer.update_router_bias(rate=0.02)  # nothing was counted since
    assert torch.equal(layer.router.bias, before)
    return [spreads[0], spreads[-1], *layer.router.bias.tolist()]


def test_the_bias_balances_the_load_of_all_ranks() -> None:
    first, second = run_ranks(2, _balanced_by_bias)
    assert first == second
    assert first[0] > 1.5
    assert first[1] < 1.15


def test_the_bias_keeps_its_small_steps_in_a_layer_of_half_precision() -> None:
    layer = MoE(4, 8, 2, top_k=1, router="sigmoid").bfloat16()
    assert (layer.router.weight.dtype, layer.router.bias.dtype) == (torch.bfloat16, torch.float32)
    layer.router.bias.fill_(0.5)
    layer.router.update_bias(torch.tensor([9.0, 1.0]), rate=0.001)
    torch.testing.assert_close(layer.router.bias, torch.tensor([0.499, 0.501]))
    assert layer.double().router.bias.dtype == torch.float64


def test_only_the_sigmoid_router_has_a_bias_to_update() -> None:
    with pytest.raises(RuntimeError, match="Only router='sigmoid' balances its load by a bias, this one is 'softmax'"):
        MoE(4, 8, 2).update_router_bias()
