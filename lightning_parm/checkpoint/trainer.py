"""What ParmStrategy does when the Trainer saves, loads or removes a checkpoint."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_parm.checkpoint import directory as sharded
from lightning_parm.checkpoint.background import BackgroundSaves, check_saves
from lightning_parm.checkpoint.save import ShardedSave
from lightning_parm.moe import Topology
from lightning_parm.parallel.model import ParallelModel

#: Key of a checkpoint that was taken between two optimizer steps.
_OPEN_WINDOW = "unfinished_accumulation"
#: How long a rank that has failed waits to hear that its peers have, too.
_SECONDS_TO_MEET = 20.0


class CheckpointingStrategy(DDPStrategy):
    """The part of :class:`~lightning_parm.ParmStrategy` that keeps checkpoints, as directories or as files."""

    _save_distributed_checkpoint: bool = True
    _async_checkpoint: bool = False
    _background: BackgroundSaves | None = None
    _topology: Topology | None = None
    _num_meetings: int = 0

    @property
    @abstractmethod
    def parallel_model(self) -> ParallelModel:
        """The module cut over the ranks."""

    def _configure_launcher(self) -> None:
        check_saves(self, "ParmStrategy", "the Trainer")
        super()._configure_launcher()

    @property
    def _sharded(self) -> bool:
        return self._save_distributed_checkpoint and self._topology is not None and self._topology.world_size > 1

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state: DTensors for a sharded checkpoint, else whole tensors on rank 0."""
        if (failure := sys.exc_info()[1]) is not None and dist.is_initialized():
            self._meet_peers(failure)
        return self.parallel_model.state_dict() if self._sharded else self.whole_state_dict()

    def whole_state_dict(self) -> dict[str, Any]:
        """The module's state with whole tensors on rank 0 and nothing on the others; every rank must call it."""
        return self.parallel_model.whole_state_dict(keep=self.is_global_zero)

    def _meet_peers(self, failure: BaseException) -> None:
        """See that all ranks save because of a failure; one that did alone would wait for the others in vain."""
        self._num_meetings += 1
        store = dist.PrefixStore(f"parm/meeting{self._num_meetings}/", dist.distributed_c10d._get_default_store())
        store.set(str(self.global_rank), "here")
        limit = min(timedelta(seconds=_SECONDS_TO_MEET), self._timeout or timedelta.max)
        try:
            store.wait([str(rank) for rank in range(self.world_size)], limit)
        except (RuntimeError, ValueError):
            raise RuntimeError(
                f"No checkpoint was saved on exception: rank {self.global_rank} failed ({type(failure).__name__}: "
                f"{failure}) and not every other rank did within {limit.total_seconds():g} s, but all must take part. "
                "Resume from the last checkpoint before."
            ) from failure

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state by parameter name, or as any strategy writes it when one file is written."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        if self._sharded:
            return self.parallel_model.optimizer_state(optimizer)
        return self.parallel_model.whole_optimizer_state(optimizer, keep=self.is_global_zero)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Write a directory with every rank's part, or one file from rank 0."""
        if (window := self._open_window()) is not None:
            checkpoint = {**checkpoint, _OPEN_WINDOW: window}
        if not self._sharded:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        save = ShardedSave(checkpoint, filepath, self.broadcast, storage_options)
        assert self.lightning_module is not None
        if not self._async_checkpoint or self.lightning_module.trainer.state.status != TrainerStatus.RUNNING:
            self._finish_saves()
            save.write()
            return
        if self._background is None:
            self._background = BackgroundSaves(self._timeout)
        self._background.save(save)
        if Path(filepath).name.startswith("hpc_ckpt_"):  # the job is ended as soon as this returns
            self._finish_saves()

    def remove_checkpoint(self, filepath: _PATH) -> None:
        """Remove a directory or a file; while saves are on their way, after them."""
        if not self.is_global_zero:
            return
        remove = partial(sharded.remove_sharded, filepath)
        if not sharded.is_sharded(filepath):
            remove = partial(super().remove_checkpoint, filepath)
        if self._background is None:
            remove()
        else:
            self._background.remove(remove)

    def _finish_saves(self) -> None:
        if self._background is not None:
            self._background.wait()

    def teardown(self) -> None:
        """Wait for saves on their way, and leave everything as a Trainer expects it."""
        background, self._background = self._background, None
        try:
            if background is not None:
                background.close()
        finally:
            super().teardown()

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a file or a directory, whichever topology wrote it."""
        self._finish_saves()
        like = self.parallel_model.state_dict()
        if sharded.is_sharded(checkpoint_path):
            checkpoint = sharded.load_sharded(checkpoint_path, like, weights_only)
        else:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
            checkpoint["state_dict"] = sharded.with_names_of(like, checkpoint["state_dict"])
        assert self.lightning_module is not None
        if _OPEN_WINDOW in checkpoint and self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            window = checkpoint[_OPEN_WINDOW]
            rank_zero_warn(
                f"The checkpoint {str(checkpoint_path)!r} was taken after {window['batches']} batches and "
                f"{window['steps']} optimizer steps, {window['since_step']} batches into an accumulation of "
                f"{window['accumulate']}. Their gradients are not part of it, so the next step will lack them. Save "
                "right after optimizer steps, where resuming is exact."
            )
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole or sharded tensors, keeping this rank's part."""
        self.parallel_model.load_state_dict(checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load whole or sharded states, keeping this rank's part.

        Raises:
            RuntimeError: If the checkpoint holds another number of optimizers.
        """
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise RuntimeError(
                f"The checkpoint holds the states of {len(states)} optimizer(s) and configure_optimizers gave "
                f"{len(self.optimizers)}; load it with the configure_optimizers it was saved with."
            )
        like = self.parallel_model.parameters_as_dtensors()
        for index, (optimizer, saved) in enumerate(zip(self.optimizers, states, strict=True)):
            if "shards" in checkpoint:
                saved = sharded.load_optimizer_tensors(checkpoint, index, like)
            self.parallel_model.load_optimizer_state(optimizer, saved)
            _optimizer_to_device(optimizer, self.root_device)

    def _open_window(self) -> dict[str, int] | None:
        """Where the training loop stands between two optimizer steps, if it does."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        done = progress.current.processed
        at_the_end = done == trainer.num_training_batches or (progress.is_last_batch and done == progress.current.ready)
        since_step = done % trainer.accumulate_grad_batches
        if at_the_end or since_step == 0 or not self.lightning_module.automatic_optimization:
            return None
        return {
            "batches": progress.total.processed,
            "steps": trainer.global_step,
            "since_step": since_step,
            "accumulate": trainer.accumulate_grad_batches,
        }
