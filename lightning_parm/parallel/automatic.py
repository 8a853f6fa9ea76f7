"""Chooses the schedule of every MoE layer after the first batch of a fit, when the layers' sizes are known."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn

from lightning_parm.cache import cache_folder
from lightning_parm.moe import MoE, Topology
from lightning_parm.moe.calibrate import calibrate
from lightning_parm.moe.choice import MAX_CHUNKS, Choice, candidates, choose_for
from lightning_parm.moe.cost import Workload
from lightning_parm.moe.links import Links
from lightning_parm.moe.prediction import Candidate
from lightning_parm.parallel.placement import moe_layers
from lightning_parm.parallel.trial import Trial

log = logging.getLogger("lightning.pytorch")


class AutomaticSchedule:
    """Watches the first batch, then sets ``schedule``, ``transport`` and ``chunks`` of each layer, on all ranks alike.

    What the user fixed stays fixed. Measured constants never change results, only speed.

    Args:
        module: The model; its layers run their defaults until :meth:`decide`.
        topology: Sizes and groups.
        fixed: ``(schedule, transport, chunks)`` as the user gave them, ``"auto"`` for what is to be chosen.
        verify_steps: Batches for which each of the two best candidates is timed; 0 trusts the prediction.
    """

    def __init__(
        self, module: nn.Module, topology: Topology, fixed: tuple[Any, Any, Any], verify_steps: int = 0
    ) -> None:
        self._topology = topology
        schedule, transport, chunks = fixed
        # what is of no effect shuts no candidate out
        if schedule in ("plain", "s0") or topology.expert_shard_size == 1:
            transport = "auto"
        if schedule == "plain":
            chunks = "auto"
        self._fixed = schedule, transport, chunks
        self._max_chunks = MAX_CHUNKS if chunks == "auto" else max(MAX_CHUNKS, chunks)
        self._verify_steps = verify_steps
        self._trial: Trial | None = None
        self._batches = 0
        self._layers = list(moe_layers(module))
        self._seen = [(0, 4)] * len(self._layers)  # tokens and bytes of an element, by layer
        self._handles = [
            layer.register_forward_pre_hook(self._note(index)) for index, (_, layer) in enumerate(self._layers)
        ]

    @classmethod
    def watch(
        cls, module: nn.Module, topology: Topology, fixed: tuple[Any, Any, Any], verify_steps: int = 0
    ) -> AutomaticSchedule | None:
        """Begin, if there is anything to choose: a layer that communicates, and a choice the user left open."""
        communicates = topology.fused_size > 1 or topology.tensor_parallel_size > 1
        if communicates and "auto" in fixed and fixed[0] != "baseline" and any(True for _ in moe_layers(module)):
            return cls(module, topology, fixed, verify_steps)
        return None

    def before_batch(self, device: torch.device) -> None:
        """Call before every batch; the second call decides, on every rank alike whatever the first batch held."""
        self._batches += 1
        if self._batches == 2:
            choices = self.decide(device)
            if self._verify_steps:
                self._trial = self._try_two(choices, device)
        elif self._trial is not None and self._trial.before_batch():
            self._trial = None

    def _note(self, index: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            assert isinstance(layer, MoE)
            tokens = inputs[0].numel() // layer.model_dim
            peers = self._topology.tensor_parallel_size if layer.sequence_parallel else 1
            self._seen[index] = (max(self._seen[index][0], tokens * peers), inputs[0].element_size())

        return hook

    def decide(self, device: torch.device, links: Links | None = None) -> list[Choice]:
        """Calibrate, choose for each layer, and set it; every rank must call it.

        Args:
            device: Where this rank computes.
            links: Constants of the cluster; None measures them, or takes the kept ones of an equal run.
        """
        self.remove()
        seen = torch.tensor(self._seen, device=device)
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)  # ranks may hold batches of different sizes
        workloads = [
            self._workload(layer, int(tokens), int(element_bytes))
            for (_, layer), (tokens, element_bytes) in zip(self._layers, seen.tolist(), strict=True)
        ]
        largest = max(work.largest_bytes for work in workloads)
        links = links or calibrate(self._topology, device, cache_folder(), largest_bytes=largest)
        choices: list[Any] = [choose_for(work, links, self._max_chunks, self._allowed) for work in workloads]
        dist.broadcast_object_list(choices, 0)  # equal anyway; this makes it certain
        for (_, layer), choice in zip(self._layers, choices, strict=True):
            layer.schedule, layer.transport, layer.chunks = choice.candidate
        self._report(choices)
        return choices

    def _allowed(self, candidate: Candidate) -> bool:
        return all(fixed in ("auto", value) for fixed, value in zip(self._fixed, candidate, strict=True))

    def _workload(self, layer: MoE, tokens: int, element_bytes: int) -> Workload:
        return Workload(
            num_tokens=tokens,
            model_dim=layer.model_dim,
            hidden_dim=layer.hidden_dim,
            num_experts=layer.num_experts,
            top_k=layer.top_k,
            tensor_parallel_size=self._topology.tensor_parallel_size,
            expert_parallel_size=self._topology.expert_parallel_size,
            expert_shard_size=self._topology.expert_shard_size,
            capacity_factor=layer.capacity_factor,
            static_shapes=layer.static_shapes,
            sequence_parallel=layer.sequence_parallel,
            auxiliary_loss=layer.has_auxiliary_loss,
            num_matrices=3 if layer.experts.activation == "swiglu" else 2,
            element_bytes=element_bytes,
        )

    def _try_two(self, choices: list[Choice], device: torch.device) -> Trial | None:
        """A trial of every layer's best candidate against every layer's second best, if any layer has one."""
        seconds = []
        for choice in choices:
            possible = [each for each in candidates(self._topology, self._max_chunks) if self._allowed(each)]
            others = sorted(possible, key=lambda each: choice.seconds[each])
            seconds.append(next((each for each in others if each != choice.candidate), choice.candidate))
        best = [choice.candidate for choice in choices]
        layers = [layer for _, layer in self._layers]
        return None if seconds == best else Trial(layers, (best, seconds), self._verify_steps, device)

    @rank_zero_only
    def _report(self, choices: list[Choice]) -> None:
        width = max(len(name) for name, _ in self._layers)
        lines = ["Schedules by predicted milliseconds of forward and backward:"]
        for (name, _), choice in zip(self._layers, choices, strict=True):
            best_first = sorted(choice.seconds, key=lambda candidate: choice.seconds[candidate])
            others = ", ".join(f"{c} {1e3 * choice.seconds[c]:.2f}" for c in best_first if c != choice.candidate)
            lines.append(
                f"  {name:{width}}  {choice.candidate} {1e3 * choice.seconds[choice.candidate]:.2f}  (others: {others})"
            )
        log.info("\n".join(lines))

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
