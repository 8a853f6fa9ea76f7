"""Sharded checkpoints: a directory that every rank writes its part of and any other topology can read.

Layout of ``DIR``::

    DIR/
      meta.pt                  loops, callbacks, data module, hyperparameters, ...; names the folder of shards
      shards-<id>/             torch.distributed.checkpoint: model and optimizer tensors, experts as DTensors
        .metadata, __0_0.distcp, ...

A save writes a new folder of shards, then replaces ``meta.pt`` in one step, then removes the old folder. So at every
moment ``meta.pt`` names a complete set: a crash leaves the previous checkpoint whole, and a directory without
``meta.pt`` is one whose first save never finished.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

META = "meta.pt"


def save_sharded(
    checkpoint: dict[str, Any], path: str | Path, broadcast: Callable[[tuple[str, str]], tuple[str, str]]
) -> None:
    """Write a Lightning checkpoint as a directory; every rank calls this.

    Args:
        checkpoint: Lightning's checkpoint, with names for positions in ``optimizer_states``. Tensors of the module and
            of the optimizers are written by the ranks that hold them, everything else by rank 0.
        path: The directory; an earlier checkpoint there stays whole until the new one is.
        broadcast: Sends rank 0's object to all ranks.
    """
    tensors: dict[str, Tensor] = {}
    meta = {**checkpoint, "state_dict": _take_tensors(checkpoint["state_dict"], "model.", tensors)}
    if "optimizer_states" in checkpoint:
        meta["optimizer_states"] = [
            {
                **saved,
                "state": {
                    name: _take_tensors(entries, f"optimizer.{index}.{name}.", tensors)
                    for name, entries in saved["state"].items()
                },
            }
            for index, saved in enumerate(checkpoint["optimizer_states"])
        ]
    # one path for all ranks: a file name made of a metric may differ between them
    target, shards = broadcast((str(path), f"shards-{uuid.uuid4().hex[:16]}"))
    folder = Path(target)
    first = not dist.is_initialized() or dist.get_rank() == 0
    replaced = folder.with_name(f"{folder.stem}-replaced")
    if first:
        if folder.is_file():
            folder.rename(replaced)
        folder.mkdir(parents=True, exist_ok=True)
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder / shards), no_dist=not dist.is_initialized())
    if first:
        partial = folder / f"{META}.partial"
        with open(partial, "wb") as file:
            torch.save({**meta, "shards": shards}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, folder / META)
        for old in folder.glob("shards-*"):
            if old.name != shards:
                shutil.rmtree(old)
        replaced.unlink(missing_ok=True)


def _take_tensors(entries: dict[str, Any], prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Move the tensors of ``entries`` to ``tensors``; what is left (step counts, extra states) is small."""
    left = {}
    for key, value in entries.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            tensors[prefix + key] = value
        else:
            left[key] = value
    return left


def load_meta(path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
    """What a sharded checkpoint holds beside its tensors.

    Raises:
        RuntimeError: If the save that made the directory never finished.
    """
    meta = Path(path) / META
    if not meta.is_file():
        raise RuntimeError(
            f"The checkpoint {str(path)!r} is incomplete: it has no {META!r}, so the save that began it never "
            "finished. Resume from an earlier checkpoint and delete this directory."
        )
    loaded: dict[str, Any] = torch.load(meta, map_location="cpu", weights_only=weights_only is not False)
    return loaded


def load_sharded(path: str | Path, like: dict[str, Tensor], weights_only: bool | None = None) -> dict[str, Any]:
    """Read a directory as Lightning's checkpoint, without the optimizers' tensors.

    Args:
        path: The directory.
        like: Name to a tensor of the module's state that tells how this rank wants it cut; others are read whole.
        weights_only: As in :func:`torch.load`.
    """
    checkpoint = load_meta(path, weights_only)
    checkpoint["shards"] = str(Path(path) / checkpoint["shards"])
    checkpoint["state_dict"].update(_load_tensors(checkpoint["shards"], "model.", like.get))
    return checkpoint


def load_optimizer_tensors(checkpoint: Mapping[str, Any], index: int, like: dict[str, Tensor]) -> dict[str, Any]:
    """The state of optimizer ``index`` of what :func:`load_sharded` returned, with its tensors, cut as ``like``."""
    saved = checkpoint["optimizer_states"][index]
    state = {name: dict(entries) for name, entries in saved["state"].items()}
    tensors = _load_tensors(
        checkpoint["shards"], f"optimizer.{index}.", lambda name_and_key: like.get(name_and_key.rsplit(".", 1)[0])
    )
    for name_and_key, value in tensors.items():
        name, key = name_and_key.rsplit(".", 1)
        state[name][key] = value
    return {**saved, "state": state}


def _load_tensors(shards: str, prefix: str, like: Callable[[str], Tensor | None]) -> dict[str, Tensor]:
    """Read the tensors whose names start with ``prefix``, which is removed in the result."""
    reader = dcp.FileSystemReader(shards)
    targets: dict[str, Any] = {}
    for name, stored in reader.read_metadata().state_dict_metadata.items():
        if not name.startswith(prefix):
            continue
        assert isinstance(stored, TensorStorageMetadata)
        wanted = like(name[len(prefix) :])
        dtype = stored.properties.dtype
        if isinstance(wanted, DTensor) and wanted.shape == stored.size:
            targets[name] = torch.empty_like(wanted, dtype=dtype)
        else:
            targets[name] = torch.empty(stored.size, dtype=dtype)
    dcp.load(targets, storage_reader=reader, no_dist=not dist.is_initialized())
    return {name[len(prefix) :]: value for name, value in targets.items()}
