"""A run under ``parm`` equals the same run in one process: losses, gradients' norm, clipping, accumulation."""

from typing import Any

import pytest
import torch
from distributed import run_ranks
from hall.models import small_gpt
from hall.trainers import OrderedTokens, make_trainer

from lightning_parm import ParmStrategy

GLOBAL_BATCH = 8


def fit(
    rank: int, world_size: int, sizes: dict[str, Any] | None, steps: int, options: dict[str, Any], dtype: torch.dtype
) -> tuple[list[float], list[float]]:
    strategy = "auto" if sizes is None else ParmStrategy(**sizes)
    trainer = make_trainer(rank, world_size, strategy, max_steps=steps, **options)
    model = small_gpt(dtype)
    trainer.fit(model, OrderedTokens(80, GLOBAL_BATCH))
    return model.losses, model.norms


TOPOLOGIES = [
    (2, {"expert_parallel_size": 2}),
    (2, {"tensor_parallel_size": 2, "expert_parallel_size": 1, "expert_shard_size": 2}),
    (4, {"expert_parallel_size": 1, "expert_shard_size": 1}),
    (4, {"tensor_parallel_size": 2, "expert_parallel_size": 2, "expert_shard_size": 2}),
    (4, {"expert_parallel_size": 2, "expert_shard_size": 1}),
    (4, {"tensor_parallel_size": 2, "expert_parallel_size": 2, "expert_shard_size": 2, "schedule": "s1"}),
]
CLIP_AND_ACCUMULATE = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "max_epochs": -1}


@pytest.mark.parametrize(("world_size", "sizes"), TOPOLOGIES)
def test_float64_training_is_the_same_to_rounding(world_size: int, sizes: dict[str, Any]) -> None:
    expected = fit(0, 1, None, 6, CLIP_AND_ACCUMULATE, torch.float64)
    assert max(expected[1]) > 0.5, "the norms must be clipped for the test to mean anything"
    for losses, norms in run_ranks(world_size, fit, sizes, 6, CLIP_AND_ACCUMULATE, torch.float64):
        torch.testing.assert_close(losses, expected[0], rtol=0, atol=1e-10)
        torch.testing.assert_close(norms, expected[1], rtol=0, atol=1e-10)


def test_float32_training_of_twenty_steps_on_four_ranks() -> None:
    sizes = {"tensor_parallel_size": 2, "expert_parallel_size": 2, "expert_shard_size": 2}
    expected, _ = fit(0, 1, None, 20, CLIP_AND_ACCUMULATE, torch.float32)
    assert expected[-1] < expected[0] - 0.2, "it must learn"
    for losses, _ in run_ranks(4, fit, sizes, 20, CLIP_AND_ACCUMULATE, torch.float32):
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-5)
