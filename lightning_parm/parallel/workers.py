"""Random numbers in the workers of a data loader, which must be the same on ranks that hold the same tokens."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from lightning.fabric.utilities.seed import pl_worker_init_function


def seed_workers(dataloader: Any, data_parallel_rank: int) -> Any:
    """Where Lightning seeds workers by rank, let it be the data-parallel rank.

    Tensor-parallel peers read the same samples; with workers seeded by the global rank, as
    ``seed_everything(workers=True)`` has it, they would augment them differently and train on different tokens.

    Args:
        dataloader: Any loader; one whose ``worker_init_fn`` is the user's stays as it is.
        data_parallel_rank: Rank by which to seed.

    Returns:
        The same loader.
    """
    seeded = partial(pl_worker_init_function, rank=data_parallel_rank)
    present = getattr(dataloader, "worker_init_fn", seeded)
    by_lightning = present is None or getattr(present, "func", None) is pl_worker_init_function
    if by_lightning and int(os.environ.get("PL_SEED_WORKERS", 0)):
        dataloader.worker_init_fn = seeded
    return dataloader
