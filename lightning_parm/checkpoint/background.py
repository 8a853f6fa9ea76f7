"""Checkpoints written on a thread while training goes on."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor

from lightning_parm.checkpoint.save import ShardedSave


class BackgroundSaves:
    """Writes one checkpoint after another on a thread of every rank, which agree in a group of their own.

    Training waits while its tensors are copied to the CPU, and for the save before the last if that is not written
    yet: at most two are on their way. The copies' memory is kept and filled again. Every rank makes one of these and
    calls its methods in the same order, :meth:`remove` excepted.

    Args:
        timeout: How long a rank waits for the others.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._timeout = timeout
        self._group: dist.ProcessGroup | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._saves: deque[tuple[Future[None], dict[str, Tensor]]] = deque()
        self._removals: list[Future[None]] = []
        self._spare: list[dict[str, Tensor]] = []
        self._last_failed = False
        self._failure = ""
        self._num_failures = 0

    def save(self, save: ShardedSave) -> None:
        """Copy what ``save`` holds and write it later.

        Raises:
            RuntimeError: If an earlier save failed.
        """
        self._leave(1)
        num_failures = self._num_failures
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        buffers = self._spare.pop() if self._spare else {}
        save.copy_to_cpu(buffers)
        self._saves.append((self._thread.submit(self._write, save, num_failures), buffers))

    def _write(self, save: ShardedSave, num_failures: int) -> None:
        self._last_failed = True
        if num_failures != self._num_failures:  # its group has been left, and the world's own is the training's
            raise RuntimeError(
                f"The checkpoint {str(save.folder)!r} was not saved, because of what came before it: {self._failure}"
            )
        self._failure = ""
        try:
            save.write(self._group)
        except Exception as error:
            self._failure = str(error) or repr(error)  # not the error, whose frames would keep the group
        if self._failure:
            self._leave_group()
            self._num_failures += 1  # after it, and save() reads it before the group: this may happen between
            gc.collect()
            raise RuntimeError(self._failure)
        self._last_failed = False

    def _leave_group(self) -> None:
        """Close the connections: a peer that waits in them for one that has died must fail as well."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def remove(self, remove: Callable[[], None]) -> None:
        """Call ``remove`` when the saves on their way are whole, and never if the last of them is not."""
        self._removals.append(self._thread.submit(lambda: None if self._last_failed else remove()))

    def wait(self) -> None:
        """Return when all is written.

        Raises:
            RuntimeError: If a save failed.
        """
        self._leave(0)
        while self._removals:
            self._removals.pop(0).result()

    def _leave(self, on_their_way: int) -> None:
        while self._saves and (len(self._saves) > on_their_way or self._saves[0][0].done()):
            save, buffers = self._saves.popleft()
            save.result()
            self._spare.append(buffers)

    def close(self) -> None:
        """Wait, and give back the thread and the group.

        Raises:
            RuntimeError: If a save failed.
        """
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._leave_group()


def check_saves(strategy: Any, name: str, owner: str) -> None:
    """What writes on a thread must be able to write what is asked for.

    Args:
        strategy: Of the Trainer or of Fabric, before its processes start.
        name: Its class, for the message.
        owner: Who takes plugins, for the message.

    Raises:
        ValueError: If a plugin that writes files is to write directories, or ``async_checkpoint`` to write files.
    """
    several = strategy.num_nodes * strategy.num_processes > 1
    if several and strategy._save_distributed_checkpoint and isinstance(strategy._checkpoint_io, AsyncCheckpointIO):
        raise ValueError(
            "AsyncCheckpointIO writes files and a sharded checkpoint is a directory: take the plugin away and use "
            f"{name}(async_checkpoint=True), or set save_distributed_checkpoint=False."
        )
    if strategy._async_checkpoint and not strategy._save_distributed_checkpoint:
        raise ValueError(
            "async_checkpoint=True writes directories, save_distributed_checkpoint=False asks for files: drop one "
            f"of them, or give {owner} Lightning's AsyncCheckpointIO plugin, which writes files on a thread."
        )
