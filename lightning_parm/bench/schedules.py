"""Times every schedule of a MoE layer on the cluster at hand, beside the model's predictions and its choice."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from lightning_parm.bench import deepspeed_order
from lightning_parm.bench.bare import bare
from lightning_parm.bench.contest import Action, Contest
from lightning_parm.bench.deepspeed_layer import DeepSpeedLayer, available
from lightning_parm.bench.emulation import EmulatedCluster, bytes_per_second, run_emulated
from lightning_parm.bench.limit import limit_seconds
from lightning_parm.moe import Topology
from lightning_parm.moe.calibrate import calibrate
from lightning_parm.moe.choice import candidates, choose_for, comparisons
from lightning_parm.moe.cost import Collective, Workload, collectives, total_bytes
from lightning_parm.moe.experts import Activation
from lightning_parm.moe.links import Links
from lightning_parm.moe.prediction import Candidate

#: DeepSpeed itself, where it is installed, beside ``deepspeed``, its order of collectives on our primitives.
DEEPSPEED = "DeepSpeed's own layer"


def schedules(
    model_dim: int = 512,
    hidden_dim: int = 256,
    sequence_length: int = 256,
    batch_size: int = 1,
    num_experts: int | None = None,
    top_k: int = 1,
    capacity_factor: float | None = None,
    tensor_parallel_size: int = 2,
    expert_parallel_size: int | Literal["auto"] = "auto",
    expert_shard_size: int | Literal["auto"] = "auto",
    activation: Activation = "gelu",
    max_chunks: int = 3,
    repetitions: int = 7,
    emulate: str | None = None,
    calibration: str | None = None,
    plot: str | None = None,
) -> dict[str, Any]:
    """Time every schedule of a MoE layer, forward and backward, beside what the cost model predicts and chooses.

    Start it with torchrun on a cluster, or on one Linux machine with --emulate. The order alternates between
    repetitions, a repetition takes as long as its slowest rank, and medians are reported. "Bare" is a schedule's
    collectives and matrix products alone, timed in the same turns: the least that it can take on this machine.

    Args:
        model_dim: M.
        hidden_dim: H.
        sequence_length: Tokens of a sequence.
        batch_size: Sequences of each data-parallel rank.
        num_experts: E; as many as expert-parallel ranks by default.
        top_k: k.
        capacity_factor: f, with every expert padded to its capacity; dropless by default.
        tensor_parallel_size: N_MP.
        expert_parallel_size: N_EP.
        expert_shard_size: N_ESP.
        activation: Of the experts.
        max_chunks: Most parts in flight together.
        repetitions: Of every candidate.
        emulate: A cluster, as nodes=2,per_node=2,inter=200mbit,intra=200mbit.
        calibration: A file of constants to use instead of measuring them.
        plot: File to draw measured and predicted times into.

    Raises:
        ValueError: If there is no cluster, or sizes do not fit.
        OSError: If clusters cannot be emulated here.
    """
    arguments = {name: value for name, value in locals().items() if name not in ("emulate", "plot")}
    if emulate is not None:
        cluster = EmulatedCluster.parse(emulate)
        rates = {
            "ranks_per_node": cluster.per_node,
            **{
                name: None if rate is None else bytes_per_second(rate)
                for name, rate in (("inter", cluster.inter), ("intra", cluster.intra))
            },
        }
        result: dict[str, Any] = run_emulated(cluster, "lightning_parm.bench.schedules:measure", {**arguments, **rates})
        result["cluster"] = emulate
    elif "RANK" in os.environ:
        result = measure(**arguments)
    else:
        raise ValueError(
            "There is no cluster to measure: start this with torchrun, or add "
            "--emulate nodes=2,per_node=2,inter=200mbit,intra=200mbit."
        )
    if plot is not None and result["candidates"]:
        draw(result, Path(plot))
    return result


def measure(
    *,
    model_dim: int,
    hidden_dim: int,
    sequence_length: int,
    batch_size: int,
    num_experts: int | None,
    top_k: int,
    capacity_factor: float | None,
    tensor_parallel_size: int,
    expert_parallel_size: int | Literal["auto"],
    expert_shard_size: int | Literal["auto"],
    activation: Activation,
    max_chunks: int,
    repetitions: int,
    calibration: str | None,
    ranks_per_node: int | None = None,
    inter: float | None = None,
    intra: float | None = None,
) -> dict[str, Any]:
    """What every rank runs; see :func:`schedules`. Rank 0 gets the result."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    own_group = not dist.is_initialized()
    if own_group:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        known = [num_experts] if num_experts else []
        sizes = (tensor_parallel_size, expert_parallel_size, expert_shard_size)
        topology = Topology.resolve(dist.get_world_size(), dist.get_rank(), *sizes, num_experts=known)
        work = Workload(
            num_tokens=batch_size * sequence_length,
            model_dim=model_dim,
            hidden_dim=hidden_dim,
            num_experts=num_experts or topology.expert_parallel_size,
            top_k=top_k,
            tensor_parallel_size=topology.tensor_parallel_size,
            expert_parallel_size=topology.expert_parallel_size,
            expert_shard_size=topology.expert_shard_size,
            capacity_factor=capacity_factor,
            static_shapes=capacity_factor is not None,
            auxiliary_loss=False,
            num_matrices=3 if activation == "swiglu" else 2,
        )
        started = time.perf_counter()
        links = (
            Links.load(calibration) if calibration else calibrate(topology, device, largest_bytes=work.largest_bytes)
        )
        calibration_seconds = time.perf_counter() - started
        choice = choose_for(work, links, max_chunks)
        compared = {str(each): each for each in comparisons(topology)}
        every = {**compared, **{str(each): each for each in candidates(topology, max_chunks)}}
        contest = Contest(topology, work, activation, device)
        runs = {name: partial(contest.forward, each) for name, each in every.items()}
        difference = contest.largest_difference(list(runs.values()))
        if available(work):
            every[DEEPSPEED] = compared[DEEPSPEED] = Candidate("deepspeed")
            runs[DEEPSPEED] = partial(DeepSpeedLayer(contest.layer), contest.x)
        alone = {name: each for name, each in every.items() if each.chunks == 1 and name != DEEPSPEED}
        actions: list[Action] = [partial(contest.both, run) for run in runs.values()]
        actions += [bare(each, _calls(each, work), work, topology, device) for each in alone.values()]
        times = contest.alternate(actions, repetitions)
        times, least = times[: len(runs)], dict(zip(alone, times[len(runs) :], strict=True))
    finally:
        if own_group:
            dist.destroy_process_group()
    if topology.rank:
        return {"candidates": []}
    per_node = ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", topology.world_size))
    rows = []
    for (name, each), seconds in zip(every.items(), times, strict=True):
        calls = _calls(each, work)
        limit = limit_seconds(calls, topology, per_node, inter or float("inf"), intra or float("inf"))
        rows.append(
            {
                "candidate": name,
                "median_ms": 1e3 * statistics.median(seconds),
                "lowest_ms": 1e3 * min(seconds),
                "highest_ms": 1e3 * max(seconds),
                "predicted_ms": None if name == DEEPSPEED else 1e3 * choice.seconds[each],
                "bare_ms": 1e3 * statistics.median(least[name]) if name in least else None,
                "limit_ms": 1e3 * limit,
                "sent_bytes": total_bytes(calls),
                "compared_only": name in compared,
            }
        )
    medians = {row["candidate"]: row["median_ms"] for row in rows}
    fastest = min(row["median_ms"] for row in rows if not row["compared_only"])  # type: ignore[type-var]
    return {
        "candidates": rows,
        "choice": str(choice.candidate),
        "regret": medians[str(choice.candidate)] / fastest - 1,  # type: ignore[operator]
        "calibration_seconds": calibration_seconds,
        "calibration_residual": links.residual,
        "largest_difference": difference,
        "sizes": {
            name: getattr(work, name)
            for name in ("num_tokens", "model_dim", "hidden_dim", "num_experts", "top_k", "capacity_factor")
        },
        "topology": {
            name: getattr(topology, f"{name}_size")
            for name in ("world", "tensor_parallel", "expert_parallel", "expert_shard")
        },
    }


