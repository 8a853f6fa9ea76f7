"""The hall's side of the token loader: a data module whose position is part of every checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from lightning_parm.data.loader import Batch, TokenLoader


class TokenDataModule(pl.LightningDataModule):
    """Token windows for training and validation; resumes exactly on any number of devices and workers.

    The position is a few integers in Lightning's own checkpoint, equal on every rank. What counts is what the training
    loop consumed, never what workers have read ahead. The same Trainer goes on where it stopped; a new Trainer without
    a checkpoint starts at the first sample.

    Args:
        sources: a path (file, folder or pattern) or ``{name: path}``.
        sequence_length: L, tokens a sample.
        batch_size: samples a rank and step.
        weights: share of each source in the tokens served; ``None`` is in proportion to their sizes.
        delimiter: token put between documents; ``None`` takes what the files say, if they say anything.
        seed: another seed is another order.
        num_logical_shards: a power of two, fixed for the life of a run.
        num_workers: processes that read ahead.
        validation: a path or ``{name: path}``; every window is seen once, in the order of the files.
        bad_files: ``"raise"`` or ``"skip"`` files that cannot be read.
    """

    def __init__(
        self,
        sources: str | dict[str, str],
        sequence_length: int,
        batch_size: int,
        weights: dict[str, float] | None = None,
        delimiter: int | None = None,
        seed: int = 0,
        num_logical_shards: int = 1024,
        num_workers: int = 0,
        validation: str | dict[str, str] | None = None,
        bad_files: str = "raise",
    ) -> None:
        super().__init__()
        self.sources = sources
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.weights = weights
        self.delimiter = delimiter
        self.seed = seed
        self.num_logical_shards = num_logical_shards
        self.num_workers = num_workers
        self.validation = validation
        self.bad_files = bad_files
        self._loader: TokenLoader | None = None
        self._trainer_of_fit: int | None = None
        self._base_samples = 0
        self._base_batches = 0
        self._stride = batch_size
        if validation is None and type(self).val_dataloader is TokenDataModule.val_dataloader:
            self.val_dataloader = super().val_dataloader  # type: ignore[method-assign]  # Lightning then sees none

    def setup(self, stage: str) -> None:
        """Open the training data before the first step, so that a wrong path is an error at once."""
        if stage == "fit" and self._trainer_of_fit != id(self.trainer):
            self._trainer_of_fit = id(self.trainer)
            self._loader = None
            self._base_samples = self._base_batches = 0
            self._open()

    def train_dataloader(self) -> TokenStream:
        """Return the stream of training batches from the first sample not yet consumed on."""
        loader = self._open()
        loader.seek(self._consumed())
        return TokenStream(loader)

    def val_dataloader(self) -> Any:
        """Return the validation windows."""
        assert self.validation is not None
        rank, size = self._replica()
        return TokenLoader(
            self.validation,
            self.sequence_length,
            self.batch_size,
            rank,
            size,
            delimiter=self.delimiter,
            num_logical_shards=1,
            shuffle=False,
            bad_files=self.bad_files,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position: plain values, the same on every rank, taken without communication."""
        state = self._open().state_dict(samples=self._consumed())
        return {**state, "batches": self._processed()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the checkpoint was taken; loading a model for a test leaves the training stream alone.

        Raises:
            ValueError: the checkpoint belongs to other data or another order; the message says what differs.
        """
        if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            return
        self._open().load_state_dict(state_dict)
        self._base_samples = int(state_dict["samples"])
        self._base_batches = int(state_dict["batches"])

    def samples_per_source(self) -> dict[str, int]:
        """Return how many samples of each source the training loop has consumed."""
        return self._open().served(self._consumed())

    def _open(self) -> TokenLoader:
        if self._loader is None:
            rank, size = self._replica()
            self._stride = self.batch_size * size
            self._loader = TokenLoader(
                self.sources,
                self.sequence_length,
                self.batch_size,
                rank,
                size,
                self.weights,
                self.delimiter,
                self.seed,
                self.num_logical_shards,
                self.num_workers,
                bad_files=self.bad_files,
            )
        return self._loader

    def _replica(self) -> tuple[int, int]:
        """Return the data-parallel rank and size, which strategies keep for their samplers."""
        known = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) if self.trainer else None
        return (int(known["rank"]), int(known["num_replicas"])) if known else (0, 1)

    def _processed(self) -> int:
        """Return the batches that the training loop has finished, over all fits of this Trainer."""
        if self.trainer is None:
            return 0
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.total
        return int(progress.processed)

    def _consumed(self) -> int:
        """Return the samples consumed. Loops that are not restored yet count less than the checkpoint: zero since."""
        return self._base_samples + max(0, self._processed() - self._base_batches) * self._stride


class TokenStream:
    """The training batches as Lightning sees them: sized, so that progress bars have totals, and without an end.

    The data module keeps the position; to Lightning this loader shows an empty state of its own, because Lightning
    would give rank 0's loader state to every rank.
    """

    def __init__(self, loader: TokenLoader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        """Return the batches of an epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self.loader.next_batch()

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the state is the data module's."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take nothing: the state is the data module's."""
