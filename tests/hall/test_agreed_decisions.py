"""What Lightning lets each rank decide, all ranks decide together: to end on SIGTERM, to validate by the clock."""

import os
import signal
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from hall.models import small_gpt
from hall.test_loop_features import BATCHES, EP2, Tokens, fitted, same_on_two_ranks
from hall.trainers import make_trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops import evaluation_loop, fit_loop, training_epoch_loop
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_parm import ParmStrategy

# Lightning's advice on runs this small is not under test; ranks inherit the filter.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    "interval", [timedelta(seconds=3), "00:00:00:03", {"seconds": 3}], ids=["delta", "text", "dict"]
)
def test_a_validation_by_time_is_that_of_all_ranks(interval: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(L.Callback):
        """One second a batch on the first rank, half a second on the other."""

        def __init__(self) -> None:
            self.batches, self.validated_after = 0, []

        def on_train_batch_end(self, *_: Any) -> None:
            self.batches += 1

        def on_validation_end(self, *_: Any) -> None:
            self.validated_after.append(self.batches)

    def rank_main(rank: int, world_size: int) -> list[int]:
        clock = Clock()
        told = SimpleNamespace(monotonic=lambda: clock.batches / (rank + 1))
        for loop in (training_epoch_loop, fit_loop, evaluation_loop):
            monkeypatch.setattr(loop, "time", told)
        fitted(rank, world_size, EP2, clock, val_check_interval=interval)
        return clock.validated_after

    assert same_on_two_ranks(rank_main) == [3, 6]


def test_sigterm_of_one_rank_ends_all_after_the_same_batch(tmp_path: Path) -> None:
    class Told(L.Callback):
        def __init__(self, batch: int, ranks: tuple[int, ...]) -> None:
            self.batch, self.ranks = batch, ranks

        def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == self.batch and trainer.global_rank in self.ranks:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_validation_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.state.fn == "validate":
                os.kill(os.getpid(), signal.SIGTERM)

    def rank_main(rank: int, world_size: int) -> list[int]:
        trained = []
        for batch in (1, BATCHES - 1):
            model = small_gpt()
            keep = ModelCheckpoint(tmp_path, filename="{step}", save_on_exception=True, every_n_epochs=9)
            with pytest.raises(SIGTERMException):
                fitted(rank, world_size, EP2, Told(batch, (1,)), keep, model=model, enable_checkpointing=True)
            trained.append(len(model.losses))
        trainer = make_trainer(rank, world_size, ParmStrategy(**EP2), callbacks=[Told(0, ())])
        with pytest.raises(SIGTERMException):
            trainer.validate(small_gpt(), Tokens(), verbose=False)
        return trained

    assert same_on_two_ranks(rank_main) == [3, BATCHES], "the batch after the signal is the last"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=3.ckpt", f"step={BATCHES}.ckpt"]
