"""The automatic schedule is decided once, alike on all ranks, keeps what the user fixed, and changes no numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from hall.models import small_gpt
from hall.trainers import OrderedTokens, make_trainer

from lightning_parm import ParmStrategy
from lightning_parm.automatic import AutomaticSchedule
from lightning_parm.cache import cache_folder
from lightning_parm.moe.layer import MoE

MP2_EP2 = {"tensor_parallel_size": 2, "expert_parallel_size": 2, "expert_shard_size": 2}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "lightning_parm"
    return tmp_path


def fit(rank: int, world_size: int, sizes: dict[str, Any], calibrate: bool) -> tuple[list[float], list[Any]]:
    model = small_gpt(torch.float64)
    trainer = make_trainer(rank, world_size, ParmStrategy(**sizes), calibrate=calibrate, max_steps=4)
    trainer.fit(model, OrderedTokens(32, 8))
    layers = [layer for layer in model.modules() if isinstance(layer, MoE)]
    assert not any(layer._forward_pre_hooks for layer in layers)
    return model.losses, [(layer.schedule, layer.transport, layer.chunks) for layer in layers]


def test_every_layer_gets_one_choice_on_all_ranks_and_the_losses_stay(own_cache: Path) -> None:
    expected = run_ranks(4, fit, {**MP2_EP2, "schedule": "s1"}, False)[0][0]
    results = run_ranks(4, fit, MP2_EP2, True)
    for losses, choices in results:
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-10)
        assert choices == results[0][1]
        for schedule, transport, chunks in choices:
            assert schedule in ("plain", "s1", "s2")
            assert transport in ("fused", "two_hop")
            assert chunks >= 1
    (kept,) = (own_cache / "lightning_parm").glob("links-*.json")
    measured = kept.stat().st_mtime_ns
    run_ranks(4, fit, MP2_EP2, True)
    assert kept.stat().st_mtime_ns == measured, "an equal run takes the kept constants"


def test_what_the_user_fixed_stays() -> None:
    fixed = {"schedule": "s2", "transport": "two_hop"}
    for _, choices in run_ranks(4, fit, {**MP2_EP2, **fixed}, True):
        assert {choice[:2] for choice in choices} == {("s2", "two_hop")}
        assert all(isinstance(chunks, int) for _, _, chunks in choices)


def test_nothing_is_measured_where_nothing_is_open() -> None:
    module = small_gpt()
    topology = ParmStrategy(**MP2_EP2)._resolve(4, 0)
    assert AutomaticSchedule.watch(module, topology, ("baseline", "auto", "auto")) is None
    assert AutomaticSchedule.watch(module, topology, ("s1", "fused", 1)) is None
    assert AutomaticSchedule.watch(small_gpt(num_experts=0), topology, ("auto", "auto", "auto")) is None
    alone = ParmStrategy(expert_parallel_size=1)._resolve(4, 0)
    assert AutomaticSchedule.watch(module, alone, ("auto", "auto", "auto")) is None
    watching = AutomaticSchedule.watch(module, topology, ("auto", "auto", "auto"))
    assert watching is not None
    watching.remove()
