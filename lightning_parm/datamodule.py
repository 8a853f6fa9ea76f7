"""The hall's side of the token loader: a data module whose position is part of every checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_parm.cache import cache_folder as default_folder
from lightning_parm.data.batches import BatchMaker
from lightning_parm.data.evaluation import EvaluationLoader
from lightning_parm.data.loader import TokenLoader
from lightning_parm.data.sources.cache import DEFAULT_LIMIT_BYTES
from lightning_parm.data.sources.registry import open_sources
from lightning_parm.elastic import Position, replica

_SHOW_PROGRESS_FROM = 64  # files


class TokenDataModule(pl.LightningDataModule):
    """Token windows for training and validation; resumes exactly on any number of devices and workers.

    The position is a few integers in Lightning's own checkpoint, equal on every rank. What counts is what the training
    loop consumed, never what workers have read ahead. The same Trainer goes on where it stopped; a new Trainer without
    a checkpoint starts at the first sample.

    Args:
        sources: a path (file, folder, pattern or URL) or ``{name: path}``.
        sequence_length: L, tokens a sample.
        batch_size: samples a rank and step.
        weights: share of each source in the samples, ``{name: weight}``, or a schedule ``[(tokens, {name: weight})]``
            with straight lines between its entries; ``None`` is in proportion to the sources' sizes.
        delimiter: token put between documents; ``None`` takes what the files say, if they say anything.
        seed: another seed is another order.
        num_logical_shards: a power of two, fixed for the life of a run.
        num_workers: processes that read ahead.
        validation: a path or ``{name: path}``; every window is seen once, in the order of the files.
        test: the same for ``trainer.test``.
        sized: an epoch is every sample once, and progress bars have totals; ``False`` is one endless epoch, for
            ``max_steps``.
        samples: ``"windows"`` of packed documents, or ``"documents"``, one a sample, cut or padded.
        at_exhaustion: when a source has been served once: ``"repeat"`` it in another order, ``"stop"`` the stream, or
            ``"drop"`` the source and go on with the others.
        document_ids: add ``document_ids`` (B, L), which count the documents in each sample.
        position_ids: add ``position_ids`` (B, L), which start again at 0 with every document.
        mask_document_starts: label ``-100`` where the next token is the first of another document.
        transform: called with every sample, a dictionary of tensors, before collation.
        collate: makes a batch of a list of samples; ``None`` stacks them.
        bad_files: ``"raise"`` or ``"skip"`` files that cannot be read.
        format: name of a format, or ``"package.module.Class"`` of one of yours; ``None`` detects it.
        dtype: integer type of raw files, which cannot say it themselves.
        cache_folder: where indices, fetched and decoded parts are kept; ``None`` is
            ``$XDG_CACHE_HOME/lightning_parm`` or ``~/.cache/lightning_parm``.
        cache_bytes: limit of the fetched and decoded parts.
        bos: token put before every document that does not begin with it.
        min_document_length: documents of fewer tokens, delimiter and ``bos`` not counted, are left out.
    """

    def __init__(
        self,
        sources: str | dict[str, str],
        sequence_length: int,
        batch_size: int,
        weights: dict[str, float] | list[tuple[int, dict[str, float]]] | None = None,
        delimiter: int | None = None,
        seed: int = 0,
        num_logical_shards: int = 1024,
        num_workers: int = 0,
        validation: str | dict[str, str] | None = None,
        test: str | dict[str, str] | None = None,
        sized: bool = True,
        samples: Literal["windows", "documents"] = "windows",
        at_exhaustion: Literal["repeat", "stop", "drop"] = "repeat",
        document_ids: bool = False,
        position_ids: bool = False,
        mask_document_starts: bool = False,
        transform: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        collate: Callable[[list[dict[str, Any]]], Any] | None = None,
        bad_files: Literal["raise", "skip"] = "raise",
        format: str | None = None,
        dtype: str | None = None,
        cache_folder: str | None = None,
        cache_bytes: int = DEFAULT_LIMIT_BYTES,
        bos: int | None = None,
        min_document_length: int = 1,
    ) -> None:
        super().__init__()
        self.sources = sources
        self.validation = validation
        self.test = test
        self.sized = sized
        self.batch_size = batch_size
        self._shape: dict[str, Any] = {"sequence_length": sequence_length, "batch_size": batch_size, "samples": samples}
        self._made: dict[str, Any] = {
            "document_ids": document_ids,
            "position_ids": position_ids,
            "mask_document_starts": mask_document_starts,
            "transform": transform,
            "collate": collate,
        }
        self._opening: dict[str, Any] = {
            "delimiter": delimiter,
            "bad_files": bad_files,
            "format": format,
            "dtype": dtype,
            "cache_folder": cache_folder or str(default_folder()),
            "cache_bytes": cache_bytes,
            "bos": bos,
            "min_document_length": min_document_length,
        }
        self._stream: dict[str, Any] = {
            "weights": weights,
            "seed": seed,
            "num_logical_shards": num_logical_shards,
            "num_workers": num_workers,
            "at_exhaustion": at_exhaustion,
        }
        self._loader: TokenLoader | None = None
        self._trainer_of_fit: pl.Trainer | None = None
        self._forget()
        for name in ("val", "test"):  # Lightning asks which data there is by looking for methods
            if (validation if name == "val" else test) is None and _inherited(self, f"{name}_dataloader"):
                setattr(self, f"{name}_dataloader", getattr(super(), f"{name}_dataloader"))

    def prepare_data(self) -> None:
        """Index the files once on every machine, before its other processes need the index."""
        bar: tqdm[Any] | None = None

        def show(name: str, done: int, total: int) -> None:
            nonlocal bar
            if total >= _SHOW_PROGRESS_FROM:
                if done == 1:
                    bar = tqdm(total=total, desc=f"Indexing {name}", unit="file")
                if bar is not None:
                    bar.update(1)
                    if done == total:
                        bar.close()

        for sources in (self.sources, self.validation, self.test):
            if sources is not None:
                open_sources(sources, **self._opening, progress=show)

    def setup(self, stage: str) -> None:
        """Open the training data before the first step, so that a wrong path is an error at once."""
        if stage == "fit" and self._trainer_of_fit is not self.trainer:
            self._trainer_of_fit = self.trainer
            self._forget()
            self._open()

    def teardown(self, stage: str) -> None:
        """End the processes that read ahead."""
        if self._loader is not None:
            self._loader.close()

    def train_dataloader(self) -> Any:
        """Return the stream of training batches from the first sample not yet consumed on."""
        loader, consumed = self._open(), self._consumed()
        if consumed and self.trainer is not None and self.trainer.ckpt_path and not self._position.is_loaded:
            rank_zero_warn(
                f"The checkpoint holds no position of a {type(self).__qualname__}, so the data goes on at sample "
                f"{consumed}, as if its batches had been of the present size. Lightning keeps states by class name: "
                f"was the data module's class another one when the checkpoint was saved?"
            )
        loader.seek(consumed)
        self._position.rescale_epoch(self.trainer, loader.samples_per_step)
        return SizedTokenStream(loader) if self.sized else TokenStream(loader)

    def val_dataloader(self) -> Any:
        """Return the validation windows, each once over all ranks."""
        return self._evaluate(self.validation)

    def test_dataloader(self) -> Any:
        """Return the test windows, each once over all ranks."""
        return self._evaluate(self.test)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Change the mix from the next batch that the training loop asks for; call it on every rank alike.

        Raises:
            ValueError: a source is unknown or missing, or no weight is positive.
        """
        self._open().set_weights(weights)

    def weights_per_source(self) -> dict[str, float]:
        """Return the weight of each source at the next sample: what was given, or last set, or where a ramp is now."""
        return self._open().weights(self._consumed())

    def samples_per_source(self) -> dict[str, int]:
        """Return how many samples of each source the training loop has consumed."""
        return self._open().served(self._consumed())

    def epochs_per_source(self) -> dict[str, float]:
        """Return how often the training loop has seen each source: 1.5 is halfway through its second epoch."""
        return self._open().epochs(self._consumed())

    def wait_seconds(self) -> float:
        """Return how long this process has waited for training data since it started."""
        return self._loader.wait_seconds if self._loader else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the position: plain values, the same on every rank, taken without communication."""
        state = self._open().state_dict(samples=self._consumed())
        return {**state, **self._position.state_dict(self.trainer, self._open().samples_per_step)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the checkpoint was taken; loading a model for a test leaves the training stream alone.

        Raises:
            ValueError: the checkpoint belongs to other data or another order; the message says what differs.
        """
        if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            return
        self._open().load_state_dict(state_dict)
        self._position.load_state_dict(int(state_dict["samples"]), state_dict)

    def _open(self) -> TokenLoader:
        if self._loader is None:
            rank, size = replica(self.trainer)
            self._loader = TokenLoader(
                self.sources, rank=rank, size=size, **self._shape, **self._made, **self._opening, **self._stream
            )
        return self._loader

    def _evaluate(self, sources: str | dict[str, str] | None) -> EvaluationLoader:
        assert sources is not None
        rank, size = replica(self.trainer)
        return EvaluationLoader(
            sources, rank=rank, size=size, make=BatchMaker(**self._made), **self._shape, **self._opening
        )

    def _forget(self) -> None:
        """Stand at the first sample, for a Trainer that has done nothing yet."""
        if self._loader is not None:
            self._loader.close()
        self._loader = None
        self._position = Position()

    def _consumed(self) -> int:
        return self._position.consumed(self.trainer, self._open().samples_per_step)


class TokenStream:
    """The training batches as Lightning sees them: one stream that goes on from epoch to epoch.

    The data module keeps the position. To Lightning this loader shows an empty state of its own, because Lightning
    would give rank 0's loader state to every rank.
    """

    def __init__(self, loader: TokenLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        while not self.loader.exhausted:
            yield self.loader.next_batch()

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the state is the data module's."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take nothing: the state is the data module's."""


class SizedTokenStream(TokenStream):
    """A stream whose epochs have a length, which Lightning counts off."""

    def __len__(self) -> int:
        """Return the batches of an epoch."""
        return len(self.loader)


def _inherited(module: TokenDataModule, method: str) -> bool:
    return getattr(type(module), method) is getattr(TokenDataModule, method)
