"""Times two settings of a model's MoE layers on real batches and keeps the faster, on all ranks alike."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_parm.moe import MoE
from lightning_parm.moe.prediction import Candidate

log = logging.getLogger("lightning.pytorch")


class Trial:
    """Alternates between two settings from one batch to the next; neither changes a result, so training goes on.

    The order is that of Thue and Morse, A B B A B A A B ...: where every second or fourth batch does more, as with
    gradient accumulation, both settings get the same share of those.

    Args:
        layers: The MoE layers.
        settings: What each layer runs in the one setting and in the other.
        steps: Timed batches of each setting; one more of each comes before and is not counted.
        device: Where this rank computes.
    """

    def __init__(
        self,
        layers: Sequence[MoE],
        settings: tuple[Sequence[Candidate], Sequence[Candidate]],
        steps: int,
        device: torch.device,
    ) -> None:
        self._layers = layers
        self._settings = settings
        self._device = device
        self._order = [0, 1] + [bin(step).count("1") % 2 for step in range(2 * steps)]
        self._batches = 0
        self._times: tuple[list[float], list[float]] = ([], [])
        self._started = 0.0
        self._begin()

    def before_batch(self) -> bool:
        """Call before every batch but the first; says whether the trial is over, and the faster setting kept."""
        ended = self._now()
        if self._batches >= 2:
            self._times[self._order[self._batches]].append(ended - self._started)
        self._batches += 1
        if self._batches < len(self._order):
            self._begin()
            return False
        slowest = torch.tensor([statistics.median(times) for times in self._times], device=self._device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)  # the same numbers everywhere, hence the same decision
        first, second = slowest.tolist()
        self._set(int(second < first))
        self._report(first, second)
        return True

    def _begin(self) -> None:
        self._set(self._order[self._batches])
        self._started = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _set(self, index: int) -> None:
        for layer, candidate in zip(self._layers, self._settings[index], strict=True):
            layer.schedule, layer.transport, layer.chunks = candidate  # type: ignore[assignment]

    @rank_zero_only
    def _report(self, first: float, second: float) -> None:
        names = [", ".join(sorted({str(candidate) for candidate in setting})) for setting in self._settings]
        log.info(
            f"Timed on {len(self._times[0])} batches each: {names[0]} {1e3 * first:.2f} ms, "
            f"{names[1]} {1e3 * second:.2f} ms a batch; keeping {names[int(second < first)]}."
        )
