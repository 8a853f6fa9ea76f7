"""How spawned and forked ranks hand their weights to the process that started them."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher


class WholeWeightsLauncher(_MultiProcessingLauncher):
    """Sends whole weights from rank 0 to the parent; Lightning's own launcher would send rank 0's shards."""

    def _collect_rank_zero_results(self, trainer: Any, results: Any) -> Any:
        whole = trainer.strategy.whole_state_dict()
        trainer.lightning_module.state_dict = lambda *_, **__: whole  # this process is about to end
        return super()._collect_rank_zero_results(trainer, results)
