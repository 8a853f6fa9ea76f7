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
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from lightning_parm.checkpoint.folder import Folder
from lightning_parm.checkpoint.save import FORMAT, META, ShardedSave, failures_of_ranks
from lightning_parm.parallel.state import CURRENT, by_position, split_current


def save_sharded(
    checkpoint: dict[str, Any],
    path: str | Path,
    broadcast: Callable[[Any], Any],
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Write a Lightning checkpoint as a directory; every rank calls this. See :class:`ShardedSave`."""
    ShardedSave(checkpoint, path, broadcast, storage_options).write()


def remove_sharded(path: str | Path) -> None:
    """Remove a directory, ``meta.pt`` first: a crash leaves one that is refused, not one that lacks shards."""
    folder = Folder(path)
    if not folder.is_link():
        folder.remove(META)
    folder.remove()


def is_sharded(path: str | Path) -> bool:
    """Whether ``path`` is a directory rather than a file."""
    return Folder(path).is_folder()


def load_meta(path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
    """What a sharded checkpoint holds beside its tensors.

    Raises:
        RuntimeError: If the save that made the directory never finished, if ``meta.pt`` cannot be read, or if a later
            version wrote it.
    """
    folder = Folder(path)
    if not folder.exists(META):
        raise RuntimeError(
            f"The checkpoint {str(path)!r} is incomplete: it has no {META!r}, so the save that began it never "
            f"finished. {_advice_beside(folder)} and delete this directory."
        )
    try:
        with folder.open(META) as file:
            loaded: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=weights_only is not False)
    except Exception as error:
        raise RuntimeError(f"{folder / META!r} cannot be read ({type(error).__name__}): {error}") from error
    if loaded.get("shards_format", FORMAT) > FORMAT:
        raise RuntimeError(
            f"The checkpoint {str(path)!r} has format {loaded['shards_format']} and this version of lightning-parm "
            f"reads formats up to {FORMAT}. Upgrade lightning-parm, or let the version that wrote it make one file of "
            "it: lightning-parm consolidate DIR FILE."
        )
    return loaded


def _advice_beside(folder: Folder) -> str:
    whole: list[tuple[Any, Folder]] = []
    with suppress(OSError):  # a store may not let its folders be listed
        whole = [(other.modified(META), other) for other in folder.beside() if other.exists(META)]
    if not whole:
        return "Resume from an earlier checkpoint"
    return f"Resume from {str(max(whole, key=lambda pair: pair[0])[1])!r}, the latest whole one beside it,"


def load_sharded(path: str | Path, like: dict[str, Tensor], weights_only: bool | None = None) -> dict[str, Any]:
    """Read a directory as Lightning's checkpoint, without the optimizers' tensors.

    Args:
        path: The directory.
        like: Name to a tensor of the module's state that tells how this rank wants it cut; others are read whole.
        weights_only: As in :func:`torch.load`.
    """
    checkpoint = load_meta(path, weights_only)
    folder = Folder(path)
    own = _names_of(like)
    tensors = _load_tensors(
        folder, checkpoint["shards"], "model.", lambda name: like.get(own.get(_uncompiled(name), name))
    )
    checkpoint["state_dict"] = with_names_of(like, {**checkpoint["state_dict"], **tensors})
    checkpoint["shards"] = folder / checkpoint["shards"]
    return checkpoint


def with_names_of(like: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` with the names that ``like`` has for the same parameters: ``torch.compile`` adds ``_orig_mod.``."""
    own = _names_of(like)
    return {own.get(_uncompiled(name), name): value for name, value in state.items()}


def _names_of(like: Mapping[str, Any]) -> dict[str, str]:
    return {_uncompiled(name): name for name in like}


def _uncompiled(name: str) -> str:
    return name.replace("_orig_mod.", "")


def load_optimizer_tensors(checkpoint: Mapping[str, Any], index: int, like: dict[str, Tensor]) -> dict[str, Any]:
    """The state of optimizer ``index`` of what :func:`load_sharded` returned, with its tensors, cut as ``like``."""
    saved = checkpoint["optimizer_states"][index]
    state = {name: dict(entries) for name, entries in saved["state"].items()}
    path, shards = checkpoint["shards"].rsplit("/", 1)
    own = _names_of(like)

    def own_name(name: str) -> str:
        return own.get(_uncompiled(name), name)

    tensors = _load_tensors(
        Folder(path),
        shards,
        f"optimizer.{index}.",
        lambda name_and_key: like.get(own_name(name_and_key.rsplit(".", 1)[0])),
    )
    for name_and_key, value in tensors.items():
        name, key = name_and_key.rsplit(".", 1)
        state[name][key] = value
    groups = [{**group, "params": [own_name(name) for name in group["params"]]} for group in saved["param_groups"]]
    return {**saved, "state": with_names_of(like, state), "param_groups": groups}


def _load_tensors(folder: Folder, shards: str, prefix: str, like: Callable[[str], Tensor | None]) -> dict[str, Tensor]:
    """Read the tensors whose names start with ``prefix``, which is removed in the result."""
    reader = folder.reader(shards)
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
    alone = not dist.is_initialized()
    with failures_of_ranks(f"The checkpoint {str(folder)!r} cannot be read", alone):
        dcp.load(targets, storage_reader=reader, no_dist=alone)
    return {name[len(prefix) :]: value for name, value in targets.items()}


def consolidate(
    path: str,
    file: str,
    weights_only: bool = True,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Make one file of a sharded checkpoint.

    The file opens with ``LightningModule.load_from_checkpoint`` and resumes under any strategy, with optimizer states
    by position as torch writes them. One process does it without GPUs or a process group, tensor by tensor: what is
    large waits in temporary files beside ``file``, which need as much free disk as the result.

    Args:
        path: The directory, local or a URL that fsspec knows.
        file: Where the file goes, on a local disk.
        weights_only: Refuse a checkpoint that holds more than tensors and plain Python, as :func:`torch.load` does.
        on_progress: Called with a stage, bytes done and bytes in all.

    Returns:
        ``file``, ``bytes`` of its tensors, their number, and the ``global_step`` it was taken at.

    Raises:
        ValueError: If ``path`` is not a whole sharded checkpoint, or if ``file`` exists or lies inside ``path``.
        RuntimeError: If a file of the checkpoint is damaged.
    """
    folder, target = Folder(path), Path(file).absolute()
    if not folder.is_folder():
        what = "is one file already" if folder.exists() else "does not exist"
        raise ValueError(f"{path!r} {what}: give the directory that a sharded checkpoint was saved to.")
    if target.exists():
        raise ValueError(f"{file!r} exists: give another name, or remove it first.")
    if Path(str(folder)).absolute() in target.parents:
        raise ValueError(f"{file!r} lies inside the checkpoint {path!r}: give a name outside it.")
    try:
        meta = load_meta(path, weights_only)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    reader = folder.reader(meta.pop("shards"))
    meta.pop("shards_format", None)
    stored = reader.read_metadata().state_dict_metadata
    total, done = sum(_nbytes(entry) for entry in stored.values()), 0
    target.parent.mkdir(parents=True, exist_ok=True)
    optimizers = meta.get("optimizer_states", [])
    for name, entry in stored.items():
        tensor = _room_for(entry, target.parent)
        with failures_of_ranks(f"The checkpoint {path!r} cannot be read", alone=True):
            dcp.load({name: tensor}, storage_reader=reader, no_dist=True)
        kind, _, rest = name.partition(".")
        if kind == "model":
            meta["state_dict"][rest] = tensor
        else:
            index, _, parameter_and_key = rest.partition(".")
            parameter, _, key = parameter_and_key.rpartition(".")
            optimizers[int(index)]["state"].setdefault(parameter, {})[key] = tensor
        done += _nbytes(entry)
        if on_progress is not None:
            on_progress("reading", done, total)
    if "averaging_state" in meta:
        meta = _as_weight_averaging_saves(meta)
    if optimizers:
        meta["optimizer_states"] = [by_position(saved, keep=True) for saved in optimizers]
    partial = target.with_name(f"{target.name}.partial")
    with open(partial, "wb") as output:
        torch.save(meta, cast(BinaryIO, _Watched(output, total, on_progress)))
        output.flush()
        os.fsync(output.fileno())
    os.replace(partial, target)
    return {"file": file, "bytes": total, "tensors": len(stored), "global_step": meta.get("global_step", 0)}


def _as_weight_averaging_saves(meta: dict[str, Any]) -> dict[str, Any]:
    averages, current = split_current(meta["state_dict"])
    saved: dict[str, Any] = {}
    for key, value in meta.items():  # in the callback's order
        if key == "averaging_state":
            saved[CURRENT] = current
        saved[key] = value
    return {**saved, "state_dict": averages}


def _nbytes(entry: Any) -> int:
    assert isinstance(entry, TensorStorageMetadata)
    return entry.size.numel() * entry.properties.dtype.itemsize


def _room_for(entry: Any, folder: Path) -> Tensor:
    """An empty tensor, in a file without a name if it is large, so that the memory it takes can be written out."""
    nbytes = _nbytes(entry)
    if nbytes < 2**16:  # a process may map some ten thousands of files
        return torch.empty(entry.size, dtype=entry.properties.dtype)
    with tempfile.NamedTemporaryFile(dir=folder) as file:  # the mapping outlives the name
        mapped = torch.from_file(file.name, shared=True, size=nbytes, dtype=torch.uint8)
    return mapped.view(entry.properties.dtype).view(entry.size)


class _Watched:
    """A file that tells how much was written to it."""

    def __init__(self, file: BinaryIO, total: int, on_progress: Callable[[str, int, int], None] | None) -> None:
        self._file, self._total, self._on_progress, self._done = file, total, on_progress, 0

    def write(self, content: Any) -> int:
        self._done += len(content)
        if self._on_progress is not None:
            self._on_progress("writing", min(self._done, self._total), self._total)
        return self._file.write(content)

    def flush(self) -> None:
        self._file.flush()
