"""Times whole training steps of an MoE GPT on an emulated cluster: parm's choice, the paper's baseline, and ddp."""

from __future__ import annotations

import itertools
import os
import statistics
from typing import Any

from lightning_parm.bench.emulation import EmulatedCluster, run_emulated

_VARIANTS = {
    "parm, schedule=auto": {"strategy": "parm", "schedule": "auto"},
    "parm, schedule=baseline": {"strategy": "parm", "schedule": "baseline"},
    "ddp, experts replicated": {"strategy": "ddp", "schedule": "auto"},
}


def training(
    emulate: str = "nodes=2,per_node=2,inter=200mbit,intra=200mbit",
    tensor_parallel_size: int = 2,
    num_layers: int = 4,
    model_dim: int = 256,
    hidden_dim: int = 512,
    num_experts: int = 4,
    top_k: int = 2,
    sequence_length: int = 128,
    global_batch_size: int = 4,
    steps: int = 12,
) -> dict[str, Any]:
    """Train a small MoE GPT with Lightning's Trainer under parm and ddp, and compare the medians of a step.

    Every variant trains on the same global batches; parm cuts experts over all ranks, ddp gives every rank all of them.

    Args:
        emulate: The cluster.
        tensor_parallel_size: N_MP = N_ESP under parm.
        num_layers: Blocks, each with a mixture.
        model_dim: M.
        hidden_dim: H.
        num_experts: E.
        top_k: k.
        sequence_length: Tokens of a sequence.
        global_batch_size: Sequences of a step, over all ranks.
        steps: Of each variant; the first three are not counted.

    Raises:
        ValueError: If the batch does not divide among the ranks, or there are fewer than 5 steps.
        OSError: If clusters cannot be emulated here.
    """
    cluster = EmulatedCluster.parse(emulate)
    if global_batch_size % cluster.world_size or steps < 5:
        raise ValueError(
            f"global_batch_size={global_batch_size} must be a multiple of the {cluster.world_size} ranks, and "
            f"steps={steps} at least 5."
        )
    model = {
        "vocab_size": 256,
        "num_layers": num_layers,
        "model_dim": model_dim,
        "hidden_dim": hidden_dim,
        "num_experts": num_experts,
        "top_k": top_k,
    }
    rows = []
    for name, variant in _VARIANTS.items():
        arguments = {
            **variant,
            "model": model,
            "nodes": cluster.nodes,
            "tensor_parallel_size": tensor_parallel_size,
            "sequence_length": sequence_length,
            "global_batch_size": global_batch_size,
            "steps": steps,
        }
        measured = run_emulated(cluster, "lightning_parm.bench.training:measure", arguments)
        seconds = measured["seconds"][2:]
        rows.append(
            {
                "variant": name,
                "median_ms": 1e3 * statistics.median(seconds),
                "lowest_ms": 1e3 * min(seconds),
                "highest_ms": 1e3 * max(seconds),
                "schedules": measured["schedules"],
                "final_loss": measured["final_loss"],
            }
        )
    return {"cluster": emulate, "model": model, "variants": rows}


def measure(
    *,
    strategy: str,
    schedule: str,
    model: dict[str, Any],
    nodes: int,
    tensor_parallel_size: int,
    sequence_length: int,
    global_batch_size: int,
    steps: int,
) -> dict[str, Any]:
    """What every rank runs; see :func:`training`."""
    import torch

    from lightning_parm import ParmStrategy
    from lightning_parm.bench.fit import timed_fit
    from lightning_parm.parallel.placement import moe_layers

    chosen: Any = "ddp"
    replicas = int(os.environ["WORLD_SIZE"])
    if strategy == "parm":
        chosen = ParmStrategy(tensor_parallel_size=tensor_parallel_size, schedule=schedule)  # type: ignore[arg-type]
        replicas //= tensor_parallel_size
    generator = torch.Generator().manual_seed(0)  # the same on all ranks, which share them out
    tokens = torch.randint(model["vocab_size"], (steps * global_batch_size, sequence_length + 1), generator=generator)
    module, record = timed_fit(chosen, model, tokens, global_batch_size // replicas, nodes)
    used = sorted({f"{layer.schedule} {layer.transport} {layer.chunks}" for _, layer in moe_layers(module)})
    return {
        "seconds": [later - earlier for earlier, later in itertools.pairwise(record.ends)],
        "schedules": used if strategy == "parm" else [],
        "final_loss": record.losses[-1],
    }


def render(result: dict[str, Any]) -> Any:
    """A table of step times, beside the first variant's."""
    from rich.table import Table

    table = Table(title=f"Training step of an MoE GPT on {result['cluster']}", caption=str(result["model"]))
    for name in ("variant", "median ms", "lowest", "highest", "of the first", "schedule of the layers"):
        table.add_column(name, justify="left" if name == "variant" else "right")
    first = result["variants"][0]["median_ms"]
    for row in result["variants"]:
        numbers = (f"{row[name]:.0f}" for name in ("median_ms", "lowest_ms", "highest_ms"))
        table.add_row(row["variant"], *numbers, f"{row['median_ms'] / first:.2f}x", ", ".join(row["schedules"]))
    return table
