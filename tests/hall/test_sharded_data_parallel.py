"""``data_parallel="shard"``: the same training as with replicas, with each rank holding a part of everything."""

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from data.corpora import write_arrow
from distributed import run_ranks
from hall.models import RecordingGPT, small_gpt
from hall.trainers import OrderedTokens, RandomTokens, make_trainer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_parm import ParmStrategy, TokenDataModule

CLIP_AND_ACCUMULATE = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "max_epochs": -1}
MODEL = {"num_shared_experts": 1}
SHARD = {"data_parallel": "shard"}
DP4 = {"expert_parallel_size": 1}
EP2 = {"expert_parallel_size": 2, "schedule": "s1", "chunks": 2}
ESP2 = {"expert_parallel_size": 1, "expert_shard_size": 2, "schedule": "s2"}
MP2 = {"tensor_parallel_size": 2, "expert_parallel_size": 2, "expert_shard_size": 1}


def fit(
    rank: int,
    world_size: int,
    sizes: dict[str, Any] | None,
    steps: int = 3,
    resume_from: Path | None = None,
    save_to: Path | None = None,
    corpus: str | None = None,
    **model: Any,
) -> tuple[RecordingGPT, L.Trainer]:
    """Train, with a validation after every optimizer step; on one process without sizes."""
    strategy = "auto" if sizes is None else ParmStrategy(**sizes)
    options = {**CLIP_AND_ACCUMULATE, "max_steps": steps, "val_check_interval": 2, "num_sanity_val_steps": 1}
    trainer = make_trainer(rank, world_size, strategy, **options)
    gpt = small_gpt(torch.float64, **MODEL, **model)
    data: Any = OrderedTokens(8 * 2 * 4, 8)
    if corpus is not None:  # it goes on where a checkpoint ends
        replicas = world_size // (sizes or {}).get("tensor_parallel_size", 1)
        data = TokenDataModule(corpus, sequence_length=8, batch_size=8 // replicas, num_logical_shards=8)
    data.val_dataloader = lambda: DataLoader(RandomTokens(4), batch_size=2)
    trainer.fit(gpt, data, ckpt_path=resume_from)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return gpt, trainer


def losses(rank: int, world_size: int, *args: Any, **options: Any) -> tuple[list[float], list[float]]:
    gpt, _ = fit(rank, world_size, *args, **options)
    return gpt.losses, gpt.norms


@pytest.mark.parametrize(
    ("world_size", "sizes"), [(2, DP4), (4, EP2), (4, ESP2), (4, MP2)], ids=["dp2", "ep2-edp2", "esp2-edp2", "mp2-dp2"]
)
def test_training_is_that_of_one_process(world_size: int, sizes: dict[str, Any]) -> None:
    expected = losses(0, 1, None)
    for ours in run_ranks(world_size, losses, {**sizes, **SHARD}):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)


def test_a_cut_sequence_and_sharded_parameters_go_together() -> None:
    expected = losses(0, 1, None)

    def rank_main(rank: int, world_size: int) -> tuple[list[float], list[float]]:
        return losses(rank, world_size, {**MP2, **SHARD}, sequence_parallel=True)

    for ours in run_ranks(4, rank_main):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)


def test_what_is_neither_replicas_nor_shards_is_refused() -> None:
    with pytest.raises(ValueError, match="data_parallel='zero' is unknown; choose 'replicate' or 'shard'"):
        ParmStrategy(data_parallel="zero")  # type: ignore[arg-type]


