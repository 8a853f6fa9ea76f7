"""One layer under one schedule after another, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parm.bench.deepspeed_order import deepspeed_order
from lightning_parm.moe import MoE, Topology
from lightning_parm.moe.cost import Workload
from lightning_parm.moe.experts import Activation
from lightning_parm.moe.prediction import Candidate

Action = Callable[[], object]


class Contest:
    """One layer with fixed weights, tokens and output gradients, run under one candidate after another."""

    def __init__(self, topology: Topology, work: Workload, activation: Activation, device: torch.device) -> None:
        torch.manual_seed(0)
        self.layer = MoE(
            work.model_dim,
            work.hidden_dim,
            work.num_experts,
            work.top_k,
            work.capacity_factor,
            activation,
            router="uniform",  # balance is not what is measured
            static_shapes=work.static_shapes,
            device=device,
        ).parallelize(topology)
        torch.manual_seed(1 + topology.data_parallel_rank)
        self.x = torch.randn(work.num_tokens, work.model_dim, device=device, requires_grad=True)
        self.gradient = torch.randn(work.num_tokens, work.model_dim, device=device)
        self.device = device

    def forward(self, candidate: Candidate) -> Tensor:
        """The layer's output (S, M) under a candidate."""
        if candidate.schedule == "deepspeed":
            return deepspeed_order(self.layer, self.x)
        self.layer.schedule, self.layer.transport, self.layer.chunks = candidate.schedule, *candidate[1:]
        y: Tensor = self.layer(self.x)
        return y

    def largest_difference(self, runs: list[Callable[[], Tensor]]) -> float:
        """Between the outputs and gradients of any two runs, over all ranks."""
        results = []
        for run in runs:
            self._clear()
            y = run()
            y.backward(self.gradient)
            results.append((y.detach(), _gradient(self.x), _gradient(self.layer.experts.w_in)))
        pairs = [pair for result in results for pair in zip(result, results[0], strict=True)]
        largest = torch.stack([(value - first).abs().max() for value, first in pairs]).max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return float(largest)

    def both(self, run: Callable[[], Tensor]) -> None:
        """Forward and backward."""
        run().backward(self.gradient)

    def alternate(self, actions: list[Action], repetitions: int) -> list[list[float]]:
        """The slowest rank's seconds of every repetition of everything; one more of each comes first, to warm up."""
        times: list[list[float]] = [[] for _ in actions]
        for repetition in range(repetitions + 1):
            order = range(len(actions)) if repetition % 2 else reversed(range(len(actions)))
            for index in order:
                self._clear()
                self._synchronize()
                dist.barrier()
                started = time.perf_counter()
                actions[index]()
                self._synchronize()
                if repetition:
                    times[index].append(time.perf_counter() - started)
        slowest = torch.tensor(times, dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return slowest.tolist()

    def _clear(self) -> None:
        self.layer.zero_grad()
        self.x.grad = None

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.clone()
