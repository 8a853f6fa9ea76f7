"""Exact resume for an existing data module: change its base class, and take the sampler from it."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from lightning_parm.data.elastic import ElasticSampler


class Position:
    """How far the training loop is: samples consumed, over resumes with other numbers of ranks and batch sizes.

    Lightning's count of finished batches is right at every moment at which a checkpoint can be taken; what has been
    fetched ahead is not in it.
    """

    def __init__(self) -> None:
        self._base_samples = 0
        self._base_batches = 0

    @staticmethod
    def processed(trainer: pl.Trainer | None) -> int:
        """Return the batches that the training loop has finished, over all fits of this Trainer."""
        if trainer is None:
            return 0
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.total
        return int(progress.processed)

    def consumed(self, trainer: pl.Trainer | None, samples_per_step: int) -> int:
        """Return the samples consumed. Loops that are not restored yet count less than the checkpoint: zero since."""
        return self._base_samples + max(0, self.processed(trainer) - self._base_batches) * samples_per_step

    def resume(self, samples: int, batches: int) -> None:
        """Count on from a checkpoint's samples and batches."""
        self._base_samples, self._base_batches = samples, batches

    def is_restored(self, trainer: pl.Trainer | None) -> bool:
        """Whether the loops stand where the checkpoint does."""
        return self.processed(trainer) == self._base_batches


def replica(trainer: pl.Trainer | None) -> tuple[int, int]:
    """Return the data-parallel rank and size, which strategies keep for their samplers."""
    known = getattr(trainer.strategy, "distributed_sampler_kwargs", None) if trainer else None
    return (int(known["rank"]), int(known["num_replicas"])) if known else (0, 1)


class ElasticDataModule(pl.LightningDataModule):
    """A base for data modules over map-style data sets that are to resume exactly on other ranks and batch sizes.

    Two lines change: the base class, and ``sampler=self.sampler(dataset, batch_size)`` in the place of ``shuffle=True``.

    Example::

        class Images(ElasticDataModule):
            def train_dataloader(self):
                return DataLoader(self.images, batch_size=8, sampler=self.sampler(self.images, 8))
    """

    def __init__(self) -> None:
        super().__init__()
        self._position = Position()
        self._sampler: ElasticSampler | None = None
        self._loaded: dict[str, Any] | None = None
        self._samples_per_step = 0

    def sampler(self, dataset: Sized, batch_size: int, seed: int = 0, shuffle: bool = True) -> ElasticSampler:
        """Return the sampler for the training data, standing at the first sample not yet consumed.

        Raises:
            ValueError: the checkpoint that is resumed belongs to a data set of another length or to another seed.
        """
        rank, size = replica(self.trainer)
        self._samples_per_step = batch_size * size
        self._sampler = ElasticSampler(len(dataset), rank, size, seed, shuffle)
        if self._loaded is not None:
            self._sampler.load_state_dict(self._loaded)
        self._sampler.start = self._position.consumed(self.trainer, self._samples_per_step)
        return self._sampler

    def state_dict(self) -> dict[str, Any]:
        """Return one integer, and what it belongs to."""
        if self._sampler is None:
            return {}
        consumed = self._position.consumed(self.trainer, self._samples_per_step)
        return {**self._sampler.state_dict(consumed), "batches": Position.processed(self.trainer)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the checkpoint was taken; loading a model for a test leaves the training order alone."""
        if self.trainer is None or self.trainer.state.fn == TrainerFn.FITTING:
            self._loaded = state_dict
            self._position.resume(int(state_dict["consumed"]), int(state_dict["batches"]))
