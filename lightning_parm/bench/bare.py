"""The least that a schedule without chunks takes on a machine: its collectives and products, and nothing else.

What lies between this and what the links allow is the machine's: gloo or NCCL, the kernel's network, matrix products,
ranks that share cores. What a layer takes beyond this is the layer's: routing, rows put in order, autograd, Python.
"""

from __future__ import annotations

import torch

from lightning_parm.bench.contest import Action
from lightning_parm.moe.calibrate import exchange, waited
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
    forward, backward = _products(experts_rows(candidate, work), work, device)
    sent = [(call.backward, waited(exchange(call.kind, call.axis, call.num_bytes, topology, device))) for call in calls]
    before, after = ([run for is_backward, run in sent if is_backward == wanted] for wanted in (False, True))

    def everything() -> None:
        for run in (*before, forward, backward, *after):
            run()

    return everything


def experts_rows(candidate: Candidate, work: Workload) -> int:
    """Rows that one rank's experts multiply when every expert has its fair share.

    Example:
        >>> work = Workload(num_tokens=8, model_dim=4, hidden_dim=4, num_experts=2, top_k=1, tensor_parallel_size=2,
        ...                 expert_parallel_size=2, expert_shard_size=2)
        >>> experts_rows(Candidate("baseline"), work), experts_rows(Candidate("s1"), work)
        (16, 8)
    """
    mp, esp, tokens = work.tensor_parallel_size, work.expert_shard_size, work.num_tokens
    return {
        "baseline": esp * work.rows(tokens),
        "plain": work.rows(tokens),
        "s1": esp * work.rows(-(-tokens // mp)),
        "s2": esp * -(-work.rows(tokens, mp) // mp),
        "deepspeed": work.rows(tokens, mp),
    }[candidate.schedule]


def _products(rows: int, work: Workload, device: torch.device) -> tuple[Action, Action]:
    inner = work.hidden_dim // work.expert_shard_size
    widths = (inner * (work.num_matrices - 1), inner)
    x, up, hidden, down = (
        torch.zeros(shape, device=device)
        for shape in ((rows, work.model_dim), (widths[0], work.model_dim), (rows, inner), (work.model_dim, inner))
    )
    wide = torch.zeros(rows, widths[0], device=device)
    forward = lambda: (x @ up.t(), hidden @ down.t())  # noqa: E731
    backward = lambda: (x @ down, x.t() @ hidden, wide @ up, wide.t() @ x)  # noqa: E731
    return forward, backward
