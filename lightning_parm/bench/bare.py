"""The least that a schedule without chunks takes on a machine: its collectives and products, and nothing else.

What lies between this and what the links allow is the machine's: gloo or NCCL, the kernel's network, matrix products,
ranks that share cores. What a layer takes beyond this is the layer's: routing, rows put in order, autograd, Python.
"""

from __future__ import annotations

import math

import torch

from lightning_parm.bench.contest import Action
from lightning_parm.moe.calibrate import collective, waited
from lightning_parm.moe.cost import Collective, Workload
from lightning_parm.moe.prediction import Candidate
from lightning_parm.moe.topology import Topology


def bare(
    candidate: Candidate, calls: list[Collective], work: Workload, topology: Topology, device: torch.device
) -> Action:
    """What runs the collectives and matrix products of one forward and backward, on buffers that exist already.

    Args:
        candidate: The schedule, in one chunk.
        calls: Its collectives.
        work: The layer.
        topology: The groups.
        device: Where the buffers are.

    Example:
        >>> work = Workload(num_tokens=8, model_dim=4, hidden_dim=4, num_experts=2, top_k=1)
        >>> bare(Candidate("s1"), [], work, Topology.local(), torch.device("cpu"))()
    """
    forward, backward = _products(math.ceil(work.rows_at_experts(candidate.schedule)), work, device)
    sent = [
        (call.backward, waited(collective(call.kind, call.axis, call.num_bytes, topology, device))) for call in calls
    ]
    before, after = ([run for is_backward, run in sent if is_backward == wanted] for wanted in (False, True))

    def everything() -> None:
        for run in (*before, forward, backward, *after):
            run()

    return everything


def _products(rows: int, work: Workload, device: torch.device) -> tuple[Action, Action]:
    inner = work.hidden_dim // work.expert_shard_size
    wide = inner * (work.num_matrices - 1)
    x, up, hidden, of_up, down = (
        torch.zeros(shape, device=device)
        for shape in (
            (rows, work.model_dim),
            (wide, work.model_dim),
            (rows, inner),
            (rows, wide),
            (work.model_dim, inner),
        )
    )
    forward = lambda: (x @ up.t(), hidden @ down.t())  # noqa: E731
    backward = lambda: (x @ down, x.t() @ hidden, of_up @ up, of_up.t() @ x)  # noqa: E731
    return forward, backward
