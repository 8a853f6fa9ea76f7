"""How far the training loop is, and exact resume for existing data modules over map-style data sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader, Dataset

from lightning_parm.data.elastic import ElasticSampler


class Position:
    """How far the training loop is: samples consumed, over resumes with other numbers of ranks and batch sizes.

    Lightning's count of finished batches is right at every moment at which a checkpoint can be taken; what has been
    fetched ahead is not in it.
    """

    def __init__(self) -> None:
        self.is_loaded = False
        self._base_samples = 0
        self._base_batches = 0
        self._resumed_in_epoch: int | None = None  # until the loader is made
        self._carried = (-1, 0, 0)  # the resumed epoch, and its batches and samples before the resume

    def consumed(self, trainer: pl.Trainer | None, samples_per_step: int) -> int:
        """Return the samples consumed. Loops that are not restored yet count less than the checkpoint: zero since."""
        return self._base_samples + max(0, _processed(trainer) - self._base_batches) * samples_per_step

    def state_dict(self, trainer: pl.Trainer | None, samples_per_step: int) -> dict[str, int]:
        """Return what :meth:`load_state_dict` needs besides the samples consumed."""
        return {
            "batches": _processed(trainer),
            "samples_in_epoch": self._samples_in_epoch(trainer, samples_per_step),
        }

    def load_state_dict(self, samples: int, state: dict[str, Any]) -> None:
        """Count on from a checkpoint that was taken after ``samples`` samples."""
        self.is_loaded = True
        self._base_samples, self._base_batches = samples, int(state["batches"])
        self._resumed_in_epoch = int(state["samples_in_epoch"])

    def rescale_epoch(self, trainer: pl.Trainer | None, samples_per_step: int) -> None:
        """Say in batches of the present size how far the resumed epoch is, so that it ends where it would have.

        When the optimizer asked for the number of steps, Lightning has not restored its loops yet at this point; then
        the epoch keeps its number of batches, and no sample is lost or repeated either.
        """
        samples, self._resumed_in_epoch = self._resumed_in_epoch, None
        if trainer is None or samples is None or _processed(trainer) != self._base_batches:
            return
        if samples == 0:
            _begin_next_epoch(trainer)
            return
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        shift = samples // samples_per_step - progress.processed
        for count in ("ready", "started", "processed", "completed"):
            setattr(progress, count, getattr(progress, count) + shift)
        self._carried = (trainer.current_epoch, progress.processed, samples)

    def _samples_in_epoch(self, trainer: pl.Trainer | None, samples_per_step: int) -> int:
        """Return the samples of the epoch under way, 0 at its end."""
        if trainer is None:
            return 0
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        if progress.processed >= trainer.num_training_batches:
            return 0
        epoch, batches, samples = self._carried
        if epoch != trainer.current_epoch:
            batches = samples = 0
        return samples + (int(progress.processed) - batches) * samples_per_step


def _begin_next_epoch(trainer: pl.Trainer) -> None:
    """Tell Lightning that an epoch which was finished when the checkpoint was taken is finished.

    Where ``max_steps`` is set it would go on in that epoch, one batch past its end, and count all later ones too low.
    """
    epoch: Any = trainer.fit_loop.epoch_progress.current
    if epoch.ready == epoch.started == epoch.processed:
        _Loop.restarting.fset(trainer.fit_loop, False)  # type: ignore[attr-defined]


def _processed(trainer: pl.Trainer | None) -> int:
    """Return the batches that the training loop has finished, over all fits of this Trainer."""
    if trainer is None:
        return 0
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    return int(progress.processed)


def replica(trainer: pl.Trainer | None) -> tuple[int, int]:
    """Return the data-parallel rank and size, which strategies keep for their samplers."""
    known = getattr(trainer.strategy, "distributed_sampler_kwargs", None) if trainer else None
    return (int(known["rank"]), int(known["num_replicas"])) if known else (0, 1)


class ElasticDataModule(pl.LightningDataModule):
    """A base for data modules over map-style data sets that are to resume exactly on other ranks and batch sizes.

    Two lines change: the base class, and ``self.loader(...)`` in place of ``DataLoader(..., shuffle=True)``.

    >>> class Numbers(ElasticDataModule):
    ...     def train_dataloader(self):
    ...         return self.loader(range(10), batch_size=5)
    >>> sorted(next(iter(Numbers().train_dataloader())).tolist() + [0])[0]
    0
    """

    def __init__(self) -> None:
        super().__init__()
        self._position = Position()
        self._sampler: ElasticSampler | None = None
        self._loaded: dict[str, Any] | None = None
        self._samples_per_step = 0

    def loader(self, dataset: Any, batch_size: int, seed: int = 0, shuffle: bool = True, **options: Any) -> Any:
        """Return a ``DataLoader`` of the training data from the first sample not yet consumed on.

        Args:
            dataset: a data set with a length.
            batch_size: samples a rank and step.
            seed: another seed is another order.
            shuffle: ``False`` keeps the data set's order.
            **options: what else ``torch.utils.data.DataLoader`` takes.

        Raises:
            ValueError: the checkpoint that is resumed belongs to a data set of another length or to another seed.
        """
        rank, size = replica(self.trainer)
        self._samples_per_step = batch_size * size
        self._sampler = ElasticSampler(len(dataset), rank, size, seed, shuffle, endless=True)
        if self._loaded is not None:
            self._sampler.load_state_dict(self._loaded)
        self._position.rescale_epoch(self.trainer, self._samples_per_step)
        return _ElasticLoader(dataset, batch_size, self._sampler, self._consumed, options)

    def state_dict(self) -> dict[str, Any]:
        """Return one integer, and what it belongs to."""
        if self._sampler is None:
            return {}
        position = self._position.state_dict(self.trainer, self._samples_per_step)
        return {**self._sampler.state_dict(self._consumed()), **position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the checkpoint was taken; loading a model for a test leaves the training order alone."""
        if self.trainer is None or self.trainer.state.fn == TrainerFn.FITTING:
            self._loaded = state_dict
            self._position.load_state_dict(int(state_dict["consumed"]), state_dict)

    def _consumed(self) -> int:
        return self._position.consumed(self.trainer, self._samples_per_step)


class _ElasticLoader(DataLoader[Any]):
    """A DataLoader whose epochs begin where the training stands, and whose state is the data module's."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        sampler: ElasticSampler,
        consumed: Callable[[], int],
        options: dict[str, Any],
    ) -> None:
        super().__init__(dataset, batch_size, sampler=sampler, **options)
        self._elastic, self._consumed = sampler, consumed

    def __len__(self) -> int:
        return max(1, self._elastic.length // (self._elastic.num_replicas * (self.batch_size or 1)))

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._elastic.start = self._consumed()
        return super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: Lightning would give rank 0's state to every rank."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take nothing: the state is the data module's."""
