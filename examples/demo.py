"""The main job on real text: tokenise two sources, train a mixture of experts on 4 CPU ranks, resume it on 2.

``make demo`` runs it; everything it writes goes below ``./demo_output``. Each step is a command that can be typed by
hand, and every number of the report is read from the files the runs have left.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import importlib
import json
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

OUTPUT = Path("demo_output")
COMMAND = [sys.executable, "-m", "lightning_parm"]
console = Console(width=None if sys.stdout.isatty() else 140)


def code_documents() -> Iterator[str]:
    """The standard library's Python files, without tests and the tables of character sets."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data", "encodings"}
    for file in sorted(root.rglob("*.py")):
        if not skipped & set(file.relative_to(root).parts):
            yield file.read_text(encoding="utf-8", errors="ignore")


def prose_documents() -> Iterator[str]:
    """Python's reference topics, and what installed packages say of themselves: descriptions, docs, change logs."""
    with contextlib.suppress(ModuleNotFoundError):  # some systems ship Python without its documentation
        yield from importlib.import_module("pydoc_data.topics").topics.values()
    root = Path(sysconfig.get_paths()["purelib"])
    for file in sorted(root.rglob("*")):
        if file.suffix in (".md", ".rst", ".txt") or file.name == "METADATA":
            text = file.read_text(encoding="utf-8", errors="ignore")
            yield text.partition("\n\n")[2] if file.name == "METADATA" else text


