"""Dense layers cut over tensor-parallel ranks: equal to one process, also with the sequence cut between them."""

from typing import Any

import lightning as L
import pytest
import torch
from distributed import run_ranks
from hall.models import small_gpt
from hall.trainers import OrderedTokens, RandomTokens, make_trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from lightning_parm import MoE, ParmStrategy
from lightning_parm.models.gpt import Attention
from lightning_parm.parallel.randomness import different_on_peers
from lightning_parm.parallel.tensor_parallel import hugging_face_plan

CLIP_AND_ACCUMULATE = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "max_epochs": -1, "max_steps": 2}
MIXED = {"moe_every": 2, "num_shared_experts": 1}  # a dense block, then a mixture


def fit(
    rank: int, world_size: int, sizes: dict[str, Any] | None, model: dict[str, Any]
) -> tuple[list[float], list[float], dict[str, tuple[int, ...]]]:
    trainer = make_trainer(rank, world_size, "auto" if sizes is None else ParmStrategy(**sizes), **CLIP_AND_ACCUMULATE)
    gpt = small_gpt(torch.float64, **model)
    trainer.fit(gpt, OrderedTokens(64, 8))
    shapes = {n: tuple((p.to_local() if isinstance(p, DTensor) else p).shape) for n, p in gpt.named_parameters()}
    return gpt.losses, gpt.norms, shapes


@pytest.mark.parametrize(
    ("world_size", "sizes", "model"),
    [
        (2, {"schedule": "s1"}, {**MIXED, "balance_loss_weight": 0.01, "z_loss_weight": 0.001}),
        (2, {"schedule": "s2"}, MIXED),
        (4, {"schedule": "s1", "chunks": 2, "transport": "two_hop"}, MIXED),
    ],
    ids=["s1", "s2", "beside-data-parallel"],
)
def test_a_cut_sequence_trains_as_one_process(world_size: int, sizes: dict[str, Any], model: dict[str, Any]) -> None:
    expected = fit(0, 1, None, model)
    sizes = {"tensor_parallel_size": 2, **sizes}
    for losses, norms, shapes in run_ranks(world_size, fit, sizes, {**model, "sequence_parallel": True}):
        torch.testing.assert_close(losses, expected[0], rtol=0, atol=1e-10)
        torch.testing.assert_close(norms, expected[1], rtol=0, atol=1e-10)
        assert shapes["head.weight"] == shapes["embedding.weight"] == (16, 16), "cut over the vocabulary of 32"
        assert shapes["blocks.0.feed_forward.down.weight"] == (16, 16)
        assert shapes["norm.weight"] == (16,)


def test_a_length_that_cannot_be_shared_out_is_refused_and_frozen_norms_stay_frozen() -> None:
    def rank_main(rank: int, world_size: int) -> bool:
        trainer = make_trainer(rank, world_size, ParmStrategy(tensor_parallel_size=2), max_steps=1)
        model = small_gpt(sequence_parallel=True)
        model.norm.weight.requires_grad_(False)
        with pytest.raises(ValueError, match="A sequence of 7 tokens cannot be shared out over tensor_parallel"):
            trainer.fit(model, DataLoader(RandomTokens(8, sequence_length=7), batch_size=4))
        return model.norm.weight.requires_grad or not model.blocks[0].attention_norm.weight.requires_grad

    assert run_ranks(2, rank_main) == [False, False]


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, **HEADS}


def llama(**options: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **options}))


def qwen3() -> PreTrainedModel:
    """Its norms of single heads see this rank's heads only, so their gradients are partial."""
    return Qwen3ForCausalLM(Qwen3Config(**SIZES))


