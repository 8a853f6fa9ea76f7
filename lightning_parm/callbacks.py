"""What to watch while a mixture of experts trains: expert load, throughput, and where the samples come from."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import Profiler
from torch import Tensor

from lightning_parm.datamodule import TokenDataModule
from lightning_parm.metrics import ExpertLoad
from lightning_parm.parallel.placement import moe_layers


def _logs_now(trainer: pl.Trainer) -> bool:
    """Whether Lightning hands this step's values to the loggers, as its own monitors decide it."""
    return not trainer.fit_loop._should_accumulate() and trainer._logger_connector.should_update_logs


def _over_world(trainer: pl.Trainer, tensor: Tensor, operation: Any) -> Tensor:
    """Reduce a copy of ``tensor`` over every rank, tensor-parallel peers included."""
    tensor = tensor.clone()
    if trainer.world_size > 1:
        dist.all_reduce(tensor, op=operation)
    return tensor


def _data_parallel(trainer: pl.Trainer) -> tuple[int, int]:
    """Return (rank, size) among the ranks that read different data."""
    sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {"rank": 0, "num_replicas": 1}
    return sampler["rank"], sampler["num_replicas"]


class ExpertLoadMonitor(Callback):
    """Logs how evenly the tokens are spread over the experts, with one reduction a log interval for all layers.

    Over the steps since the last log: ``moe/load_max_over_mean``, the mean over layers of the fullest expert's load
    relative to a fair share; ``moe/maxvio``, the excess ``max/mean - 1`` of the worst layer; ``moe/dead_experts``, how
    many experts of all layers saw no token; ``moe/dropped_frac``, the share of the choices that capacity cut off; and
    ``moe/balance_loss`` and ``moe/z_loss``, means over layers, batches and ranks, before their weights (1 is a balanced
    load). On a module without :class:`~lightning_parm.MoE` layers it does nothing.

    The counts of the whole run are in :attr:`total` and in every checkpoint, with the schedule of each layer.

    Args:
        per_layer: Log ``moe/load_max_over_mean/<layer>`` for every layer as well.

    Example:
        >>> monitor = ExpertLoadMonitor(per_layer=True)
        >>> monitor.total is None  # until training begins
        True
    """

    def __init__(self, per_layer: bool = False) -> None:
        self.per_layer = per_layer
        self.total: ExpertLoad | None = None
        self._recent: ExpertLoad | None = None
        self._means: list[Tensor] = []
        self._layers: dict[str, Any] = {}
        self._restored: dict[str, list[float]] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the MoE layers."""
        self._layers = dict(moe_layers(pl_module))
        if not self._layers:
            return
        sizes = [layer.num_experts for layer in self._layers.values()]
        # Whole sums are made here, by one reduction; the metrics must not add the ranks up a second time.
        self._recent = ExpertLoad(len(sizes), sizes, sync_on_compute=False).to(pl_module.device)
        self.total = ExpertLoad(len(sizes), sizes, sync_on_compute=False).to(pl_module.device)
        if [(name, len(counts)) for name, counts in self._restored.items()] == list(
            zip(self._layers, sizes, strict=True)
        ):
            self.total.update([torch.tensor(c, device=pl_module.device) for c in self._restored.values()])

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Count the batch, and log when it is time."""
        if self._recent is None or self.total is None:
            return
        self._recent.update([layer.tokens_per_expert for layer in self._layers.values()])
        self._means.append(self._of_batch())
        if not _logs_now(trainer):
            return
        counts = self._recent.counts
        sums = _over_world(trainer, torch.cat([counts.flatten(), torch.stack(self._means).sum(0)]), dist.ReduceOp.SUM)
        self._recent.counts, (dropped, balance, z, parts) = sums[:-4].view_as(counts), sums[-4:]
        self._means.clear()
        self.total.update(self._recent.counts)
        load = self._recent.compute()
        routed = self._recent.counts.sum()
        self._recent.reset()
        largest = load["load_max_over_mean"].reshape(-1)  # torchmetrics squeezes the result of a single layer
        values = {
            "moe/load_max_over_mean": largest.mean(),
            "moe/maxvio": load["maxvio"].max(),
            "moe/dead_experts": load["dead_experts"].sum().float(),
            "moe/dropped_frac": (dropped / routed.clamp(min=1)).float(),
            "moe/balance_loss": (balance / parts).float(),
            "moe/z_loss": (z / parts).float(),
        }
        if self.per_layer:
            values |= {f"moe/load_max_over_mean/{name}": x for name, x in zip(self._layers, largest, strict=True)}
        pl_module.log_dict(values, batch_size=1)

    def _of_batch(self) -> Tensor:
        """Choices that were dropped, both losses, and how many layers they are sums over; no host sync."""
        layers = self._layers.values()
        dropped = [layer.dropped_share * layer.tokens_per_expert.sum() for layer in layers]
        rows = [dropped, [layer.balance_loss for layer in layers], [layer.z_loss for layer in layers]]
        parts = torch.full_like(dropped[0], len(dropped), dtype=torch.float64)
        return torch.stack([*(torch.stack(row).double().sum() for row in rows), parts])

    def state_dict(self) -> dict[str, Any]:
        """Tokens of each expert up to the last log, and the schedule, by layer."""
        if self.total is None:
            return {}
        layers = zip(self._layers.items(), self.total.counts, strict=True)
        return {
            name: {
                "tokens_per_expert": counts[: layer.num_experts].tolist(),
                "schedule": f"{layer.schedule} {layer.transport} x{layer.chunks}",
            }
            for (name, layer), counts in layers
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting from a checkpoint, if its layers are those of the module."""
        self._restored = {name: layer["tokens_per_expert"] for name, layer in state_dict.items()}


class _FetchClock:
    """Adds up the seconds in which the training loop waits for its next batch, by hearing the profiler's events."""

    _EVENT = "train_dataloader_next"

    def __init__(self, profiler: Profiler) -> None:
        self.seconds = 0.0
        self._profiler, self._began = profiler, 0.0
        start, stop = profiler.start, profiler.stop

        def heard_start(action_name: str) -> None:
            start(action_name)
            if action_name.endswith(self._EVENT):
                self._began = time.perf_counter()

        def heard_stop(action_name: str) -> None:
            if action_name.endswith(self._EVENT):
                self.seconds += time.perf_counter() - self._began
            stop(action_name)

        profiler.start, profiler.stop = heard_start, heard_stop  # type: ignore[method-assign]

    def detach(self) -> None:
        """Give the profiler its own methods back."""
        del self._profiler.start, self._profiler.stop


class ThroughputMonitor(Callback):
    """Logs tokens per second of the whole run, and the share of the time spent waiting for data.

    ``throughput/tokens_per_second`` counts every data-parallel rank and each token once; ``data/wait_s`` is how long
    the slowest rank waited for batches since the last log and ``data/wait_frac`` its share of the time. Validation is
    left out of the time, checkpoints are not.

    Args:
        key: The tensor of a batch whose elements are the tokens; equal in size on every rank.

    Raises:
        ValueError: A batch has no such tensor.

    Example:
        >>> ThroughputMonitor().key
        'input_ids'
    """

    def __init__(self, key: str = "input_ids") -> None:
        self.key = key
        self._clock: _FetchClock | None = None
        self._tokens = 0
        self._since = self._paused = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clocks."""
        self._clock = _FetchClock(trainer.profiler)  # type: ignore[attr-defined]
        self._tokens, self._since = 0, time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch, and log when it is time."""
        if not isinstance(batch, Mapping) or not isinstance(batch.get(self.key), Tensor):
            has = f"has the keys {sorted(batch)}" if isinstance(batch, Mapping) else f"is a {type(batch).__name__}"
            raise ValueError(
                f"ThroughputMonitor counts the tokens of batch[{self.key!r}], but the batch {has}: "
                "name the tensor of token ids with ThroughputMonitor(key=...)."
            )
        assert self._clock is not None
        self._tokens += batch[self.key].numel() * _data_parallel(trainer)[1]
        if not _logs_now(trainer):
            return
        now = time.perf_counter()
        seconds = max(now - self._since, 1e-9)
        waited = torch.tensor(self._clock.seconds, device=pl_module.device, dtype=torch.float32)
        waited = _over_world(trainer, waited, dist.ReduceOp.MAX)
        values: dict[str, float | Tensor] = {
            "throughput/tokens_per_second": self._tokens / seconds,
            "data/wait_s": waited,
            "data/wait_frac": waited / seconds,
        }
        pl_module.log_dict(values, batch_size=1)
        self._tokens, self._since, self._clock.seconds = 0, now, 0.0

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock."""
        self._paused = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the clock go on."""
        self._since += time.perf_counter() - self._paused

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave the profiler as it was."""
        self._detach()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave the profiler as it was; Lightning calls no teardown then."""
        self._detach()

    def _detach(self) -> None:
        if self._clock is not None:
            self._clock.detach()
            self._clock = None


class DataMonitor(Callback):
    """Logs how many samples each source of a :class:`~lightning_parm.TokenDataModule` has given, and its share.

    For every source of the mix: ``data/samples/<name>``, samples consumed since the run began, on all ranks and before
    every restart; ``data/mix_actual/<name>``, its share of them; ``data/mix_target/<name>``, the share asked for now;
    ``data/epoch/<name>``, how often it has been read through. With another data module it does nothing.

    Args:
        record_samples: Also write which samples each rank was given, with a checksum of each one's tokens: a line of
            JSON a batch in ``<log dir>/samples/rank-<rank>.jsonl``. It is an audit of a run, and proves a resume exact.

    Example:
        >>> DataMonitor(record_samples=True).record_samples
        True
    """

    def __init__(self, record_samples: bool = False) -> None:
        self.record_samples = record_samples
        self._file: TextIO | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open this rank's record."""
        if self.record_samples:
            folder = Path(trainer.log_dir or trainer.default_root_dir) / "samples"
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"rank-{trainer.global_rank:05d}.jsonl"
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed in teardown

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the batch, and log when it is time."""
        if self._file is not None and isinstance(batch, Mapping) and "sample_index" in batch:
            line = {
                "batch": trainer.fit_loop.total_batch_idx,
                "data_parallel_rank": _data_parallel(trainer)[0],
                "sample_index": batch["sample_index"].tolist(),
                "crc32": [zlib.crc32(row.numpy().tobytes()) for row in batch["input_ids"].cpu()],
            }
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, TokenDataModule) or not _logs_now(trainer):
            return
        samples = data.samples_per_source()
        total = sum(samples.values())
        weights = data.weights_per_source()
        values: dict[str, float] = {}
        for name, count in samples.items():
            values[f"data/samples/{name}"] = float(count)
            values[f"data/mix_actual/{name}"] = count / max(1, total)
            values[f"data/mix_target/{name}"] = weights[name] / sum(weights.values())
        values |= {f"data/epoch/{name}": epochs for name, epochs in data.epochs_per_source().items()}
        pl_module.log_dict(values, batch_size=1)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Close the record."""
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Close the record; Lightning calls no teardown then."""
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
