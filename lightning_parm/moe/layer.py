"""The Mixture-of-Experts layer: plain PyTorch on one process, expert-parallel after ``parallelize``."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parm.moe.experts import Activation, Experts
from lightning_parm.moe.routers import Router, RouterKind
from lightning_parm.moe.schedules import Outcome, Schedule, Transport, run_schedule
from lightning_parm.moe.topology import Topology


class MoE(nn.Module):
    """A layer of E experts of which every token visits k.

    On one process it is plain PyTorch. :meth:`parallelize` cuts the experts over the ranks of a
    :class:`~lightning_parm.moe.topology.Topology`; input and output stay what they were: this rank's tokens.

    Args:
        model_dim: M, size of a token.
        hidden_dim: H, hidden size of an expert.
        num_experts: E.
        top_k: k, experts per token.
        capacity_factor: f, the most tokens an expert takes in shares of the mean; ``None`` drops none.
        activation: ``"swiglu"``, ``"gelu"`` or ``"relu_squared"``.
        router: How tokens choose experts.
        num_shared_experts: Experts that every token visits besides.
        balance_loss_weight: Of the load-balancing loss in ``auxiliary_loss``.
        z_loss_weight: Of the router's z-loss in ``auxiliary_loss``.
        sequence_parallel: Whether every mp peer holds its own share of the tokens instead of all of them.
        bias: Whether experts have biases.
        device: Where the parameters are made.
        dtype: Their type.

    Attributes:
        schedule: Where communication is placed: ``"plain"``, ``"s1"``, ``"s2"``, ``"baseline"`` or ``"auto"``. Like
            ``transport`` and ``chunks`` it may be changed between batches, on all ranks alike.
        transport: ``"fused"``, ``"two_hop"`` or ``"auto"``.
        chunks: Parts in flight together, or ``"auto"``.
        topology: Where the experts are.
        auxiliary_loss: Of the last forward; to be added to the loss.
        tokens_per_expert: ``(E,)``, detached; its sum over all ranks counts the rows routed to each expert.

    Example:
        >>> layer = MoE(model_dim=8, hidden_dim=16, num_experts=4, balance_loss_weight=0.01)
        >>> x = torch.randn(2, 5, 8)
        >>> layer(x).shape
        torch.Size([2, 5, 8])
        >>> layer.tokens_per_expert.sum()
        tensor(20.)
        >>> layer.auxiliary_loss.item() >= 0.01
        True
    """

    tokens_per_expert: Tensor

    def __init__(
        self,
        model_dim: int,
        hidden_dim: int,
        num_experts: int,
        top_k: int = 2,
        capacity_factor: float | None = None,
        activation: Activation = "swiglu",
        router: RouterKind = "softmax",
        num_shared_experts: int = 0,
        balance_loss_weight: float = 0.0,
        z_loss_weight: float = 0.0,
        sequence_parallel: bool = False,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.model_dim = model_dim
        self.hidden_dim = hidden_dim
        self.num_experts = num_experts
        self.top_k = top_k
        self.balance_loss_weight = balance_loss_weight
        self.z_loss_weight = z_loss_weight
        self.sequence_parallel = sequence_parallel
        self.router = Router(model_dim, num_experts, top_k, router, device=device, dtype=dtype)
        self.experts = Experts(model_dim, hidden_dim, num_experts, activation, bias, device, dtype)
        self.shared_experts = (
            Experts(model_dim, num_shared_experts * hidden_dim, 1, activation, bias, device, dtype)
            if num_shared_experts
            else None
        )
        self.topology = Topology.local()
        self.schedule: Schedule | Literal["auto"] = "auto"
        self.transport: Transport | Literal["auto"] = "auto"
        self.chunks: int | Literal["auto"] = "auto"
        self.auxiliary_loss = torch.zeros(())
        self.register_buffer("tokens_per_expert", torch.zeros(num_experts, device=device), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew: equal on all ranks, and expert e the same wherever it is."""
        device = self.router.weight.device
        seed = torch.randint(2**62, (), dtype=torch.int64)
        if self.topology.world_size > 1 and device.type != "meta":  # ranks may have been seeded differently
            seed = seed.to(device)
            dist.broadcast(seed, 0)
        if device.type == "meta":
            return
        self.router.reset_parameters(int(seed))
        self.experts.reset_parameters(int(seed) + 1)
        if self.shared_experts is not None:
            self.shared_experts.reset_parameters(int(seed) + 2**40)

    def parallelize(
        self,
        topology: Topology,
        schedule: Schedule | Literal["auto"] = "auto",
        transport: Transport | Literal["auto"] = "auto",
        chunks: int | Literal["auto"] = "auto",
    ) -> MoE:
        """Replace the expert parameters, in place, by this rank's shards; they must be equal on all ranks, or meta.

        Args:
            topology: The sizes and ranks.
            schedule: See the attribute.
            transport: See the attribute.
            chunks: See the attribute.

        Returns:
            The layer itself.

        Raises:
            ValueError: If N_EP does not divide E, or N_ESP not H.
            RuntimeError: If the layer is sharded already, over another topology.
        """
        if self.topology.world_size > 1 and self.topology != topology:
            raise RuntimeError(f"This layer is sharded over {self.topology} already; parallelize a new one instead.")
        for name, number, axis in (
            ("num_experts", self.num_experts, "expert_parallel_size"),
            ("hidden_dim", self.hidden_dim, "expert_shard_size"),
        ):
            size = getattr(topology, axis)
            if number % size:
                raise ValueError(f"{axis}={size} does not divide {name}={number}; choose a size that does.")
        if self.topology != topology:
            self.experts.shard(topology)
            self.topology = topology
        self.schedule, self.transport, self.chunks = schedule, transport, chunks
        return self

    def expert_placements(self) -> dict[str, tuple[int | None, int | None]]:
        """For every sharded parameter the dim cut over ep and the dim cut over esp.

        ``None`` means replicated there, with equal gradients. A parameter that is not listed is replicated everywhere.

        Example:
            >>> MoE(model_dim=8, hidden_dim=16, num_experts=4).expert_placements()
            {'experts.w_in': (0, 2), 'experts.w_out': (0, 2)}
        """
        return {f"experts.{name}": dims for name, dims in self.experts.placements().items()}

    def forward(self, x: Tensor) -> Tensor:
        """Tokens ``(..., M)`` -> ``(..., M)``."""
        tokens = x.reshape(-1, self.model_dim)
        schedule = "s1" if self.schedule == "auto" else self.schedule
        transport = "fused" if self.transport == "auto" else self.transport
        outcome = run_schedule(self, tokens, schedule, transport, 1 if self.chunks == "auto" else self.chunks)
        self.tokens_per_expert = outcome.load
        self.auxiliary_loss = self._auxiliary_loss(outcome)
        return outcome.output.view(x.shape)

    def _auxiliary_loss(self, outcome: Outcome) -> Tensor:
        """Value of this rank's own segment, gradient of all segments that it routed."""
        load, probabilities, rest = torch.split(outcome.statistics, [self.num_experts, self.num_experts, 2], -1)
        squares, tokens = rest[:, 0], rest[:, 1].clamp_min(1).detach()
        share = load.detach() / (tokens * self.top_k).unsqueeze(1)
        balance = self.num_experts * (share * probabilities).sum(-1) / tokens
        losses = self.balance_loss_weight * balance + self.z_loss_weight * squares / tokens
        total = losses.sum()
        return losses[outcome.own].detach() + (total - total.detach())
