"""What a LightningModule meets under ``parm``: meshes, plans, samplers, accumulation, second fits, evaluation."""

import warnings
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from hall.models import small_gpt
from hall.trainers import OrderedTokens, RandomTokens, make_trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset

from lightning_parm import MoE, ParmStrategy
from lightning_parm.models import GPT

MP2 = {"tensor_parallel_size": 2, "expert_parallel_size": 1, "expert_shard_size": 2}


def test_the_dense_layers_are_really_cut_and_the_experts_too() -> None:
    def rank_main(rank: int, world_size: int) -> tuple[dict[str, Any], bool]:
        trainer = make_trainer(rank, world_size, ParmStrategy(**MP2), max_steps=1)
        model = small_gpt()
        trainer.fit(model, OrderedTokens(8, 8))
        sizes = {
            name: tuple((p.to_local() if isinstance(p, DTensor) else p).shape) for name, p in model.named_parameters()
        }
        return sizes, model.blocks[0].feed_forward.topology == trainer.strategy.topology

    whole = {name: tuple(p.shape) for name, p in small_gpt().named_parameters()}
    for sizes, sharded in run_ranks(2, rank_main):
        assert sharded
        assert sizes["blocks.0.attention.query.weight"] == (8, 16)
        assert sizes["blocks.0.attention.output.weight"] == (16, 8)
        elements = {name: torch.Size(shape).numel() for name, shape in sizes.items()}
        for name, shape in whole.items():
            halves = "attention." in name or ".experts." in name
            assert elements[name] == torch.Size(shape).numel() // (2 if halves else 1), name


def test_without_a_plan_dense_layers_are_replicated_and_one_warning_says_what_it_costs() -> None:
    class Planless(GPT):
        tensor_parallel_plan = None

    def rank_main(rank: int, world_size: int) -> list[str]:
        trainer = make_trainer(rank, world_size, ParmStrategy(**MP2), max_steps=1)
        model = Planless(vocab_size=32, num_layers=1, num_heads=2, model_dim=16, hidden_dim=32, num_experts=2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(model, OrderedTokens(8, 8))
        return [str(w.message) for w in caught if "tensor_parallel_plan" in str(w.message)]

    messages = run_ranks(2, rank_main)
    assert len(messages[0]) == 1, "rank 0 warns once"
    assert messages[1] == []
    assert (
        "tensor_parallel_size=2, but the module has no tensor_parallel_plan: its 2,096 dense parameters"
        in messages[0][0]
    )


class ConfiguredModel(L.LightningModule):
    """As users of ModelParallelStrategy write it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.moe = MoE(8, 16, 4)
        self.double()
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.device_mesh is not None and not isinstance(self.up.weight, DTensor):
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(self, self.device_mesh["tensor_parallel"], plan)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = batch["input_ids"].double() / 32
        loss = (self.moe(self.down(self.up(x).tanh())) - x).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def test_configure_model_with_the_device_mesh_works_as_it_is() -> None:
    def rank_main(rank: int, world_size: int, strategy: Any = "auto") -> list[float]:
        model = ConfiguredModel()
        trainer = make_trainer(rank, world_size, strategy, max_steps=4)
        trainer.fit(model, OrderedTokens(32, 8))
        return model.losses

    expected = rank_main(0, 1)
    for losses in run_ranks(2, rank_main, ParmStrategy(tensor_parallel_size=2)):
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-12)


class ManualModel(L.LightningModule):
    """Two optimizers, two backward passes before a step, one of them without synchronisation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(4)
        self.moe, self.head = MoE(8, 16, 4), nn.Linear(8, 8)
        self.double()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        x = batch["input_ids"].double() / 32
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        with first.toggle_model(sync_grad=False):
            self.manual_backward(self.moe(x).square().mean())
        self.manual_backward((self.head(self.moe(x)) - x).square().mean())
        self.manual_backward(self.head(x).square().mean())
        first.step()
        second.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(self.moe.parameters(), lr=0.5), torch.optim.SGD(self.head.parameters(), lr=0.5)]


def test_manual_optimisation_equals_one_process() -> None:
    def rank_main(rank: int, world_size: int, strategy: Any = "auto") -> Tensor:
        model = ManualModel()
        make_trainer(rank, world_size, strategy, max_steps=8).fit(model, OrderedTokens(32, 8))
        return model.head.weight.detach()

    expected = rank_main(0, 1)
    for weight in run_ranks(4, rank_main, ParmStrategy(expert_parallel_size=2)):
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-12)


