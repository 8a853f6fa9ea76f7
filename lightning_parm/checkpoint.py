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
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_parm.placement import ParameterPlacement

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


def optimizer_names(optimizer: Optimizer, module: nn.Module) -> list[list[str]]:
    """Names of the parameters of each group of ``optimizer``.

    Raises:
        RuntimeError: If the optimizer holds a parameter that is not one of the module's.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        missing = [tuple(p.shape) for p in group["params"] if id(p) not in names]
        if missing:
            raise RuntimeError(
                f"The optimizer holds {len(missing)} parameter(s) of shapes {missing[:3]} that are not parameters of "
                "the LightningModule, so their state cannot be named in a checkpoint. Register them on the module."
            )
        groups.append([names[id(p)] for p in group["params"]])
    return groups


def optimizer_state(
    optimizer: Optimizer, module: nn.Module, placements: dict[str, ParameterPlacement]
) -> dict[str, Any]:
    """State of ``optimizer`` keyed by parameter names, with DTensors for what is sharded."""
    names = optimizer_names(optimizer, module)
    state: dict[str, dict[str, Any]] = {}
    for group, members in zip(optimizer.param_groups, names, strict=True):
        for parameter, name in zip(group["params"], members, strict=True):
            if parameter in optimizer.state:
                state[name] = {
                    key: placements[name].as_dtensor(value) if _follows(value, parameter) else value
                    for key, value in optimizer.state[parameter].items()
                }
    groups = [
        {**{k: v for k, v in group.items() if k != "params"}, "params": members}
        for group, members in zip(optimizer.param_groups, names, strict=True)
    ]
    return {"state": state, "param_groups": groups}


def _follows(value: Any, parameter: Tensor) -> bool:
    """Whether a value of the optimizer's state is cut like its parameter (a moment is, a step count is not)."""
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.dim() > 0


def load_optimizer_state(
    optimizer: Optimizer, module: nn.Module, placements: dict[str, ParameterPlacement], saved: dict[str, Any]
) -> None:
    """Load a state keyed by names (sharded) or by position (one file, any strategy), cutting it to this rank.

    Raises:
        RuntimeError: If the saved groups hold another number of parameters than the optimizer's.
    """
    names = optimizer_names(optimizer, module)
    sizes, saved_sizes = [len(g) for g in names], [len(g["params"]) for g in saved["param_groups"]]
    if sizes != saved_sizes:
        raise RuntimeError(
            f"The checkpoint's optimizer has groups of {saved_sizes} parameters and this one has {sizes}; load it with "
            "the configure_optimizers it was saved with."
        )
    state: dict[int, dict[str, Any]] = {}
    position = 0
    groups = []
    for group, members, saved_group in zip(optimizer.param_groups, names, saved["param_groups"], strict=True):
        keys = [key if isinstance(key, int) else name for key, name in zip(saved_group["params"], members, strict=True)]
        for parameter, name, key in zip(group["params"], members, keys, strict=True):
            if key in saved["state"]:
                placement = placements[name]
                full = placement.full_shape(parameter)
                state[position] = {
                    entry: placement.as_local(value, parameter)
                    if isinstance(value, Tensor) and value.dim() > 0 and value.shape == full
                    else value
                    for entry, value in saved["state"][key].items()
                }
            position += 1
        groups.append({**saved_group, "params": list(range(position - len(members), position))})
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def full_tensors(values: Iterable[tuple[str, Any]], keep: bool) -> dict[str, Any]:
    """Gather DTensors one by one to the CPU; ranks with ``keep=False`` take part and keep nothing."""
    gathered: dict[str, Any] = {}
    for name, value in values:
        full = value.full_tensor().cpu() if isinstance(value, DTensor) else value
        if keep:
            gathered[name] = full
    return gathered


def by_position(named: dict[str, Any], keep: bool) -> dict[str, Any]:
    """A state keyed by names as torch's optimizers write it: whole tensors, keyed by the parameter's position."""
    state: dict[int, dict[str, Any]] = {}
    groups = []
    position = 0
    for group in named["param_groups"]:
        members = group["params"]
        for offset, name in enumerate(members):
            if name in named["state"]:
                state[position + offset] = full_tensors(named["state"][name].items(), keep)
        groups.append({**group, "params": list(range(position, position + len(members)))})
        position += len(members)
    return {"state": state, "param_groups": groups} if keep else {}