def _calls(candidate: Candidate, work: Workload) -> list[Collective]:
    if candidate.schedule == "deepspeed":
        return deepspeed_order.calls(work)
    return collectives(work, candidate.schedule, candidate.transport, candidate.chunks)


def render(result: dict[str, Any]) -> Any:
    """A table of measured and predicted times, the fastest first."""
    from rich.console import Group
    from rich.table import Table

    if not result["candidates"]:  # another rank shows it
        return ""
    sizes = ", ".join(f"{name}={value}" for name, value in {**result["topology"], **result["sizes"]}.items())
    table = Table(title=f"forward + backward of one layer on {result.get('cluster', 'this cluster')}", caption=sizes)
    for name in (
        "schedule",
        "median ms",
        "lowest",
        "highest",
        "predicted",
        "bare",
        "links allow",
        "MB sent",
        "of the choice",
    ):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    chosen = next(row for row in result["candidates"] if row["candidate"] == result["choice"])
    for row in sorted(result["candidates"], key=lambda row: row["median_ms"]):
        columns = (
            row[name] for name in ("median_ms", "lowest_ms", "highest_ms", "predicted_ms", "bare_ms", "limit_ms")
        )
        name = row["candidate"] + (" (compared only)" if row["compared_only"] else "")
        table.add_row(
            name,
            *("" if value is None else f"{value:.1f}" for value in columns),
            f"{row['sent_bytes'] / 1e6:.2f}",
            f"{row['median_ms'] / chosen['median_ms']:.2f}x",
            style="bold green" if row is chosen else None,
        )
    told = (
        f"Chosen without having timed them: {result['choice']}, {result['regret']:.0%} slower than the fastest. "
        f"Calibrated in {result['calibration_seconds']:.1f} s, lines within {result['calibration_residual']:.0%}."
    )
    return Group(table, told)


def draw(result: dict[str, Any], file: Path) -> None:
    """Measured medians with their range and predictions as a bar chart."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError("drawing needs matplotlib: pip install 'lightning-parm[plot]'.") from None

    rows = sorted(result["candidates"], key=lambda row: row["median_ms"])
    figure = Figure(figsize=(7, 0.3 * len(rows) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    medians = [row["median_ms"] for row in rows]
    value: Callable[[str], list[float]] = lambda name: [row[name] for row in rows]  # noqa: E731
    spread = [
        [m - low for m, low in zip(medians, value("lowest_ms"), strict=True)],
        [high - m for m, high in zip(medians, value("highest_ms"), strict=True)],
    ]
    names = [row["candidate"] + (" *" if row["candidate"] == result["choice"] else "") for row in rows]
    axes.barh(names, medians, xerr=spread, color="#9ecae1", label="measured: median and range")
    axes.plot([float("nan") if ms is None else ms for ms in value("predicted_ms")], names, "o", color="#d94801")
    axes.lines[-1].set_label("predicted")
    axes.plot([float("nan") if ms is None else ms for ms in value("bare_ms")], names, "x", color="#636363")
    axes.lines[-1].set_label("its collectives and products alone")
    axes.plot(value("limit_ms"), names, "|", color="black", markersize=12, label="what the links allow")
    axes.set_xlabel("ms, forward + backward (* chosen)")
    axes.legend()
    figure.savefig(file)
