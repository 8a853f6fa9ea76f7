"""How many bytes each rank holds with replicas and with ``data_parallel="shard"``.

    MALLOC_MMAP_THRESHOLD_=65536 python examples/05_memory_per_rank.py    # 4 CPU ranks, experts over 2 of them

It trains a small GPT for a few steps under both and prints, for rank 0, the MiB of parameters, gradients and optimizer
state, counted from the tensors, and those of the process since the model was made. The variable makes glibc return what
is freed: parameters are gathered and freed block by block, and glibc would keep the gaps for later.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_parm import ParmStrategy
from lightning_parm.models import GPT

MIB = 2**20
COLUMNS = ("parameters", "gradients", "optimizer", "together", "process")


def held(tensors: Iterable[Tensor | None]) -> float:
    """MiB of the parts that this rank holds."""
    parts = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if t is not None]
    return sum(part.numel() * part.element_size() for part in parts) / MIB


def resident() -> float:
    """MiB of this process's own memory, not counting the pages of libraries."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


class Weigh(L.Callback):
    """Weighs rank 0 after the fourth step, gradients still there."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.before = 0.0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Take the process without the model as zero."""
        self.before = resident() - held(pl_module.parameters())

    def on_before_zero_grad(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Weigh."""
        if trainer.global_step == 4 and trainer.is_global_zero:
            gc.collect()
            parameters = list(pl_module.parameters())
            state = [value for entry in optimizer.state.values() for value in entry.values()]
            row = [held(parameters), held(p.grad for p in parameters), held(state), resident() - self.before]
            self.file.write_text(json.dumps(row), encoding="ascii")


def weigh(data_parallel: str, options: argparse.Namespace) -> list[float]:
    """Train, and return MiB of parameters, gradients, optimizer state, and of the process since the model was made."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rank-0.json"
        strategy = ParmStrategy(
            tensor_parallel_size=options.tensor_parallel_size,
            expert_parallel_size=options.expert_parallel_size,
            data_parallel=data_parallel,
            start_method="fork",
            calibrate=False,
        )
        trainer = L.Trainer(
            accelerator="cpu",
            devices=options.devices,
            strategy=strategy,
            max_steps=5,
            callbacks=[Weigh(file)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        sizes = {"num_layers": options.layers, "model_dim": options.model_dim, "hidden_dim": 2 * options.model_dim}
        tokens = torch.randint(0, 8192, (64, 65))
        samples = [{"input_ids": row[:-1], "labels": row[1:]} for row in tokens]
        trainer.fit(GPT(vocab_size=8192, num_experts=8, **sizes), DataLoader(samples, batch_size=1))
        row: list[float] = json.loads(file.read_text(encoding="ascii"))
        return row


def main() -> None:
    """Weigh both."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--expert-parallel-size", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--model-dim", type=int, default=256)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{'MiB on rank 0':14} {'parameters':>11} {'gradients':>11} {'optimizer':>11} {'together':>11} {'process':>11}"
    )
    for data_parallel in ("replicate", "shard"):
        *parts, process = weigh(data_parallel, options)
        print(f"{data_parallel:14}" + "".join(f"{number:12.1f}" for number in [*parts, sum(parts), process]))


if __name__ == "__main__":
    main()