def without_repeats(documents: Iterator[str]) -> Iterator[str]:
    """Drop paragraphs that came before, such as licences, and documents of which little is left."""
    seen: set[bytes] = set()
    for document in documents:
        fresh = []
        for paragraph in document.split("\n\n"):
            digest = hashlib.sha256(" ".join(paragraph.split()).encode()).digest()
            if len(paragraph) < 80 or digest not in seen:
                fresh.append(paragraph)
            seen.add(digest)
        text = "\n\n".join(fresh)
        if len(text) > max(500, len(document) // 2):
            yield text


def collect(megabytes: float) -> dict[str, Path]:
    """Write each source as JSON lines, at most ``megabytes`` of each."""
    files = {}
    for name, documents in (("code", code_documents()), ("prose", prose_documents())):
        files[name] = OUTPUT / "text" / f"{name}.jsonl"
        files[name].parent.mkdir(parents=True, exist_ok=True)
        count = size = 0
        with open(files[name], "w", encoding="utf-8") as file:
            for text in without_repeats(documents):
                file.write(json.dumps({"text": text}) + "\n")
                count, size = count + 1, size + len(text.encode())
                if size > megabytes * 1e6:
                    break
        console.print(f"  {name}: {count:,} documents, {size / 1e6:.1f} MB")
    return files


def run(*arguments: str) -> None:
    """Run ``lightning-parm`` and let its output through."""
    shown = " ".join(argument if len(argument) < 80 else argument[:77] + "..." for argument in arguments)
    console.print(f"[dim]$ lightning-parm {shown}[/dim]", highlight=False, soft_wrap=True)
    sys.stdout.flush()
    outcome = subprocess.run([*COMMAND, *arguments], check=False)
    if outcome.returncode:
        sys.exit(f"lightning-parm {arguments[0]} ended with exit code {outcome.returncode}; its message is above.")


def log_of(run_name: str) -> list[dict[str, float]]:
    """The rows that a run's CSVLogger wrote."""
    with open(OUTPUT / run_name / "metrics.csv", encoding="utf-8", newline="") as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


def column(rows: list[dict[str, float]], name: str) -> list[float]:
    """The values of one metric, in order."""
    return [row[name] for row in rows if name in row]


def mean(values: list[float]) -> float:
    """The arithmetic mean."""
    return sum(values) / len(values)


def batches_of(run_name: str) -> dict[int, list[tuple[int, list[int], list[int]]]]:
    """Batch number -> what each rank recorded: (data-parallel rank, sample indices, checksums of their tokens)."""
    batches: dict[int, list[tuple[int, list[int], list[int]]]] = {}
    for path in sorted((OUTPUT / run_name / "samples").glob("rank-*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            batches.setdefault(row["batch"], []).append((row["data_parallel_rank"], row["sample_index"], row["crc32"]))
    return batches


def prove_the_resume(sequence_length: int, weights: dict[str, float]) -> list[str]:
    """Check the samples of both runs against the global order, and say what was found; raise where it is wrong."""
    import zlib

    from lightning_parm.data import TokenLoader

    checksum: dict[int, int] = {}
    boundary = 0
    for name in ("first_run", "resumed_run"):
        served = []
        for _, ranks in sorted(batches_of(name).items()):
            shares: dict[int, tuple[list[int], list[int]]] = {}
            for rank, samples, sums in ranks:
                if shares.setdefault(rank, (samples, sums)) != (samples, sums):
                    raise SystemExit(f"{name}: tensor-parallel peers were given different samples.")
            for rank in sorted(shares):
                served += shares[rank][0]
                checksum |= dict(zip(*shares[rank], strict=True))
        expected = list(range(boundary, boundary + len(served)))
        if served != expected:
            raise SystemExit(f"{name} served samples {served[:4]}..., not {expected[:4]}... in order.")
        boundary = boundary or len(served)
        last = served[-1]
    sources = {name: str(OUTPUT / "tokens" / name) for name in weights}
    alone = TokenLoader(sources, sequence_length, batch_size=1, weights=weights)
    for sample in range(last + 1):
        batch = alone.next_batch()
        if zlib.crc32(batch["input_ids"][0].numpy().tobytes()) != checksum[sample]:
            raise SystemExit(f"sample {sample} held other tokens than a loader in one process reads.")
    return [
        f"first run: samples 0 to {boundary - 1:,}; resumed run: samples {boundary:,} to {last:,}",
        "in both, each batch held exactly the next samples of the global order: no gap, none twice",
        f"all {last + 1:,} samples hold the tokens that one loader in one process reads, by checksum",
    ]


def report(checkpoint: Path, config: dict[str, Any]) -> Table:
    """Put what the runs have left into one table."""
    import torch

    from lightning_parm import ExpertLoad
    from lightning_parm.checkpoint.directory import load_meta

    first, resumed = log_of("first_run"), log_of("resumed_run")
    meta = load_meta(checkpoint)
    layers = meta["callbacks"]["ExpertLoadMonitor"]
    counts = torch.tensor([layer["tokens_per_expert"] for layer in layers.values()])
    metric = ExpertLoad(*counts.shape)
    metric.update(counts)
    load = metric.compute()

    table = Table(show_header=False, show_lines=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    losses, later = column(first, "train_loss"), column(resumed, "train_loss")
    begin = next(int(row["step"]) + 1 for row in first if "train_loss" in row)
    table.add_row(
        "loss",
        f"{losses[0]:.2f} at step {begin} -> {mean(losses[-4:]):.2f} at the checkpoint -> "
        f"{mean(later[-4:]):.2f} at the end",
    )
    for name, rows in (("first_run", first), ("resumed_run", resumed)):
        # The first interval is left out: it holds what every process does once.
        speeds, waits = column(rows, "throughput/tokens_per_second")[1:], column(rows, "data/wait_frac")[1:]
        trainer = yaml.safe_load((OUTPUT / name / "config.yaml").read_text(encoding="utf-8"))["trainer"]
        sizes = trainer["strategy"]["init_args"]
        mp, ep, esp = (sizes[f"{axis}_size"] for axis in ("tensor_parallel", "expert_parallel", "expert_shard"))
        table.add_row(
            f"{trainer['devices']} ranks, mp={mp} ep={ep} esp={esp}",
            f"{mean(speeds):,.0f} tokens/s, {mean(waits):.2%} of the time waiting for data",
        )
    for index, (name, layer) in enumerate(layers.items()):
        shares = " ".join(f"{share:.2f}" for share in load["utilisation"][index].tolist())
        table.add_row(name, f"schedule {layer['schedule']}; expert load (1 is fair) {shares}")
    table.add_row(
        "expert load",
        f"fullest expert {load['load_max_over_mean'].mean():.2f} of a fair share, "
        f"{int(load['dead_experts'].sum())} dead experts",
    )
    for name in config["weights"]:
        table.add_row(
            f"source {name!r}",
            f"{column(resumed, f'data/samples/{name}')[-1]:,.0f} samples, "
            f"{column(resumed, f'data/mix_actual/{name}')[-1]:.2%} of all; "
            f"asked for {column(resumed, f'data/mix_target/{name}')[-1]:.2%}",
        )
    for index, line in enumerate(prove_the_resume(config["sequence_length"], config["weights"])):
        table.add_row("" if index else "resumed exactly", line)
    return table


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="steps of the first run")
    parser.add_argument("--resumed-steps", type=int, default=75, help="steps of the resumed run")
    parser.add_argument("--megabytes", type=float, default=8, help="the most text to take of each source")
    parser.add_argument("--config", default=str(Path(__file__).with_name("demo.yaml")), help="of both runs")
    options = parser.parse_args()
    started = time.monotonic()
    shutil.rmtree(OUTPUT, ignore_errors=True)

    console.rule("1/4  two sources of text from this machine", align="left")
    files = collect(options.megabytes)
    console.rule("2/4  tokenise", align="left")
    for name, file in files.items():
        both = json.dumps([str(path) for path in files.values()])
        how = ["--train-vocab-size=4096", f"--train-on={both}", "--shard-bytes=1000000"]
        run("tokenize", str(file), str(OUTPUT / "tokens" / name), *how)
    console.rule("3/4  train on 4 ranks", align="left")
    run("fit", f"--config={options.config}", f"--trainer.max_steps={options.steps}")
    checkpoint = OUTPUT / "checkpoints" / f"step={options.steps}.ckpt"
    console.rule("4/4  resume on 2 ranks", align="left")
    run(
        "fit",
        f"--config={options.config}",
        f"--ckpt_path={checkpoint}",
        f"--trainer.max_steps={options.steps + options.resumed_steps}",
        "--trainer.devices=2",
        "--trainer.strategy.tensor_parallel_size=1",
        "--trainer.strategy.expert_shard_size=1",
        "--trainer.logger.init_args.name=resumed_run",
    )
    final = OUTPUT / "checkpoints" / f"step={options.steps + options.resumed_steps}.ckpt"
    console.rule("what came out", align="left")
    data = yaml.safe_load(Path(options.config).read_text(encoding="utf-8"))["data"]["init_args"]
    console.print(report(final, data))
    console.print(f"{time.monotonic() - started:.0f} s in all; the files are in {OUTPUT}/")


if __name__ == "__main__":
    main()
