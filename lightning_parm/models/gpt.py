"""A small GPT with MoE blocks: rotary attention, RMSNorm, and a feed-forward part that is dense or a mixture."""

from __future__ import annotations

import math
from typing import Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn import functional as F

from lightning_parm.moe import MoE
from lightning_parm.parallel.randomness import different_on_peers, tensor_parallel_mesh


def rotate(x: Tensor, position_ids: Tensor, base: float = 10000.0) -> Tensor:
    """Rotary position embedding (RoFormer, section 3.2) of ``x``.

    Args:
        x: Queries or keys ``(B, heads, L, head_dim)``.
        position_ids: Positions ``(B, L)`` or ``(L,)``.
        base: Base of the frequencies.

    Returns:
        ``x`` with each pair of channels rotated by its position, ``(B, heads, L, head_dim)``.
    """
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = position_ids.to(torch.float32).unsqueeze(-1) * frequencies  # (B, L, half) or (L, half)
    if angles.dim() == 3:
        angles = angles.unsqueeze(1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention; the number of heads on this rank follows from the width of its projections."""

    def __init__(self, model_dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.head_dim = model_dim // num_heads
        self.dropout = dropout
        self.query = nn.Linear(model_dim, model_dim, bias=False)
        self.key = nn.Linear(model_dim, model_dim, bias=False)
        self.value = nn.Linear(model_dim, model_dim, bias=False)
        self.output = nn.Linear(model_dim, model_dim, bias=False)

    def forward(self, x: Tensor, position_ids: Tensor, mask: Tensor | None) -> Tensor:
        """Map ``(B, L, M)`` to ``(B, L, M)``; ``mask`` is ``(B, 1, L, L)``, True where a query may look."""
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        with different_on_peers(tensor_parallel_mesh(self.query.weight) if dropout else None, value.device):
            attended = F.scaled_dot_product_attention(
                rotate(query, position_ids),
                rotate(key, position_ids),
                value,
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=mask is None,
            )
        return self.output(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """A dense SwiGLU feed-forward part (Shazeer 2020)."""

    def __init__(self, model_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(model_dim, hidden_dim, bias=False)
        self.up = nn.Linear(model_dim, hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, model_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., M)`` to ``(..., M)``."""
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a feed-forward part, each behind a norm and beside a residual."""

    def __init__(self, model_dim: int, num_heads: int, dropout: float, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(model_dim)
        self.attention = Attention(model_dim, num_heads, dropout)
        self.feed_forward_norm = nn.RMSNorm(model_dim)
        self.feed_forward = feed_forward
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, position_ids: Tensor, mask: Tensor | None) -> Tensor:
        """Map ``(B, L, M)`` to ``(B, L, M)``."""
        x = x + self._drop(self.attention(self.attention_norm(x), position_ids, mask))
        return x + self._drop(self.feed_forward(self.feed_forward_norm(x)))

    def _drop(self, x: Tensor) -> Tensor:
        # The norm is distributed where the sequence is cut over tensor-parallel ranks; else they hold the same tokens.
        active = self.training and self.dropout.p > 0
        with different_on_peers(tensor_parallel_mesh(self.attention_norm.weight) if active else None, x.device):
            return self.dropout(x)  # type: ignore[no-any-return]


class GPT(pl.LightningModule):
    """A decoder-only language model whose feed-forward parts are mixtures of experts.

    It takes the batches of :class:`~lightning_parm.TokenDataModule`: ``input_ids`` and ``labels`` ``(B, L)``, and
    where they are present ``position_ids`` and ``document_ids`` ``(B, L)``, which keep attention inside documents.

    Args:
        vocab_size: Number of token ids.
        num_layers: Number of blocks.
        num_heads: Attention heads of a block; divides ``model_dim``.
        model_dim: Width M of the residual stream.
        hidden_dim: Hidden width H of one expert, and of a dense feed-forward part.
        num_experts: Experts E of a mixture; 0 makes every block dense.
        top_k: Experts that serve one token.
        moe_every: Every n-th block is a mixture, counted so that the last block is one.
        capacity_factor: Rows an expert takes, relative to a fair share; None drops nothing.
        router: The router of the mixtures, see :class:`~lightning_parm.MoE`.
        num_shared_experts: Experts that serve every token.
        balance_loss_weight: Weight of the load-balancing loss.
        z_loss_weight: Weight of the router's z-loss.
        dropout: Dropout probability of attention and residuals.
        learning_rate: Peak learning rate of AdamW.
        weight_decay: Weight decay of the matrices.
        warmup_steps: Steps over which the learning rate rises linearly.
        decay_steps: Steps after which the cosine has fallen to a tenth of the peak; None keeps the peak.
        sequence_parallel: Whether tensor-parallel ranks share the sequence out between attention and the feed-forward
            parts, so that norms, residuals and routers see each token on one rank only (Korthikanti et al., 2022). The
            length must then be a multiple of the number of those ranks.

    Raises:
        ValueError: If ``num_heads`` does not divide ``model_dim``, or the head width is odd; in ``forward``, if a
            sequence cannot be shared out.

    Example:
        >>> model = GPT(vocab_size=64, num_layers=1, num_heads=2, model_dim=16, hidden_dim=32, num_experts=4)
        >>> tokens = torch.arange(12).view(2, 6)
        >>> model(tokens).shape
        torch.Size([2, 6, 64])
    """

    def __init__(
        self,
        vocab_size: int,
        num_layers: int = 4,
        num_heads: int = 4,
        model_dim: int = 256,
        hidden_dim: int = 512,
        num_experts: int = 8,
        top_k: int = 2,
        moe_every: int = 1,
        capacity_factor: float | None = None,
        router: Literal["softmax", "sigmoid", "expert_choice", "uniform"] = "softmax",
        num_shared_experts: int = 0,
        balance_loss_weight: float = 0.01,
        z_loss_weight: float = 0.001,
        dropout: float = 0.0,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 20,
        decay_steps: int | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        if model_dim % num_heads or (model_dim // num_heads) % 2:
            raise ValueError(
                f"model_dim={model_dim} must be a multiple of 2*num_heads={2 * num_heads} (heads of an even width); "
                f"take model_dim={-(-model_dim // (2 * num_heads)) * 2 * num_heads}."
            )
        self.save_hyperparameters()
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.warmup_steps, self.decay_steps = warmup_steps, decay_steps
        self.sequence_parallel = sequence_parallel
        self.embedding = nn.Embedding(vocab_size, model_dim)
        self.blocks = nn.ModuleList()
        for layer in range(num_layers):
            feed_forward: nn.Module
            if num_experts and (num_layers - 1 - layer) % moe_every == 0:
                feed_forward = MoE(
                    model_dim,
                    hidden_dim,
                    num_experts,
                    top_k=top_k,
                    capacity_factor=capacity_factor,
                    router=router,
                    num_shared_experts=num_shared_experts,
                    balance_loss_weight=balance_loss_weight,
                    z_loss_weight=z_loss_weight,
                    sequence_parallel=sequence_parallel,
                )
            else:
                feed_forward = FeedForward(model_dim, hidden_dim)
            self.blocks.append(Block(model_dim, num_heads, dropout, feed_forward))
        self.norm = nn.RMSNorm(model_dim)
        self.head = nn.Linear(model_dim, vocab_size, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=model_dim**-0.5)

    @property
    def tensor_parallel_plan(self) -> dict[str, ParallelStyle]:
        """Which dense layers are cut over the ranks of a tensor-parallel group, by module name."""
        cut = Shard(1) if self.sequence_parallel else Replicate()  # how tokens lie between the cut layers
        plan: dict[str, ParallelStyle] = {}
        for index, block in enumerate(self.blocks):
            prefix = f"blocks.{index}"
            for name in ("query", "key", "value"):
                plan[f"{prefix}.attention.{name}"] = ColwiseParallel()
            plan[f"{prefix}.attention.output"] = RowwiseParallel(output_layouts=cut)
            dense = isinstance(block.feed_forward, FeedForward)
            if dense:
                for name in ("gate", "up"):
                    plan[f"{prefix}.feed_forward.{name}"] = ColwiseParallel()
                plan[f"{prefix}.feed_forward.down"] = RowwiseParallel(output_layouts=cut)
            if self.sequence_parallel:
                whole = Replicate()
                plan[f"{prefix}.attention_norm"] = SequenceParallel()
                plan[f"{prefix}.attention"] = PrepareModuleInput(
                    input_layouts=(cut, None, None), desired_input_layouts=(whole, None, None)
                )
                plan[f"{prefix}.feed_forward_norm"] = SequenceParallel(use_local_output=not dense)
                if dense:
                    plan[f"{prefix}.feed_forward"] = PrepareModuleInput(input_layouts=cut, desired_input_layouts=whole)
        if self.sequence_parallel:
            plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=cut)
            plan["norm"] = SequenceParallel()
            plan["head"] = ColwiseParallel(input_layouts=cut, output_layouts=Replicate())
        return plan

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Tensor:
        """Next-token logits ``(B, L, vocab_size)`` of ``input_ids`` ``(B, L)``."""
        length = input_ids.shape[-1]
        peers = tensor_parallel_mesh(self.norm.weight)  # distributed where the sequence is cut
        if peers is not None and length % peers.size():
            raise ValueError(
                f"A sequence of {length} tokens cannot be shared out over tensor_parallel_size={peers.size()}: with "
                "sequence_parallel=True the length must be a multiple of it. Pad the batch, or set it to False."
            )
        mask = None
        if document_ids is not None:
            same_document = document_ids.unsqueeze(-1) == document_ids.unsqueeze(-2)
            mask = same_document.tril().unsqueeze(1)
        if position_ids is None:
            position_ids = torch.arange(length, device=input_ids.device)
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x, position_ids, mask)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self(batch["input_ids"], batch.get("position_ids"), batch.get("document_ids"))
        return F.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy plus the auxiliary losses of the mixtures."""
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        auxiliary = [block.feed_forward.auxiliary_loss for block in self.blocks if isinstance(block.feed_forward, MoE)]
        return loss + torch.stack(auxiliary).sum() if auxiliary else loss

    def _evaluate(self, name: str, batch: dict[str, Tensor]) -> None:
        # A rank left with nothing but padding takes part in the mixtures all the same, and counts for nothing.
        loss = self._loss(batch)
        counted = int((batch["labels"] != -100).sum())
        loss = loss if counted else torch.zeros_like(loss)
        self.log(name, loss, prog_bar=True, sync_dist=True, on_epoch=True, batch_size=counted)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the cross-entropy of the validation data as ``val_loss``, each token counted once."""
        self._evaluate("val_loss", batch)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the cross-entropy of the test data as ``test_loss``, each token counted once."""
        self._evaluate("test_loss", batch)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Once a step, move the bias of sigmoid routers against the load (DeepSeek-V3, section 2.1.2)."""
        for block in self.blocks:
            if isinstance(block.feed_forward, MoE) and block.feed_forward.router.bias is not None:
                block.feed_forward.update_router_bias()

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The most probable next tokens ``(B, L)``."""
        return self(batch["input_ids"], batch.get("position_ids"), batch.get("document_ids")).argmax(-1)  # type: ignore[no-any-return]

    def _learning_rate_factor(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay_steps is None:
            return 1.0
        span = max(1, self.decay_steps - self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / span)
        return 0.1 + 0.45 * (1.0 + math.cos(math.pi * done))

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW with weight decay on matrices only, warm-up and an optional cosine."""
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": self.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=self.learning_rate, betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._learning_rate_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
