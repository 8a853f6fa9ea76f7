"""Gradients are averaged over the right ranks, whatever arrives when, and their norm is that of the whole model."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from hall.models import RecordingGPT, small_gpt
from hall.trainers import OrderedTokens, make_trainer
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_parm import ParmStrategy
from lightning_parm.parallel.gradients import GradientReducer, global_norm
from lightning_parm.parallel.placement import ParameterPlacement

TINY = 64  # bytes: nearly every parameter gets a bucket of its own


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def make_reducer(model: nn.Module, world_size: int, bucket_size_bytes: int = TINY, **options: Any) -> GradientReducer:
    placement = ParameterPlacement(reduce_axis="data_parallel", num_copies=world_size, **options)
    return GradientReducer([(p, placement) for p in model.parameters()], lambda _: dist.group.WORLD, bucket_size_bytes)


def inputs(rank: int, batch: int = 0) -> Tensor:
    return torch.randn(7, 6, generator=torch.Generator().manual_seed(100 * batch + rank))


def backward(reducer: GradientReducer | None, loss: Tensor) -> None:
    if reducer is not None:
        reducer.start()
    loss.backward()
    if reducer is not None:
        reducer.finish()


@pytest.mark.parametrize("bucket_size_bytes", [TINY, 2**20])
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_equal_those_of_distributed_data_parallel(world_size: int, bucket_size_bytes: int) -> None:
    def rank_main(rank: int, world_size: int) -> float:
        model = make_model()
        reference = DistributedDataParallel(copy.deepcopy(model))
        reducer = make_reducer(model, world_size, bucket_size_bytes)
        difference = 0.0
        for batch in range(3):  # without set_to_none=False the second pass accumulates into the buckets' own views
            model.zero_grad(set_to_none=batch == 1)
            reference.zero_grad(set_to_none=batch == 1)
            backward(reducer, model(inputs(rank, batch)).square().mean())
            reference(inputs(rank, batch)).square().mean().backward()
            for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                difference = max(difference, float((ours.grad - theirs.grad).abs().max()))
        return difference

    tolerance = 0.0 if world_size == 2 else 1e-7  # three summands may be added in another order
    assert max(run_ranks(world_size, rank_main)) <= tolerance


def test_a_parameter_used_on_some_ranks_counts_as_zeros_on_the_others_and_unused_ones_stay_none() -> None:
    def rank_main(rank: int, world_size: int) -> list[Tensor | None]:
        model = nn.ModuleList(nn.Linear(6, 1, bias=False) for _ in range(4))
        for layer in model:
            nn.init.ones_(layer.weight)
        model[3].weight.requires_grad_(False)
        reducer = make_reducer(model, world_size)
        used = [model[0], model[1]] if rank == 0 else [model[1]]
        backward(reducer, sum(layer(torch.ones(1, 6)).sum() for layer in used))
        return [layer.weight.grad for layer in model]

    for grads in run_ranks(2, rank_main):
        torch.testing.assert_close(grads[0], torch.full((1, 6), 0.5))
        torch.testing.assert_close(grads[1], torch.ones(1, 6))
        assert grads[2] is None
        assert grads[3] is None


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_accumulated_and_repeated_backward_passes_add_up(scale: float) -> None:
    """Local pass, averaged pass, averaged pass: each contribution is scaled and averaged exactly once."""

    def rank_main(rank: int, world_size: int) -> float:
        model = make_model().double()
        expected = make_model().double()
        reducer = make_reducer(model, world_size, gradient_scale=scale)
        for batch, synchronised in enumerate((False, True, True)):
            backward(reducer if synchronised else None, model(inputs(rank, batch).double()).square().mean())
            for peer in range(world_size):
                (expected(inputs(peer, batch).double()).square().mean() * scale / world_size).backward()
        pairs = zip(model.parameters(), expected.parameters(), strict=True)
        return max(float((ours.grad - theirs.grad).abs().max()) for ours, theirs in pairs)

    assert max(run_ranks(2, rank_main)) <= 1e-15


def test_a_gradient_that_arrives_after_its_bucket_has_left_is_an_error() -> None:
    def rank_main(rank: int, world_size: int) -> str:
        layer = nn.Linear(6, 6)
        reducer = make_reducer(layer, world_size)
        x = inputs(rank).requires_grad_()
        y = checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True)
        reducer.start()
        with pytest.raises(RuntimeError, match="received a second gradient in one backward pass") as caught:
            y.sum().backward()
        return str(caught.value)

    assert "use_reentrant=False" in run_ranks(2, rank_main)[0]


def test_removing_the_reducer_leaves_the_parameters_alone() -> None:
    def rank_main(rank: int, world_size: int) -> bool:
        model = make_model()
        make_reducer(model, world_size, gradient_scale=0.5).remove()
        model(inputs(rank)).square().mean().backward()
        local = copy.deepcopy(make_model())
        local(inputs(rank)).square().mean().backward()
        pairs = zip(model.parameters(), local.parameters(), strict=True)
        return all(torch.equal(ours.grad, theirs.grad) for ours, theirs in pairs)

    assert run_ranks(2, rank_main) == [True, True]


@pytest.mark.parametrize(("norm_type", "expected"), [(2.0, 120**0.5), (float("inf"), 10.0), (1.0, 22.0)])
def test_the_norm_counts_shards_once_and_replicas_once(norm_type: float, expected: float) -> None:
    """Two ranks hold shards of squared norms 4 and 100; both hold a replica of squared norm 16."""

    def rank_main(rank: int, world_size: int) -> float:
        shard, replica, unused = (nn.Parameter(torch.zeros(4)) for _ in range(3))
        shard.grad = torch.tensor([2.0, 0.0, 0.0, 0.0]) if rank == 0 else torch.tensor([0.0, 10.0, 0.0, 0.0])
        replica.grad = torch.tensor([0.0, 0.0, 4.0, 0.0]) if norm_type == 2.0 else torch.tensor([0.0, 0.0, 10.0, 0.0])
        placed = [
            (shard, ParameterPlacement(reduce_axis="expert_data_parallel", num_copies=1)),
            (replica, ParameterPlacement(reduce_axis="data_parallel", num_copies=2)),
            (unused, ParameterPlacement(reduce_axis="data_parallel", num_copies=2)),
        ]
        return float(global_norm(placed, norm_type))

    norms = run_ranks(2, rank_main)
    assert norms[0] == norms[1]
    assert norms[0] == pytest.approx(expected, rel=1e-6)


class Unfreezes(BaseFinetuning):
    """Lightning's recipe of finetuning: the head and the experts of one block join in at the second epoch."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze([module.head, module.blocks[0].feed_forward.experts])

    def finetune_function(self, module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            parts = [module.head, module.blocks[0].feed_forward.experts]
            self.unfreeze_and_add_param_group(parts, optimizer, lr=0.01)


class Finetuned(RecordingGPT):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02)


def test_what_is_unfrozen_later_trains_alike_on_every_rank() -> None:
    def rank_main(rank: int, world_size: int, strategy: Any = "auto") -> tuple[list[float], list[float], Any]:
        model = small_gpt(torch.float64, cls=Finetuned)
        options = {"max_epochs": 3, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "callbacks": [Unfreezes()]}
        make_trainer(rank, world_size, strategy, **options).fit(model, OrderedTokens(32, 8))
        return model.losses, model.norms, model.head.weight.detach()

    expected = rank_main(0, 1)
    for ours in run_ranks(2, rank_main, ParmStrategy(expert_parallel_size=1)):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)
    for ours in run_ranks(4, rank_main, ParmStrategy(expert_parallel_size=2, expert_shard_size=1)):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)
