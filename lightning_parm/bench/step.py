"""``lightning-parm bench step``: a training step of a dense GPT under parm beside ddp, which does the same work."""

from __future__ import annotations

import itertools
import json
import os
import socket
import statistics
import tempfile
from operator import truediv
from pathlib import Path
from typing import Any

_STRATEGIES = ("ddp", "parm")
_UNCOUNTED = 3  # first steps of every run, in which buffers are made


def step(
    ranks: int = 2,
    num_layers: int = 4,
    model_dim: int = 256,
    hidden_dim: int = 512,
    vocab_size: int = 1024,
    sequence_length: int = 128,
    batch_size: int = 2,
    steps: int = 20,
    rounds: int = 5,
) -> dict[str, Any]:
    """Train a dense GPT with Lightning's Trainer on processes of this machine, under ddp and under parm in turns.

    Both do the same: average gradients while backward runs. All runs start from the same weights and read the same
    tokens, in one set of processes; a round has one run of each strategy, and the order alternates.

    Args:
        ranks: Processes, on CPUs with gloo, which share the machine's cores.
        num_layers: Blocks.
        model_dim: M.
        hidden_dim: H.
        vocab_size: Token ids.
        sequence_length: Tokens of a sequence.
        batch_size: Sequences of each rank.
        steps: Of each run; the first three are not counted.
        rounds: Runs of each strategy.

    Returns:
        For every strategy ``median_ms`` of all counted steps, the lowest and highest of the rounds' medians as
        ``round_ms``, and the mean ``cpu_ms`` that rank 0 computes in a step, which other programs on the machine
        disturb less; ``ratio`` and ``cpu_ratio``, the median over rounds of parm's time over ddp's;
        ``loss_difference``, the largest between losses of the same step.

    Raises:
        ValueError: If there are fewer than 2 ranks, 5 steps, or 1 round.
    """
    if ranks < 2 or steps < 5 or rounds < 1:
        raise ValueError(f"ranks={ranks} must be at least 2, steps={steps} at least 5, and rounds={rounds} at least 1.")
    import torch

    model = {
        "vocab_size": vocab_size,
        "num_layers": num_layers,
        "model_dim": model_dim,
        "hidden_dim": hidden_dim,
        "num_experts": 0,
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, port, model, sequence_length, batch_size, steps, rounds, folder)
        torch.multiprocessing.spawn(_measure, args=arguments, nprocs=ranks)
        measured = json.loads((Path(folder) / "measured.json").read_text())
    seconds: dict[str, list[list[float]]] = measured["seconds"]
    cpu: dict[str, list[float]] = measured["cpu_seconds"]
    medians = {name: [statistics.median(times) for times in seconds[name]] for name in _STRATEGIES}
    rows = [
        {
            "strategy": name,
            "median_ms": 1e3 * statistics.median(t for times in seconds[name] for t in times),
            "round_ms": [1e3 * min(medians[name]), 1e3 * max(medians[name])],
            "cpu_ms": 1e3 * statistics.mean(cpu[name]),
        }
        for name in _STRATEGIES
    ]
    differences = (abs(a - b) for a, b in zip(measured["losses"]["parm"], measured["losses"]["ddp"], strict=True))
    return {
        "ranks": ranks,
        "model": model,
        "parameters": measured["parameters"],
        "tokens": batch_size * sequence_length,
        "strategies": rows,
        "ratio": statistics.median(map(truediv, medians["parm"], medians["ddp"])),
        "cpu_ratio": statistics.median(map(truediv, cpu["parm"], cpu["ddp"])),
        "loss_difference": max(differences),
    }


def _measure(
    rank: int,
    ranks: int,
    port: int,
    model: dict[str, Any],
    sequence_length: int,
    batch_size: int,
    steps: int,
    rounds: int,
    folder: str,
) -> None:
    """What every rank runs; rank 0 leaves the result in ``folder``."""
    sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
    os.environ.update({name: str(value) for name, value in sizes.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "bench"})
    import torch

    import lightning_parm  # noqa: F401  # registers "parm"
    from lightning_parm.bench.fit import timed_fit

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(model["vocab_size"], (steps * batch_size, sequence_length + 1), generator=generator)
    seconds: dict[str, list[list[float]]] = {name: [] for name in _STRATEGIES}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in _STRATEGIES}
    losses: dict[str, list[float]] = {name: [] for name in _STRATEGIES}
    for turn in range(rounds):
        for name in _STRATEGIES if turn % 2 == 0 else reversed(_STRATEGIES):
            module, record = timed_fit(name, model, tokens, batch_size, use_distributed_sampler=False)
            ends, cpu_ends = record.ends[_UNCOUNTED - 1 :], record.cpu_ends[_UNCOUNTED - 1 :]
            seconds[name].append([later - earlier for earlier, later in itertools.pairwise(ends)])
            cpu_seconds[name].append((cpu_ends[-1] - cpu_ends[0]) / (len(cpu_ends) - 1))
            losses[name] = record.losses
    if rank == 0:
        result = {"seconds": seconds, "cpu_seconds": cpu_seconds, "losses": losses}
        result["parameters"] = sum(p.numel() for p in module.parameters())
        (Path(folder) / "measured.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


def render(result: dict[str, Any]) -> Any:
    """A table of step times, and what they say."""
    from rich.table import Table

    title = f"Training step of a dense GPT of {result['parameters']:,} parameters on {result['ranks']} ranks"
    caption = (
        f"parm takes {result['ratio']:.3f} times as long as ddp, and {result['cpu_ratio']:.3f} times its CPU time; "
        f"losses differ by {result['loss_difference']:.1e}"
    )
    table = Table(title=title, caption=caption)
    for name in ("strategy", "median ms", "medians of rounds", "CPU ms", "tokens/s of a rank"):
        table.add_column(name, justify="left" if name == "strategy" else "right")
    for row in result["strategies"]:
        lowest, highest = row["round_ms"]
        rate = 1e3 * result["tokens"] / row["median_ms"]
        times = (f"{row['median_ms']:.1f}", f"{lowest:.1f} to {highest:.1f}", f"{row['cpu_ms']:.1f}")
        table.add_row(row["strategy"], *times, f"{rate:,.0f}")
    return table