class HuggingFaceModule(L.LightningModule):
    """A Hugging Face model as users hold one, beside a mixture."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model, self.moe = model, MoE(16, 32, 4)
        self.double()
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        hidden = self.model.model(batch["input_ids"]).last_hidden_state
        logits = self.model.lm_head(hidden + self.moe(hidden))
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def test_the_plans_of_hugging_face_models_are_followed() -> None:
    builders = (llama, qwen3, lambda: llama(tie_word_embeddings=True))

    def rank_main(rank: int, world_size: int, sizes: dict[str, Any] | None = None) -> list[Any]:
        results = []
        for build in builders:
            torch.manual_seed(6)
            module = HuggingFaceModule(build())
            trainer = make_trainer(rank, world_size, ParmStrategy(**sizes) if sizes else "auto", max_steps=3)
            trainer.fit(module, OrderedTokens(32, 8))
            shapes = {
                name: tuple(p.to_local().shape) for name, p in module.named_parameters() if isinstance(p, DTensor)
            }
            results.append((module.losses, shapes))
        return results

    expected = rank_main(0, 1)
    for results in run_ranks(2, rank_main, {"tensor_parallel_size": 2}):
        for (losses, _), (alone, _) in zip(results, expected, strict=True):
            torch.testing.assert_close(losses, alone, rtol=0, atol=1e-10)
        plain, _, tied = (shapes for _, shapes in results)
        assert plain["model.model.layers.1.self_attn.k_proj.weight"] == (4, 16), "one of two key heads"
        assert plain["model.model.layers.1.mlp.down_proj.weight"] == (16, 16)
        assert plain["model.lm_head.weight"] == plain["model.model.embed_tokens.weight"] == (16, 16)
        assert not {name for name in tied if "lm_head" in name or "embed" in name}, "tied weights stay one"

    for results in run_ranks(2, rank_main, {"expert_parallel_size": 1, "data_parallel": "shard"}):
        for (losses, shapes), (alone, _) in zip(results, expected, strict=True):
            torch.testing.assert_close(losses, alone, rtol=0, atol=1e-10)
            assert shapes["model.model.layers.1.mlp.down_proj.weight"] == (8, 32), "half of the rows"


def test_a_plan_that_cannot_be_followed_is_refused_with_what_would_work() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size=4 does not divide num_key_value_heads=2 of Llama"):
        hugging_face_plan(nn.ModuleDict({"model": llama()}), 4)
    model = llama()
    model._tp_plan = {"model.layers.*.mlp": "moe_tp_experts", "model.layers.*.gone": "unheard_of"}
    with pytest.raises(ValueError, match=r"the style 'moe_tp_experts' for 'model.layers.0.mlp', but known"):
        hugging_face_plan(model, 2)
    for layer in model.model.layers:
        layer.mlp = MoE(16, 32, 4)
    assert hugging_face_plan(model, 2) == {}


class Dropping(L.LightningModule):
    """Reports, from inside a fit, what dropout does on each rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.attention = Attention(16, 4, dropout=0.5)
        self.seen: dict[str, Tensor] = {}

    @property
    def tensor_parallel_plan(self) -> dict[str, Any]:
        return {k.removeprefix("blocks.0."): v for k, v in small_gpt().tensor_parallel_plan.items() if "blocks.0" in k}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x, mesh = torch.ones(2, 8, 16), self.device_mesh["tensor_parallel"]

        def drop(x: Tensor) -> Tensor:
            with different_on_peers(mesh, x.device):
                return F.dropout(x, 0.5)

        heads: list[Tensor] = []
        before = self.attention.output.register_forward_pre_hook
        before(lambda _, args: heads.append(args[0].detach()), prepend=True)
        recomputed: list[Tensor] = []
        leaf = torch.ones(64, requires_grad=True)
        checkpoint(lambda x: recomputed.append(y := drop(x)) or y, leaf, use_reentrant=False).sum().backward()
        self.seen = {"replicated": F.dropout(torch.ones(64), 0.5), "cut": drop(torch.ones(64))}
        out = self.attention(x, torch.arange(8), None)
        self.seen |= {"recomputed": recomputed[-1].detach(), "gradient": leaf.grad, "heads": heads[0] != 0}
        self.seen["afterwards"] = torch.rand(4)
        return out.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_dropout_is_equal_on_peers_where_activations_are_and_different_where_they_are_cut() -> None:
    def rank_main(rank: int, world_size: int) -> dict[str, Tensor]:
        L.seed_everything(1, verbose=False)
        model = Dropping()
        trainer = make_trainer(rank, world_size, ParmStrategy(tensor_parallel_size=2), max_steps=1)
        trainer.fit(model, OrderedTokens(8, 8))
        return model.seen

    ranks = run_ranks(4, rank_main)  # peers are (0, 1) and (2, 3)
    for name in ("replicated", "afterwards"):
        values = [seen[name] for seen in ranks]
        assert torch.equal(values[0], values[1]), name
        assert torch.equal(values[2], values[3]), name
        assert not torch.equal(values[0], values[2]), "data-parallel ranks draw their own"
    for name in ("cut", "heads"):
        assert len({tuple(seen[name].flatten().tolist()) for seen in ranks}) == 4, name
    for seen in ranks:
        torch.testing.assert_close(seen["recomputed"], seen["gradient"], rtol=0, atol=0)
        assert 0.2 < float((seen["cut"] > 0).float().mean()) < 0.8


class DroppingLlama(HuggingFaceModule):
    """Reports which heads and hidden states a Llama drops, also when a block is computed again in backward."""

    def __init__(self) -> None:
        torch.manual_seed(4)
        super().__init__(llama(attention_dropout=0.5, attn_implementation="eager", num_hidden_layers=1))
        self.seen: dict[str, list[Tensor]] = {"heads": [], "states": [], "alone": []}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        def record(name: str, values: Tensor) -> None:
            self.seen[name].append(values.detach().eq(0))

        block = self.model.model.layers[0]
        block.self_attn.register_forward_hook(lambda _, args, output: record("heads", output[1]))
        block.mlp.register_forward_pre_hook(lambda _, args: record("states", F.dropout(torch.ones(64), 0.5)))
        hidden = checkpoint(self.model.model, torch.arange(16).view(2, 8), use_reentrant=False).last_hidden_state
        record("states", F.dropout(torch.ones(64), 0.5))
        hidden.sum().backward()
        self.model.eval()
        self.model.model(torch.arange(16).view(2, 8))
        record("alone", torch.rand(64).round())
        return super().training_step(batch, batch_idx)


def test_the_heads_of_hugging_face_models_drop_differently_on_peers() -> None:
    def rank_main(rank: int, world_size: int) -> dict[str, list[Tensor]]:
        L.seed_everything(1, verbose=False)
        module = DroppingLlama()
        make_trainer(rank, world_size, ParmStrategy(tensor_parallel_size=2), max_steps=1).fit(
            module, OrderedTokens(8, 8)
        )
        return module.seen

    first, second = run_ranks(2, rank_main)
    for states, of_peer in zip(first["states"] + first["alone"], second["states"] + second["alone"], strict=True):
        assert torch.equal(states, of_peer)
    dropped, again, evaluated, *_ = first["heads"]
    assert dropped.shape == (2, 2, 8, 8), "two of four heads"
    assert torch.equal(dropped, again)
    assert not torch.equal(dropped, second["heads"][0])
    assert 0.3 < float(dropped.tril().sum() / evaluated.logical_not().sum()) < 0.7
    assert torch.equal(evaluated, torch.ones(8, 8).triu(1).expand(2, 2, 8, 8) == 1), "nothing but the future"
