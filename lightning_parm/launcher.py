"""How forked and spawned ranks start, and hand their weights to the process that started them."""

from __future__ import annotations

import gc
from typing import Any

from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher


class GarbageStaysBehind:
    """Stands before a launcher of Lightning's: the ranks it forks never collect what is this process's garbage.

    An earlier run's process group, for instance, would wait in them for threads that only this process has.
    """

    def launch(self, *args: Any, **kwargs: Any) -> Any:
        """Start the ranks and wait for them."""
        gc.freeze()
        try:
            return super().launch(*args, **kwargs)  # type: ignore[misc]
        finally:
            gc.unfreeze()


class WholeWeightsLauncher(GarbageStaysBehind, _MultiProcessingLauncher):
    """Sends whole weights from rank 0 to the parent; Lightning's own launcher would send rank 0's shards."""

    def _collect_rank_zero_results(self, trainer: Any, results: Any) -> Any:
        whole = trainer.strategy.whole_state_dict()
        trainer.lightning_module.state_dict = lambda *_, **__: whole  # this process is about to end
        return super()._collect_rank_zero_results(trainer, results)
