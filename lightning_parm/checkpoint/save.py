"""How every rank's part of a checkpoint becomes one directory, in one step that a crash cannot cut."""

from __future__ import annotations

import io
import uuid
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from lightning_parm.checkpoint.folder import Folder

META = "meta.pt"
#: Version of the directory's layout; ``meta.pt`` carries it, and one without it is of the first.
FORMAT = 1


class ShardedSave:
    """One save of a checkpoint into a directory: what this rank writes, and how that becomes the checkpoint.

    Every rank makes one and calls :meth:`write`, at once or, after :meth:`copy_to_cpu`, on a thread.

    Args:
        checkpoint: Lightning's checkpoint, with names for positions in ``optimizer_states``. Tensors of the module and
            of the optimizers are written by the ranks that hold them, everything else by rank 0.
        path: The directory; an earlier checkpoint there stays whole until the new one is.
        broadcast: Sends rank 0's object to all ranks.
        storage_options: Arguments of the filesystem, where ``path`` is a URL.

    Raises:
        RuntimeError: On every rank, if rank 0 cannot make the directory.
    """

    def __init__(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        broadcast: Callable[[Any], Any],
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._tensors: dict[str, Tensor] = {}
        meta = {**checkpoint, "state_dict": _take_tensors(checkpoint["state_dict"], "model.", self._tensors)}
        if "optimizer_states" in checkpoint:
            meta["optimizer_states"] = [
                {
                    **saved,
                    "state": {
                        name: _take_tensors(entries, f"optimizer.{index}.{name}.", self._tensors)
                        for name, entries in saved["state"].items()
                    },
                }
                for index, saved in enumerate(checkpoint["optimizer_states"])
            ]
        self._first = not dist.is_initialized() or dist.get_rank() == 0
        failure = None
        if self._first:
            try:
                Folder(path, storage_options).create()
            except OSError as error:
                failure = f"{type(error).__name__}: {error}"
        # one path for all ranks: a file name made of a metric may differ between them
        target, self._shards, failure = broadcast((str(path), f"shards-{uuid.uuid4().hex[:16]}", failure))
        if failure is not None:
            raise RuntimeError(
                f"The checkpoint {target!r} cannot be saved: rank 0 cannot make it a folder ({failure})."
            )
        self.folder = Folder(target, storage_options)
        self._meta = b""
        if self._first:
            content = io.BytesIO()  # now, because callbacks and loops go on changing what they gave
            torch.save({**meta, "shards": self._shards, "shards_format": FORMAT}, content)
            self._meta = content.getvalue()

    def copy_to_cpu(self, buffers: dict[str, Tensor]) -> None:
        """Put copies in the place of the tensors, so that training may go on before they are written.

        Args:
            buffers: Copies that an earlier save no longer needs, by name; they are filled again where they fit, which
                spares the cost of fresh memory, and replaced where not.
        """
        on_gpu = False
        for name, tensor in self._tensors.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            buffer = buffers.get(name)
            if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
                buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
                buffers[name] = buffer
            buffer.copy_(local.detach(), non_blocking=True)
            on_gpu = on_gpu or local.is_cuda
            # from_local would move the copy back to the mesh's device
            self._tensors[name] = (
                DTensor(buffer, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else buffer
            )
        if on_gpu:
            torch.cuda.current_stream().synchronize()

    def write(self, group: dist.ProcessGroup | None = None) -> None:
        """Write this rank's part; it returns when the checkpoint is whole, on every rank.

        Args:
            group: The group of all ranks to agree in, by default the world's.

        Raises:
            RuntimeError: On every rank, if one of them cannot write; the directory is then as it was, or incomplete.
        """
        distributed = dist.is_initialized()
        with failures_of_ranks(f"The checkpoint {str(self.folder)!r} cannot be saved", alone=not distributed):
            dcp.save(
                self._tensors,
                storage_writer=self.folder.writer(self._shards),
                no_dist=not distributed,
                process_group=group,
            )
        failure: list[str | None] = [None]
        if self._first:
            try:
                self._take_effect()
            except OSError as error:
                failure = [f"{type(error).__name__}: {error}"]
        if distributed:
            dist.broadcast_object_list(failure, group=group, group_src=0)
        if failure[0] is not None:
            raise RuntimeError(f"The checkpoint {str(self.folder)!r} cannot be saved: rank 0: {failure[0]}")

    def _take_effect(self) -> None:
        self.folder.write(META, self._meta)
        for entry in self.folder.entries():
            if entry.startswith("shards-") and entry != self._shards:
                self.folder.remove(entry)
        self.folder.forget_file()


def _take_tensors(entries: dict[str, Any], prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Move the tensors of ``entries`` to ``tensors``; what is left (step counts, extra states) is small."""
    left = {}
    for key, value in entries.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            tensors[prefix + key] = value
        else:
            left[key] = value
    return left


@contextmanager
def failures_of_ranks(sentence: str, alone: bool) -> Generator[None, None, None]:
    """Say in one sentence which ranks failed; every rank raises the same, and only Exceptions."""
    try:
        with warnings.catch_warnings() if alone else nullcontext():  # filters belong to all threads
            if alone:
                warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            yield
    except CheckpointException as failed:
        rank, (error, _) = min(failed.failures.items())
        which = f" (and {len(failed.failures) - 1} other ranks)" if len(failed.failures) > 1 else ""
        told = str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
        raise RuntimeError(f"{sentence}: rank {rank}{which}: {told}") from error