def test_samplers_and_logged_means_are_data_parallel_and_seeds_of_peers_agree() -> None:
    class Logging(GPT):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            data_parallel_rank = self.trainer.strategy.topology.data_parallel_rank
            self.log("mean", float(data_parallel_rank), sync_dist=True)
            self.log("sum", float(data_parallel_rank + 1), sync_dist=True, reduce_fx="sum")
            return super().training_step(batch, batch_idx)

    def rank_main(rank: int, world_size: int) -> tuple[Any, ...]:
        torch.manual_seed(rank)  # a user who does not seed all ranks alike
        trainer = make_trainer(rank, world_size, ParmStrategy(tensor_parallel_size=2), max_steps=1)
        model = Logging(vocab_size=32, num_layers=1, num_heads=2, model_dim=16, hidden_dim=32, num_experts=2)
        trainer.fit(model, DataLoader(RandomTokens(8), batch_size=2))
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        return trainer.strategy.distributed_sampler_kwargs, metrics["mean"], metrics["sum"], float(torch.rand(()))

    results = run_ranks(4, rank_main)
    assert [r[0] for r in results] == [{"num_replicas": 2, "rank": rank // 2} for rank in range(4)]
    assert {r[1] for r in results} == {0.5}
    assert {r[2] for r in results} == {3.0}, "a sum counts the two data-parallel ranks, not their duplicates"
    draws = [r[3] for r in results]
    assert draws[0] == draws[1] != draws[2] == draws[3]


def test_replicas_start_equal_whatever_the_ranks_seeds() -> None:
    def rank_main(rank: int, world_size: int) -> dict[str, Tensor]:
        torch.manual_seed(rank)
        model = GPT(vocab_size=32, num_layers=1, num_heads=2, model_dim=16, hidden_dim=32, num_experts=4)
        trainer = make_trainer(rank, world_size, ParmStrategy(expert_parallel_size=2), max_steps=2)
        trainer.fit(model, OrderedTokens(16, 8))
        return {name: p.detach() for name, p in model.named_parameters()}

    first, second, third, fourth = run_ranks(4, rank_main)
    for name in first:
        torch.testing.assert_close(first[name], third[name], rtol=0, atol=0)
        torch.testing.assert_close(second[name], fourth[name], rtol=0, atol=0)
        assert torch.equal(first[name], second[name]) == (".experts." not in name), name


def test_a_second_fit_and_an_evaluation_in_the_same_process() -> None:
    def rank_main(rank: int, world_size: int) -> tuple[list[float], int, float]:
        model = small_gpt(torch.float64)
        for _ in range(2):
            trainer = make_trainer(rank, world_size, ParmStrategy(expert_parallel_size=2), max_steps=2)
            trainer.fit(model, OrderedTokens(16, 8))
        (result,) = trainer.test(model, DataLoader(RandomTokens(8), batch_size=4), verbose=False)
        return model.losses, len(dist.distributed_c10d._world.pg_map), result["test_loss"]

    def one_process() -> tuple[list[float], float]:
        model = small_gpt(torch.float64)
        for _ in range(2):
            trainer = make_trainer(0, 1, "auto", max_steps=2)
            trainer.fit(model, OrderedTokens(16, 8))
        (result,) = trainer.test(model, DataLoader(RandomTokens(8), batch_size=4), verbose=False)
        return model.losses, result["test_loss"]

    losses, test_loss = one_process()
    for ours, num_groups, ours_test in run_ranks(2, rank_main):
        torch.testing.assert_close(ours, losses, rtol=0, atol=1e-10)
        assert ours_test == pytest.approx(test_loss, abs=1e-6)
        assert num_groups <= 3, "the second fit opens no new groups"


def test_bf16_mixed_precision_trains_and_stays_near_float32() -> None:
    def rank_main(rank: int, world_size: int, precision: str) -> list[float]:
        model = small_gpt()
        options = {"precision": precision, "max_steps": 4, "gradient_clip_val": 0.5}
        make_trainer(rank, world_size, ParmStrategy(**MP2), **options).fit(model, OrderedTokens(32, 8))
        return model.losses

    full = run_ranks(2, rank_main, "32-true")[0]
    for precision in ("bf16-mixed", "bf16-true"):
        losses = run_ranks(2, rank_main, precision)[0]
        torch.testing.assert_close(losses, full, rtol=0.05, atol=0.05)


def test_validation_counts_each_token_once_even_where_a_rank_has_only_padding() -> None:
    class Uneven(Dataset):
        """Five sequences for two ranks of batches of two: in the last step rank 1 has a fully masked row."""

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            item = RandomTokens(5)[min(index, 4)]
            return item if index < 5 else {**item, "labels": torch.full_like(item["labels"], -100)}

        def __len__(self) -> int:
            return 6

    def rank_main(rank: int, world_size: int, strategy: Any = "auto") -> float:
        trainer = make_trainer(rank, world_size, strategy)
        data = DataLoader(Uneven(), batch_size=1, sampler=range(rank, 6, world_size))
        (result,) = trainer.validate(small_gpt(torch.float64), data, verbose=False)
        return result["val_loss"]

    expected = rank_main(0, 1)
    for loss in run_ranks(2, rank_main, ParmStrategy(expert_parallel_size=2)):
        assert loss == pytest.approx(expected, abs=1e-6)


def test_the_bias_of_sigmoid_routers_follows_the_load_alike_on_all_ranks() -> None:
    def rank_main(rank: int, world_size: int) -> list[float]:
        model = small_gpt(router="sigmoid")
        make_trainer(rank, world_size, ParmStrategy(**MP2), max_steps=3).fit(model, OrderedTokens(32, 8))
        return model.blocks[0].feed_forward.router.bias.tolist()

    first, second = run_ranks(2, rank_main)
    assert first == second
    assert any(first)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_batch_does_not_search_the_tree_of_modules(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # thousands of modules take some 60 ms
    searches: list[str] = []
    named_modules = nn.Module.named_modules

    def counted(module: nn.Module, *args: Any, **options: Any) -> Any:
        searches.append(type(module).__name__)
        return named_modules(module, *args, **options)

    class Second(L.Callback):
        """Listens from the second batch to the end of the last."""

        def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int) -> None:
            if index == 1:
                monkeypatch.setattr(nn.Module, "named_modules", counted)

        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            monkeypatch.undo()

    def rank_main(rank: int, world_size: int) -> tuple[int, list[str]]:
        strategy = ParmStrategy(expert_parallel_size=world_size)
        options = {"max_steps": 4, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "callbacks": [Second()]}
        trainer = make_trainer(rank, world_size, strategy, max_epochs=1, **options)
        model = GPT(vocab_size=32, num_layers=1, num_heads=2, model_dim=16, hidden_dim=32, num_experts=2)
        trainer.fit(model, OrderedTokens(64, 8))
        return trainer.global_step, searches

    assert run_ranks(world_size, rank_main) == [(4, [])] * world_size
