"""What lives beside a model in a Trainer and must be cut or counted like it: averaged copies, and metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_parm.metrics import ExpertLoad
from lightning_parm.parallel.model import ParallelModel
from lightning_parm.parallel.state import CURRENT, full_tensors, split_current


def averaged_copies(callbacks: Iterable[Callback]) -> Iterator[nn.Module]:
    """The copies of the whole model that Lightning's WeightAveraging and StochasticWeightAveraging have made."""
    for callback in callbacks:
        copy: Any = getattr(callback, "_average_model", None)
        if isinstance(copy, nn.Module):
            yield copy.module if isinstance(copy, AveragedModel) else copy


def pack_averages(checkpoint: dict[str, Any], average: ParallelModel, sharded: bool, keep: bool) -> dict[str, Any]:
    """A checkpoint that WeightAveraging has put its copy into, ready to be written like that of a model.

    The callback puts this rank's part of the averages in place of the model's state, and that one under a key of its
    own. In a directory both are one state, the latter with the key as a prefix. Every rank must call it.

    Args:
        checkpoint: Lightning's.
        average: The copy, cut.
        sharded: Whether a directory is written.
        keep: Whether this rank writes where it is a file.
    """
    state = average.as_dtensors(checkpoint["state_dict"])
    if not sharded:
        return {**checkpoint, "state_dict": full_tensors(state.items(), keep)}
    state |= {f"{CURRENT}.{name}": value for name, value in checkpoint[CURRENT].items()}
    return {**{key: value for key, value in checkpoint.items() if key != CURRENT}, "state_dict": state}


def unpack_averages(checkpoint: dict[str, Any], model: ParallelModel) -> dict[str, Any]:
    """The reverse, with this rank's part of each state, for the callback to load."""
    averages, current = split_current(checkpoint["state_dict"])
    current = current or checkpoint.get(CURRENT, {})
    if not current:
        return checkpoint
    return {**checkpoint, "state_dict": model.cut(averages), CURRENT: model.cut(current)}


class _Gather:
    """Gathers a metric's state over data-parallel ranks; a copy of it is itself, for groups cannot be copied."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, state: Tensor, group: Any = None) -> list[Tensor]:
        return gather_all_tensors(state, self._group)

    def __deepcopy__(self, memo: Any) -> _Gather:
        return self


def count_duplicates_once(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Let the torchmetrics of ``module`` add up data-parallel ranks only: tensor-parallel peers see the same batches.

    Metrics with a group or a gathering function of their own keep it.
    :class:`~lightning_parm.metrics.ExpertLoad` keeps adding up all ranks, which each count their own share of tokens.

    Args:
        module: Any module.
        group: The data-parallel ranks, one or more.
    """
    for metric in module.modules():
        if not isinstance(metric, Metric) or isinstance(metric, ExpertLoad) or metric.process_group is not None:
            continue
        if metric.dist_sync_fn is None or isinstance(metric.dist_sync_fn, _Gather):
            metric.dist_sync_fn = _Gather(group)
