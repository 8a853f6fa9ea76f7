"""The Mixture-of-Experts layer: plain PyTorch on one process, expert-parallel after ``parallelize``."""

from __future__ import annotations

import warnings
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parm.moe.collectives import reduce
from lightning_parm.moe.experts import Activation, Experts
from lightning_parm.moe.routers import Router, RouterKind
from lightning_parm.moe.routing import DropPolicy
from lightning_parm.moe.schedules import Schedule, Transport, run_schedule
from lightning_parm.moe.stages import Outcome
from lightning_parm.moe.topology import Topology

BalanceScope = Literal["micro_batch", "global_batch"]


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
        expert_bias: Whether experts have biases.
        normalize_weights: Whether a token's k weights are scaled to sum to 1.
        weight_scale: Factor on all weights.
        num_router_groups: Groups of experts of which a token uses ``num_chosen_groups``.
        num_chosen_groups: Groups a token may use.
        jitter: Relative noise on the router's input while training.
        drop_policy: Which choices go beyond an expert's capacity: the later in ``"position"``, or those of lower
            ``"probability"``.
        balance_scope: Over which tokens the load of the balance loss is taken: this rank's (with its mp peers) in a
            ``"micro_batch"``, or all ranks' in the ``"global_batch"``.
        static_shapes: With a capacity, pad every expert to it instead of exchanging counts, for which the host would
            wait, unless s1 runs in chunks: more rows. All ranks must then always hold equally many tokens.
        recompute: Whether the experts' hidden rows are computed again in backward instead of kept.
        device: Where the parameters are made.
        dtype: Their type.

    Attributes:
        schedule: Where communication is placed: ``"plain"``, ``"s0"``, ``"s1"``, ``"s2"``, ``"baseline"`` or
            ``"auto"``. Like ``transport`` and ``chunks`` it may be changed between batches, on all ranks alike.
        transport: ``"fused"``, ``"two_hop"`` or ``"auto"``.
        chunks: Parts in flight together, or ``"auto"``.
        topology: Where the experts are.
        auxiliary_loss: Of the last forward; to be added to the loss.
        tokens_per_expert: ``(E,)``, detached; its sum over all ranks counts the tokens that chose each expert.
        dropped_share: Of this rank's choices in the last forward, what capacity cut off; 0-dim, detached.
        has_auxiliary_loss: Whether any of its parts has a weight.

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
    _load: Tensor

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
        expert_bias: bool = False,
        normalize_weights: bool = True,
        weight_scale: float = 1.0,
        num_router_groups: int = 1,
        num_chosen_groups: int = 1,
        jitter: float = 0.0,
        drop_policy: DropPolicy = "position",
        balance_scope: BalanceScope = "micro_batch",
        static_shapes: bool = False,
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if min(model_dim, hidden_dim, num_experts) < 1 or num_shared_experts < 0:
            raise ValueError(
                f"model_dim={model_dim}, hidden_dim={hidden_dim} and num_experts={num_experts} must be at least 1, and "
                f"num_shared_experts={num_shared_experts} at least 0."
            )
        if not 0 <= jitter < 1:
            raise ValueError(f"jitter={jitter} must be at least 0 and less than 1.")
        if capacity_factor is not None and not capacity_factor > 0:
            raise ValueError(f"capacity_factor={capacity_factor} must be positive, or None to drop nothing.")
        if static_shapes and (capacity_factor is None or router == "expert_choice"):
            raise ValueError("static_shapes=True needs a capacity_factor, and a router by which tokens choose.")
        for name, value, allowed in (
            ("drop_policy", drop_policy, DropPolicy),
            ("balance_scope", balance_scope, BalanceScope),
        ):
            if value not in get_args(allowed):
                raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(get_args(allowed))}.")
        self.model_dim = model_dim
        self.hidden_dim = hidden_dim
        self.num_experts = num_experts
        self.top_k = top_k
        self.balance_loss_weight = balance_loss_weight
        self.z_loss_weight = z_loss_weight
        self.sequence_parallel = sequence_parallel
        self.capacity_factor = capacity_factor
        self.drop_policy = drop_policy
        self.balance_scope = balance_scope
        self.static_shapes = static_shapes
        self.recompute = recompute
        self.router = Router(
            model_dim,
            num_experts,
            top_k,
            router,
            normalize_weights,
            weight_scale,
            num_router_groups,
            num_chosen_groups,
            capacity_factor,
            jitter,
            device,
            dtype,
        )
        self.experts = Experts(model_dim, hidden_dim, num_experts, activation, expert_bias, device, dtype)
        self.shared_experts: Experts | None = None
        if num_shared_experts:
            hidden = num_shared_experts * hidden_dim
            self.shared_experts = Experts(model_dim, hidden, 1, activation, expert_bias, device, dtype)
        self.topology = Topology.local()
        self.schedule: Schedule | Literal["auto"] = "auto"
        self.transport: Transport | Literal["auto"] = "auto"
        self.chunks: int | Literal["auto"] = "auto"
        self.auxiliary_loss = torch.zeros(())
        self.dropped_share = torch.zeros(())
        self._last = torch.zeros(2 * num_experts + 2)
        self.register_buffer("tokens_per_expert", torch.zeros(num_experts, device=device), persistent=False)
        self.register_buffer("_load", torch.zeros(num_experts, device=device), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew: equal on all ranks, and expert e the same wherever it is."""
        device = self.router.weight.device
        if device.type == "meta":
            return
        seed = torch.randint(2**62, (), dtype=torch.int64).to(device)
        if self.topology.world_size > 1:  # ranks may have been seeded differently
            dist.broadcast(seed, 0)
        self.tokens_per_expert.zero_()
        self._load.zero_()
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
        """Tokens ``(..., M)`` -> ``(..., M)``.

        Raises:
            ValueError: If the tokens are of another size, or the schedule cannot run on the topology.
        """
        if not x.dim() or x.shape[-1] != self.model_dim:
            raise ValueError(
                f"The input is of shape {tuple(x.shape)}, but its last dim must be model_dim={self.model_dim}."
            )
        if self.training and self.has_auxiliary_loss and x.requires_grad and not torch.is_grad_enabled():
            warnings.warn(
                "This layer runs without a graph, as in checkpoint(..., use_reentrant=True), and the gradient of its "
                "auxiliary loss is lost; checkpoint with use_reentrant=False.",
                stacklevel=2,
            )
        outcome: Outcome = run_schedule(
            self,
            x.reshape(-1, self.model_dim),
            "s1" if self.schedule == "auto" else self.schedule,
            "fused" if self.transport == "auto" else self.transport,
            1 if self.chunks == "auto" else self.chunks,
        )
        self.tokens_per_expert, self.dropped_share = outcome.load, outcome.dropped
        if self.training and self.router.bias is not None:
            self._load = self._load + outcome.load
        self.auxiliary_loss = self._auxiliary_loss(outcome)
        return outcome.output.view(x.shape)

    @torch.no_grad()
    def update_router_bias(self, rate: float = 0.001) -> None:
        """Move the sigmoid router's bias against the load of all ranks since the last call; once per optimizer step.

        Args:
            rate: Speed (DeepSeek-V3, sec. 4.2: 0.001).

        Raises:
            RuntimeError: If the router has no bias.
        """
        load = self._load
        if self.topology.world_size > 1:
            dist.all_reduce(load)
        self.router.update_bias(load, rate)
        self._load = torch.zeros_like(load)

    @property
    def has_auxiliary_loss(self) -> bool:
        """Whether the balance loss or the z-loss has a weight."""
        return bool(self.balance_loss_weight or self.z_loss_weight)

    @property
    def balance_loss(self) -> Tensor:
        """Of this rank's tokens in the last forward, before its weight; 0-dim, detached."""
        return self._losses(self._last)[0]

    @property
    def z_loss(self) -> Tensor:
        """The same of the router's z-loss."""
        return self._losses(self._last)[1]

    def _losses(self, statistics: Tensor) -> tuple[Tensor, Tensor]:
        """Balance loss and z-loss of every part with statistics ``(..., 2 E + 2)``, before their weights.

        Balance: ``E sum_e f_e P_e`` with f_e the share of choices and P_e the mean probability of expert e (Fedus et
        al., 2021, eq. 4). Z-loss: mean squared log partition function (Zoph et al., 2022, eq. 5).
        """
        load, probabilities, rest = statistics.split([self.num_experts, self.num_experts, 2], -1)
        load, tokens = load.detach(), rest[..., 1].detach().clamp_min(1)
        share = load / load.sum(-1, keepdim=True).clamp_min(1)
        return self.num_experts * (share * probabilities).sum(-1) / tokens, rest[..., 0] / tokens

    def _auxiliary_loss(self, outcome: Outcome) -> Tensor:
        """Value of this rank's own part, gradient of all parts that it routed."""
        statistics = outcome.statistics
        if self.balance_scope == "global_batch" and self.balance_loss_weight:
            load = statistics[outcome.own, : self.num_experts].detach()
            load = reduce(load, self.topology.group("data_parallel")).wait()
            statistics = torch.cat([load.expand(len(statistics), -1), statistics[:, self.num_experts :]], -1)
        self._last = statistics[outcome.own].detach()
        if not self.has_auxiliary_loss:
            return self._last.new_zeros(())
        balance, z = self._losses(statistics)
        losses = self.balance_loss_weight * balance + self.z_loss_weight * z
        total = losses.sum()
        return losses[outcome.own].detach() + (total - total.detach())

    def __getstate__(self) -> dict[str, Any]:
        """Without the graph of the last forward, so that a layer can be copied and pickled after it."""
        return {**self.__dict__, "auxiliary_loss": self.auxiliary_loss.detach()}
