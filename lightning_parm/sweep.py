"""Predicted speed-ups over 1296 layer configurations: how often, and by how much, choosing a schedule pays."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from lightning_parm.moe.choice import choose_for
from lightning_parm.moe.cost import Workload
from lightning_parm.moe.hardware import HARDWARE
from lightning_parm.moe.links import PUBLISHED_32_GPUS
from lightning_parm.moe.prediction import Candidate

#: The paper's measured range of speed-ups over DeepSpeed-MoE on its own 1296 configurations.
PAPER = "1.13x to 5.77x, measured over DeepSpeed-MoE (Pan et al., INFOCOM 2024)"
_PUBLISHED = "published 32 GPUs"
_SIZES = ((2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4))  # (N_MP, N_ESP)


def layers() -> Iterator[Workload]:
    """The grid, in the spirit of the paper's table, which is not public: this choice of sizes is ours.

    P in {8, 32}, (N_MP, N_ESP) in {2, 4} x {1, 2, 4}, B in {2, 4, 8}, L in {512, 1024, 2048}, M in {1024, 2048, 4096},
    H = 4 M, k in {1, 2}, f in {1.2, 2.4}, one expert for each expert-parallel rank.

    Example:
        >>> sum(1 for _ in layers())
        1296
    """
    grid = product((8, 32), _SIZES, (2, 4, 8), (512, 1024, 2048), (1024, 2048, 4096), (1, 2), (1.2, 2.4))
    for world_size, (mp, esp), batch, length, dim, top_k, capacity_factor in grid:
        experts = world_size // esp
        yield Workload(
            num_tokens=batch * length,
            model_dim=dim,
            hidden_dim=4 * dim,
            num_experts=experts,
            top_k=min(top_k, experts),
            tensor_parallel_size=mp,
            expert_parallel_size=experts,
            expert_shard_size=esp,
            capacity_factor=capacity_factor,
            static_shapes=True,
            num_matrices=2,
        )


def sweep(names: Sequence[str] = (_PUBLISHED, "a100", "l40s")) -> dict[str, Any]:
    """Speed-ups of the chosen schedule over each comparison, wherever the comparison can run.

    Args:
        names: Sets of links: the published constants, or hardware.
    """
    rows, chosen = [], []
    for name in names:
        published = name == _PUBLISHED
        speed_ups: dict[tuple[str, str], list[float]] = {}
        counts: dict[str, int] = {}
        for work in layers():
            # the published constants know of no computing that chunks could hide
            links = PUBLISHED_32_GPUS if published else HARDWARE[name].links(work)
            choice = choose_for(work, links, max_chunks=1 if published else 4)
            counts[str(choice.candidate)] = counts.get(str(choice.candidate), 0) + 1
            best = choice.seconds[choice.candidate]
            for over in ("baseline", "plain", "deepspeed", "s1"):
                seconds = choice.seconds.get(Candidate(over))
                if seconds is not None:
                    speed_ups.setdefault(("all", over), []).append(seconds / best)
                    if work.tensor_parallel_size == work.expert_shard_size == 4:
                        speed_ups.setdefault(("N_MP = N_ESP = 4", over), []).append(seconds / best)
        for (sizes, over), values in speed_ups.items():
            low, *_, high = sorted(values)
            tenth, *_, ninetieth = statistics.quantiles(values, n=10)
            rows.append(
                {
                    "links": name,
                    "sizes": sizes,
                    "over": over,
                    "layers": len(values),
                    "lowest": low,
                    "tenth": tenth,
                    "median": statistics.median(values),
                    "ninetieth": ninetieth,
                    "highest": high,
                }
            )
        chosen.append({"links": name, "chosen": dict(sorted(counts.items(), key=lambda item: -item[1]))})
    return {"speed_ups": rows, "chosen": chosen, "paper": PAPER}
