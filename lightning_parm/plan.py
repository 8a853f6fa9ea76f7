"""Plans a MoE layer for a cluster that need not be at hand: parallel sizes, schedule, time, bytes and memory."""

from __future__ import annotations

import html as escaping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from lightning_parm.moe.choice import choose_for
from lightning_parm.moe.cost import Workload, collectives, total_bytes
from lightning_parm.moe.experts import Activation
from lightning_parm.moe.hardware import HARDWARE
from lightning_parm.moe.links import Links
from lightning_parm.sweep import sweep as predict_sweep

#: bfloat16 weights and gradients, float32 master weights and the two moments of Adam.
_BYTES_PER_PARAMETER = 2 + 2 + 4 + 4 + 4


def plan(
    model_dim: int = 4096,
    hidden_dim: int = 14336,
    num_experts: int = 8,
    top_k: int = 2,
    capacity_factor: float | None = None,
    sequence_length: int = 4096,
    batch_size: int = 1,
    num_layers: int = 1,
    activation: Activation = "swiglu",
    nodes: int = 1,
    gpus_per_node: int = 8,
    hardware: Literal["a100", "h100", "h200", "l40s"] = "h100",
    intra_bandwidth: float | None = None,
    inter_bandwidth: float | None = None,
    memory_limit: float | None = None,
    calibration: str | None = None,
    tensor_parallel_size: int | None = None,
    expert_parallel_size: int | None = None,
    expert_shard_size: int | None = None,
    sweep: bool = False,
    html: str | None = None,
) -> dict[str, Any]:
    """Predict the time, bytes and memory of a MoE layer for all parallel sizes of a cluster, and the best of them.

    The dense part of the model is not planned: sizes are ranked by the tokens that the MoE layer alone takes a second.

    Args:
        model_dim: M.
        hidden_dim: H of one expert.
        num_experts: E.
        top_k: k.
        capacity_factor: f, with every expert padded to its capacity; dropless by default.
        sequence_length: Tokens of a sequence.
        batch_size: Sequences of each data-parallel rank.
        num_layers: MoE layers of the model, for its memory.
        activation: Of the experts.
        nodes: Of the cluster.
        gpus_per_node: Of each node.
        hardware: Whose data sheets the rates are taken from.
        intra_bandwidth: GB/s that one GPU sends inside its node, instead of the data sheet's.
        inter_bandwidth: GB/s that one GPU sends to other nodes, instead of the data sheet's.
        memory_limit: GB of one GPU that experts and their buffers may take; nine tenths of it by default.
        calibration: File of measured constants; it holds for the three sizes it was measured with, which must be given.
        tensor_parallel_size: Only this N_MP.
        expert_parallel_size: Only this N_EP.
        expert_shard_size: Only this N_ESP.
        sweep: Predict speed-ups over a grid of 1296 layers instead.
        html: File to write the plan into, as one page.

    Raises:
        ValueError: If no sizes fit.

    Example:
        >>> best = plan(nodes=4, num_experts=16, num_layers=32)["best"]
        >>> best["expert_parallel"] * best["expert_shard"] >= 16, best["fits"]
        (True, True)
    """
    if sweep:
        return _written({"sweep": predict_sweep()}, html)
    chip = HARDWARE[hardware]
    chip = replace(
        chip,
        gpus_per_node=gpus_per_node,
        intra_bytes_per_second=chip.intra_bytes_per_second if intra_bandwidth is None else intra_bandwidth * 1e9,
        inter_bytes_per_second=chip.inter_bytes_per_second if inter_bandwidth is None else inter_bandwidth * 1e9,
    )
    given = (tensor_parallel_size, expert_parallel_size, expert_shard_size)
    if calibration is not None and None in given:
        raise ValueError(
            "A calibration holds for the sizes it was measured with; give --tensor-parallel-size, "
            "--expert-parallel-size and --expert-shard-size too."
        )
    measured = None if calibration is None else Links.load(calibration)
    world, most = nodes * gpus_per_node, (memory_limit or 0.9 * chip.memory_bytes / 1e9) * 1e9
    rows: list[dict[str, Any]] = []
    for mp, ep, esp in _sizes(world, gpus_per_node, num_experts, hidden_dim, given):
        work = Workload(
            num_tokens=batch_size * sequence_length,
            model_dim=model_dim,
            hidden_dim=hidden_dim,
            num_experts=num_experts,
            top_k=top_k,
            tensor_parallel_size=mp,
            expert_parallel_size=ep,
            expert_shard_size=esp,
            capacity_factor=capacity_factor,
            static_shapes=capacity_factor is not None,
            num_matrices=3 if activation == "swiglu" else 2,
            element_bytes=2,
        )
        choice = choose_for(work, measured or chip.links(work))
        seconds = choice.seconds[choice.candidate]
        calls = collectives(work, choice.schedule, choice.transport, choice.chunks)
        rows.append(
            {
                "data_parallel": world // mp,
                "tensor_parallel": mp,
                "expert_data_parallel": world // ep // esp,
                "expert_parallel": ep,
                "expert_shard": esp,
                "schedule": str(choice.candidate),
                "layer_ms": 1e3 * seconds,
                "tokens_per_second": work.num_tokens * (world // mp) / seconds,
                "sent_bytes": total_bytes(calls),
                "collectives": len(calls),
                "memory_gb": _memory_bytes(work, num_layers) / 1e9,
                "fits": _memory_bytes(work, num_layers) <= most,
                "schedules": {str(each): 1e3 * value for each, value in choice.seconds.items()},
            }
        )
    if not any(row["fits"] for row in rows):
        least = min((row["memory_gb"] for row in rows), default=None)
        raise ValueError(
            f"No parallel sizes fit {world} GPUs with {num_experts} experts"
            + (
                "; give sizes that divide both."
                if least is None
                else f" into {most / 1e9:.1f} GB each: the least is {least:.1f} GB. Add nodes."
            )
        )
    rows.sort(key=lambda row: (not row["fits"], -row["tokens_per_second"]))
    source = measured.source if measured else chip.source
    return _written({"best": rows[0], "topologies": rows, "links": source, "world": world}, html)


def _sizes(
    world: int, per_node: int, num_experts: int, hidden_dim: int, given: tuple[int | None, int | None, int | None]
) -> list[tuple[int, int, int]]:
    """All (N_MP, N_EP, N_ESP) with mp and esp peers on one node."""
    within = [size for size in range(1, per_node + 1) if per_node % size == 0]
    return [
        (mp, ep, esp)
        for mp in within
        for esp in within
        for ep in range(1, num_experts + 1)
        if num_experts % ep == 0 and hidden_dim % esp == 0 and world % (ep * esp) == 0
        if all(size in (None, wanted) for size, wanted in zip(given, (mp, ep, esp), strict=True))
    ]


def _memory_bytes(work: Workload, num_layers: int) -> float:
    """Experts with their optimizer, and the activations that their backward keeps, of one rank."""
    shards = work.expert_parallel_size * work.expert_shard_size
    weights = work.num_experts * work.num_matrices * work.model_dim * work.hidden_dim / shards
    rows = work.rows(work.num_tokens) * work.expert_shard_size / work.tensor_parallel_size
    kept = rows * (2 * work.model_dim + (work.num_matrices - 1) * work.hidden_dim / work.expert_shard_size)
    return float(num_layers * (weights * _BYTES_PER_PARAMETER + kept * work.element_bytes))


def render(result: dict[str, Any]) -> Any:
    """Tables of the plan, or of the sweep."""
    from rich.console import Group
    from rich.table import Table

    tables = []
    for title, columns, rows in _tables(result):
        table = Table(title=title)
        for index, name in enumerate(columns):
            table.add_column(name, justify="left" if index == 0 else "right")
        for row in rows:
            table.add_row(*row)
        tables.append(table)
    return Group(*tables)


def _tables(result: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    if "sweep" in result:
        sweep = result["sweep"]
        parts = ("lowest", "tenth", "median", "ninetieth", "highest")
        rows = [
            [row["links"], row["sizes"], row["over"], str(row["layers"]), *(f"{row[part]:.2f}x" for part in parts)]
            for row in sweep["speed_ups"]
        ]
        title = f"Predicted speed-ups of the chosen schedule over our grid; the paper: {sweep['paper']}"
        chosen = [[row["links"], ", ".join(f"{k}: {n}" for k, n in row["chosen"].items())] for row in sweep["chosen"]]
        return [
            (title, ["links", "sizes", "over", "layers", *parts], rows),
            ("How often each was chosen", ["links", "layers"], chosen),
        ]
    sizes = ("data_parallel", "tensor_parallel", "expert_data_parallel", "expert_parallel", "expert_shard")
    rows = [
        [
            row["schedule"] if row["fits"] else f"{row['schedule']} (too large)",
            *(str(row[size]) for size in sizes),
            f"{row['layer_ms']:.3f}",
            f"{row['tokens_per_second'] / 1e6:.2f}",
            f"{row['sent_bytes'] / 1e6:.1f}",
            f"{row['memory_gb']:.1f}",
        ]
        for row in result["topologies"][:20]
    ]
    names = ["schedule", "dp", "mp", "edp", "ep", "esp", "layer ms", "Mtokens/s", "MB sent", "GB"]
    best = sorted(result["best"]["schedules"].items(), key=lambda item: item[1])
    return [
        (f"Best parallel sizes on {result['world']} GPUs ({result['links']})", names, rows),
        ("All schedules on the best sizes", ["schedule", "ms"], [[name, f"{value:.3f}"] for name, value in best]),
    ]


def _written(result: dict[str, Any], html: str | None) -> dict[str, Any]:
    """Write the tables into one page, numbers with bars as long as they are large."""
    if html is None:
        return result
    parts = ["<!doctype html><meta charset=utf-8><title>lightning-parm plan</title>", _STYLE]
    for title, columns, rows in _tables(result):
        head = "".join(f"<th>{escaping.escape(name)}" for name in columns)
        largest = max((_number(row[-1]) for row in rows), default=1.0) or 1.0
        body = "".join(
            "<tr>"
            + "".join(f"<td>{escaping.escape(cell)}" for cell in row)
            + f"<td><div class=bar style='width:{200 * _number(row[-1]) / largest:.0f}px'></div>"
            for row in rows
        )
        parts.append(f"<h2>{escaping.escape(title)}</h2><table><tr>{head}<th>{body}</table>")
    Path(html).write_text("\n".join(parts))
    return result


def _number(cell: str) -> float:
    try:
        return float(cell.rstrip("x"))
    except ValueError:
        return 0.0


_STYLE = """<style>body{font:14px sans-serif;margin:2em}table{border-collapse:collapse}
td,th{padding:2px 10px;text-align:right}td:first-child{text-align:left}.bar{background:#6baed6;height:12px}</style>"""
