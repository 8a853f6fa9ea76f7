"""The automatic schedule is decided once, alike on all ranks, keeps what the user fixed, and changes no numbers."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from distributed import run_ranks
from hall.models import small_gpt
from hall.trainers import OrderedTokens, make_trainer

from lightning_parm import ParmStrategy
from lightning_parm.cache import cache_folder
from lightning_parm.moe.layer import MoE
from lightning_parm.moe.prediction import Candidate
from lightning_parm.parallel.automatic import AutomaticSchedule
from lightning_parm.parallel.trial import Trial

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
            assert schedule in ("plain", "s0", "s1", "s2")
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


@pytest.mark.parametrize(
    ("sizes", "fixed", "expected"),
    [
        (MP2_EP2, {"schedule": "s0", "transport": "two_hop"}, {("s0", "fused")}),
        (MP2_EP2, {"schedule": "plain", "chunks": 2}, {("plain", "fused")}),
        ({**MP2_EP2, "expert_shard_size": 1}, {"schedule": "s1", "transport": "two_hop"}, {("s1", "fused")}),
        (MP2_EP2, {"schedule": "s1", "chunks": 8}, {("s1", "fused"), ("s1", "two_hop")}),
    ],
)
def test_what_has_no_effect_or_is_beyond_the_usual_shuts_nothing_out(
    sizes: dict[str, int], fixed: dict[str, Any], expected: set[tuple[str, str]]
) -> None:
    for losses, choices in run_ranks(4, fit, {**sizes, **fixed}, True):
        assert len(losses) == 4
        assert {choice[:2] for choice in choices} <= expected
        if fixed.get("chunks") == 8:
            assert {choice[2] for choice in choices} == {8}


def run_trial(rank: int, world_size: int, seconds: list[list[float]]) -> tuple[list[str], Any]:
    """Batches that take so long on this rank under the one setting and under the other."""
    layers = [MoE(4, 8, 2)]
    candidates = (Candidate("s1", "fused", 1), Candidate("s2", "two_hop", 2))
    trial = Trial(layers, tuple([each] for each in candidates), 4, torch.device("cpu"))
    clock, seen = 0.0, []
    trial._now = lambda: clock  # type: ignore[method-assign]
    trial._begin()
    for _ in range(100):
        seen.append(layers[0].schedule)
        clock += seconds[rank][("s1", "s2").index(layers[0].schedule)]
        if trial.before_batch():
            break
    return seen, (layers[0].schedule, layers[0].transport, layers[0].chunks)


@pytest.mark.parametrize(
    ("seconds", "faster"),
    [
        ([[1.0, 2.0], [1.0, 2.0]], ("s1", "fused", 1)),
        ([[2.0, 1.0], [2.0, 1.0]], ("s2", "two_hop", 2)),
        ([[1.0, 2.0], [4.0, 3.0]], ("s2", "two_hop", 2)),  # the slowest rank decides
    ],
)
def test_a_trial_gives_both_settings_equal_shares_and_keeps_the_faster_on_all_ranks(
    seconds: list[list[float]], faster: tuple[str, str, int]
) -> None:
    for seen, kept in run_ranks(2, run_trial, seconds):
        assert seen == ["s1", "s2", "s1", "s2", "s2", "s1", "s2", "s1", "s1", "s2"]
        assert kept == faster


def fit_with_trial(rank: int, world_size: int) -> tuple[list[float], list[Any], bool]:
    model = small_gpt(torch.float64)
    strategy = ParmStrategy(**MP2_EP2, verify_steps=1)
    trainer = make_trainer(rank, world_size, strategy, calibrate=True, max_steps=8)
    over = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            over.append(strategy.parallel_model._automatic._trial is None)

    trainer.callbacks.append(Watch())
    trainer.fit(model, OrderedTokens(64, 8))
    layers = [layer for layer in model.modules() if isinstance(layer, MoE)]
    return model.losses, [(layer.schedule, layer.transport, layer.chunks) for layer in layers], over


def test_two_candidates_are_timed_on_real_batches_and_no_number_changes() -> None:
    expected = run_ranks(4, fit, {**MP2_EP2, "schedule": "s1"}, False)[0][0]
    results = run_ranks(4, fit_with_trial)
    for losses, choices, over in results:
        torch.testing.assert_close(losses[:4], expected, rtol=0, atol=1e-10)
        assert choices == results[0][1]
        assert over == [True, False, False, False, False, True, True, True], "batches 2 to 5 are the trial's"


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