def held(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the parts that this rank holds."""
    parts = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if t is not None]
    return sum(part.numel() * part.element_size() for part in parts)


def test_each_rank_holds_its_part_of_parameters_gradients_and_optimizer_state() -> None:
    def rank_main(rank: int, world_size: int, sizes: dict[str, Any]) -> list[int]:
        sums: list[int] = []

        class Weighing(L.Callback):
            def on_before_zero_grad(self, trainer: L.Trainer, module: L.LightningModule, _: Any) -> None:
                if trainer.global_step == 3:
                    state = trainer.optimizers[0].state.values()
                    moments = [value for entry in state for value in entry.values() if value.dim() > 0]
                    parameters = list(module.parameters())
                    sums.extend([held(parameters), held(p.grad for p in parameters), held(moments)])

        trainer = make_trainer(rank, world_size, ParmStrategy(**sizes), max_steps=4, callbacks=[Weighing()])
        trainer.fit(small_gpt(), OrderedTokens(32, 8))
        return sums

    for sizes in (DP4, EP2):
        whole = run_ranks(4, rank_main, sizes)[0]
        for part in run_ranks(4, rank_main, {**sizes, **SHARD}):
            if sizes == DP4:
                assert part == [number // 4 for number in whole]
            else:  # a quarter of the dense layers, half of the experts
                assert all(number // 4 < ours < number // 2 for ours, number in zip(part, whole, strict=True))


def test_checkpoints_go_from_shards_to_replicas_and_back(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    documents = [random.integers(0, 32, length).astype(np.uint16) for length in random.integers(1, 40, 100)]
    corpus = str(write_arrow(tmp_path / "tokens.arrow", documents))
    expected, _ = losses(0, 1, None, 4, corpus=corpus)
    plain, sharded, single = tmp_path / "plain.ckpt", tmp_path / "sharded.ckpt", tmp_path / "single.ckpt"

    def save(rank: int, world_size: int, sizes: dict[str, Any], path: Path) -> None:
        fit(rank, world_size, sizes, 2, None, path, corpus)

    def resume(rank: int, world_size: int, sizes: dict[str, Any], path: Path) -> list[float]:
        return losses(rank, world_size, sizes, 4, path, corpus=corpus)[0]

    run_ranks(4, save, EP2, plain)
    run_ranks(4, save, {**MP2, **SHARD}, sharded)
    run_ranks(4, save, {**EP2, **SHARD, "save_distributed_checkpoint": False}, single)
    shapes = {name: value.shape for name, value in torch.load(single, weights_only=True)["state_dict"].items()}
    assert shapes == {name: value.shape for name, value in small_gpt(**MODEL).state_dict().items()}
    for path, world_size, sizes in (
        (plain, 4, {**ESP2, **SHARD}),
        (sharded, 4, {**EP2, **SHARD}),
        (sharded, 2, DP4),
        (sharded, 2, {**DP4, **SHARD}),
        (single, 2, {**DP4, **SHARD}),
    ):
        for ours in run_ranks(world_size, resume, sizes, path):
            torch.testing.assert_close(ours, expected[4:], rtol=0, atol=1e-10)


class ByHand(RecordingGPT):
    """Two optimizers in turns, one of them after an accumulation, and parameters held in every way."""

    def __init__(self, tied: bool, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False
        self.scale = nn.Parameter(torch.ones(32))
        self.offsets = nn.ParameterList([torch.zeros(32)])
        self.critic = nn.Sequential(
            nn.Linear(32, 16), nn.ReLU(inplace=True), nn.ModuleDict({"last": nn.Linear(16, 2)})["last"]
        )
        self.pools = nn.ModuleList([nn.ModuleList([nn.Linear(32, 2)]), nn.Identity()])
        if tied:
            self.head.weight = self.embedding.weight
        self.seen: list[bool] = []

    def forward(self, *args: Any) -> Tensor:
        logits = super().forward(*args)
        return logits * self.scale + self.offsets[0] + self.pools[0][0](logits).sum(-1, keepdim=True)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        writer, critic = self.optimizers()
        logits = self(batch["input_ids"])
        with self.toggled_optimizer(critic):
            judged = self.critic(logits.detach()).square().mean() - self.critic(logits.detach().sin()).tanh().mean()
            self.manual_backward(judged)
            self.seen.append(any(p.grad is None for p in self.critic.parameters()))
            self.clip_gradients(critic, gradient_clip_val=0.1)
            critic.step()
            critic.zero_grad()
        with self.toggled_optimizer(writer):
            with getattr(self.trainer.strategy, "block_backward_sync", nullcontext)():
                self.manual_backward(self.critic(self(batch["input_ids"].flip(0))).square().mean())
            loss = F.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten()) + self.critic(logits).mean()
            self.manual_backward(loss)
            self.seen.append(any(p.grad is not None for p in self.critic.parameters()))
            self.clip_gradients(writer, gradient_clip_val=0.5)
            writer.step()
            writer.zero_grad()
        reduce = self.trainer.strategy.reduce
        self.losses += [float(reduce(each.detach().clone(), reduce_op="mean")) for each in (judged, loss)]

    def configure_optimizers(self) -> Any:
        judges = {*self.critic.parameters()}
        writes = [parameter for parameter in self.parameters() if parameter not in judges]
        return torch.optim.AdamW(writes, lr=0.02), torch.optim.SGD(judges, lr=0.1)


def by_hand(rank: int, world_size: int, sizes: dict[str, Any] | None, tied: bool) -> tuple[Any, ...]:
    strategy = "auto" if sizes is None else ParmStrategy(**sizes)
    trainer = make_trainer(rank, world_size, strategy, max_steps=6, max_epochs=-1, val_check_interval=2)
    gpt: Any = small_gpt(torch.float64, cls=ByHand, num_shared_experts=1, tied=tied)
    data: Any = OrderedTokens(24, 8)
    data.val_dataloader = lambda: DataLoader(RandomTokens(4), batch_size=2)
    trainer.fit(gpt, data)
    whole = {name for name, parameter in gpt.named_parameters() if not isinstance(parameter, DTensor)}
    state = gpt.state_dict() if sizes is None else trainer.strategy.whole_state_dict()
    numbers = (gpt.losses, gpt.norms, float(trainer.callback_metrics["val_loss"]))
    return numbers, gpt.seen, whole, {name: value.detach() for name, value in state.items()}


@pytest.mark.parametrize(
    ("world_size", "sizes", "tied"),
    [(2, DP4, True), (4, EP2, False), (4, MP2, False)],
    ids=["dp2", "ep2-edp2", "mp2-dp2"],
)
def test_a_module_that_steps_by_hand_trains_as_on_one_process(
    world_size: int, sizes: dict[str, Any], tied: bool
) -> None:
    expected, _, _, trained = by_hand(0, 1, None, tied)
    results = run_ranks(world_size, by_hand, {**sizes, **SHARD}, tied)
    torch.testing.assert_close(results[0][3], trained, rtol=0, atol=1e-10)
    for ours, seen, whole, _ in results:
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)
        assert not any(seen), "each optimizer's parameters have gradients in its turn, and no other"
        assert {"scale", "offsets.0"} <= whole
        assert ("embedding.weight" in whole) == tied
        assert not {"norm.weight", "critic.0.bias", "pools.0.0.weight", "blocks.0.attention_norm.weight"} & whole


def test_a_second_fit_goes_on_with_the_shards() -> None:
    def rank_main(rank: int, world_size: int) -> list[float]:
        strategy = {**EP2, **SHARD}
        model, _ = fit(rank, world_size, strategy, 2)
        assert isinstance(model, FSDPModule)
        make_trainer(rank, world_size, ParmStrategy(**strategy), max_steps=2).fit(model, OrderedTokens(16, 8))
        return model.losses

    model, _ = fit(0, 1, None, 2)
    make_trainer(0, 1, max_steps=2).fit(model, OrderedTokens(16, 8))
    for ours in run_ranks(4, rank_main):
        torch.testing.assert_close(ours, model.losses, rtol=0, atol=1e-10)


class ShardsItself(RecordingGPT):
    """A user's own sharding, as FSDP2's tutorial has it: attention and the whole, and not the experts."""

    def configure_model(self) -> None:
        if self.device_mesh is not None and not isinstance(self, FSDPModule):
            mesh = self.device_mesh["data_parallel"]
            for block in self.blocks:
                fully_shard(block.attention, mesh=mesh)
            fully_shard(self, mesh=mesh, ignored_params={*self.blocks.parameters()})


def test_what_configure_model_has_sharded_accumulates_and_clips_as_one_process() -> None:
    def rank_main(rank: int, world_size: int, strategy: Any) -> tuple[list[float], list[float], int]:
        model = small_gpt(torch.float64, cls=ShardsItself)
        options = {**CLIP_AND_ACCUMULATE, "val_check_interval": 2}
        trainer = make_trainer(rank, world_size, strategy, max_steps=4, **options)
        data: Any = OrderedTokens(64, 8)
        data.val_dataloader = lambda: DataLoader(RandomTokens(4), batch_size=2)
        trainer.fit(model, data)
        return model.losses, model.norms, sum(isinstance(p, DTensor) for p in model.parameters())

    *expected, _ = rank_main(0, 1, "auto")
    for *ours, num_sharded in run_ranks(2, rank_main, ParmStrategy(expert_parallel_size=2)):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)
        assert num_sharded > 4
