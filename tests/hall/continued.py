"""Training that is saved at one topology and continued at another, on forked ranks."""

from __future__ import annotations

import os
import signal
import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from data.corpora import write_arrow
from distributed import run_ranks
from hall.models import RecordingGPT, small_gpt
from hall.trainers import make_trainer

from lightning_parm import ParmStrategy, TokenDataModule

#: Where a rank is killed while it saves step 4 over step 3, at once or on a thread, and which of the two survives.
CRASHES = {
    "before the shards": ("torch.distributed.checkpoint.save", 3),
    "while writing shards": ("torch.distributed.checkpoint.FileSystemWriter.write_data", 3),
    "before the shards' metadata": ("torch.distributed.checkpoint.FileSystemWriter.finish", 3),
    "before meta.pt": ("lightning_parm.checkpoint.folder.Folder.write", 3),
    "before meta.pt is in place": ("os.replace", 3),
    "before the old shards are removed": ("shutil.rmtree", 4),
}

GLOBAL_BATCH = 8
Sizes = dict[str, Any] | None
TOPOLOGIES: dict[str, tuple[int, Sizes]] = {
    "one process": (1, None),
    "parm on one": (1, {}),
    "dp4": (4, {"expert_parallel_size": 1}),
    "dp2 mp2": (4, {"tensor_parallel_size": 2, "expert_parallel_size": 1, "expert_shard_size": 1}),
    "ep4": (4, {"expert_parallel_size": 4}),
    "ep2 esp2": (4, {"expert_parallel_size": 2, "expert_shard_size": 2}),
    "mp2 ep2 esp2": (4, {"tensor_parallel_size": 2, "expert_parallel_size": 2, "expert_shard_size": 2}),
    "ep2 edp2": (4, {"expert_parallel_size": 2, "expert_shard_size": 1}),
    "ep2 edp2 sharded": (4, {"expert_parallel_size": 2, "expert_shard_size": 1, "data_parallel": "shard"}),
}


@cache
def corpus() -> str:
    """Two hundred documents of random tokens; call it before ranks are forked, so that all read the same file."""
    random = np.random.default_rng(3)
    documents = [random.integers(0, 32, length).astype(np.uint16) for length in random.integers(1, 40, 200)]
    folder = Path(tempfile.mkdtemp(prefix="corpus"))
    return str(write_arrow(folder / "tokens.arrow", documents))


def data(replicas: int) -> TokenDataModule:
    return TokenDataModule(corpus(), sequence_length=8, batch_size=GLOBAL_BATCH // replicas, num_logical_shards=8)


def train(
    rank: int,
    world_size: int,
    sizes: Sizes,
    steps: int,
    save_to: str | None = None,
    resume_from: str | None = None,
    model: RecordingGPT | None = None,
    strategy: dict[str, Any] | None = None,
    **options: Any,
) -> list[float]:
    """Fit on this rank up to ``steps``, and return the losses; ``strategy`` and ``options`` go where they say."""
    chosen = "auto" if sizes is None else ParmStrategy(**sizes, **(strategy or {}))
    options = {"max_steps": steps, "max_epochs": -1, "gradient_clip_val": 0.5, **options}
    trainer = make_trainer(rank, world_size, chosen, **options)
    model = model or small_gpt(torch.float64)
    trainer.fit(model, data(world_size // (sizes or {}).get("tensor_parallel_size", 1)), ckpt_path=resume_from)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return model.losses


def run(name: str, steps: int, *args: Any, killed_at: str | None = None, **more: Any) -> list[float]:
    """:func:`train` at a topology by its name; ``killed_at`` names a function whose first call ends its rank."""
    world_size, sizes = TOPOLOGIES[name]
    corpus()

    def rank_main(rank: int, world_size: int) -> list[float]:
        if killed_at is not None:  # in this forked rank only
            mock.patch(killed_at, side_effect=lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)).start()
        return train(rank, world_size, sizes, steps, *args, **more)

    return run_ranks(world_size, rank_main)[0]
