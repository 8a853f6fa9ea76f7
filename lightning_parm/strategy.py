"""ParmStrategy: trains a LightningModule with MoE layers over data, model, expert and expert-sharding parallelism."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _sync_ddp_if_available
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from lightning_parm.checkpoint.trainer import CheckpointingStrategy
from lightning_parm.decisions import AgreedDecisions
from lightning_parm.launcher import WholeWeightsLauncher
from lightning_parm.moe import Topology
from lightning_parm.parallel.companions import averaged_copies, count_duplicates_once, pack_averages, unpack_averages
from lightning_parm.parallel.gradients import AgreedGradScaler, clip_by_value
from lightning_parm.parallel.model import ParallelModel
from lightning_parm.parallel.placement import check_groups
from lightning_parm.parallel.sizes import SizedStrategy, check_data_parallel


class ParmStrategy(SizedStrategy, CheckpointingStrategy):
    """Trains MoE models under Parm's communication schedules; a dense model trains as under ``ddp``.

    Every :class:`~lightning_parm.MoE` layer of the LightningModule is found and cut over the ranks; dense layers are
    cut over a tensor-parallel group where the module has a ``tensor_parallel_plan`` or does it in ``configure_model``
    with ``self.device_mesh["tensor_parallel"]``. Nothing of this shows in the user's code.

    Args:
        tensor_parallel_size: N_MP, ranks that share the dense layers and hold the same tokens.
        expert_parallel_size: N_EP, ranks over which whole experts are spread. ``"auto"`` takes the largest size that
            divides the ranks left and the number of experts of every layer.
        expert_shard_size: N_ESP, ranks over which the hidden dim of each expert is cut. ``"auto"`` takes N_MP.
        schedule: Where communication is placed, the same for every layer.
        transport: How rows travel to the shards of an expert.
        chunks: Pieces in which a layer's rows travel, so that communication and computation overlap.
        save_distributed_checkpoint: Write a directory with every rank's part instead of one file gathered on rank 0.
        process_group_backend: Backend of the default process group; None takes the device's own.
        timeout: How long a collective may take before its rank gives up.
        start_method: How processes are started.
        bucket_size_bytes: Gradients are averaged in buckets of this size while backward runs.
        calibrate: Whether what is ``"auto"`` is chosen by a cost model with constants measured on the running groups,
            in a few seconds after the first batch and kept for later runs. If not, layers run ``s1``, ``fused``.
        data_parallel: Whether data-parallel ranks hold replicas, or each a part of the parameters, gradients and
            optimizer state: of dense layers over N_DP ranks, of experts over N_EDP.
        async_checkpoint: Write directories on a thread, so that training waits only while they are copied to the CPU.
        verify_steps: Batches for which each of the two schedules that were predicted best is timed before the faster
            is kept; 0 trusts the prediction.

    Raises:
        ValueError: If the sizes do not multiply to the number of ranks; in the Trainer's constructor, before any
            process is started. If ``data_parallel`` is unknown.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(
        ...     strategy=ParmStrategy(tensor_parallel_size=2), accelerator="cpu", devices=4, logger=False
        ... )
        >>> trainer.strategy.tensor_parallel_size
        2
    """

    strategy_name = "parm"
    _topology_exists = (
        "once the Trainer has set up its processes: read it in configure_model() or later, inside trainer.fit, "
        "validate, test or predict."
    )

    def __init__(
        self,
        tensor_parallel_size: int = 1,
        expert_parallel_size: int | Literal["auto"] = "auto",
        expert_shard_size: int | Literal["auto"] = "auto",
        schedule: Literal["auto", "baseline", "plain", "s0", "s1", "s2"] = "auto",
        transport: Literal["auto", "fused", "two_hop"] = "auto",
        chunks: int | Literal["auto"] = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        bucket_size_bytes: int = 25 * 2**20,
        calibrate: bool = True,
        data_parallel: Literal["replicate", "shard"] = "replicate",
        async_checkpoint: bool = False,
        verify_steps: int = 0,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout, start_method=start_method)
        self.tensor_parallel_size = tensor_parallel_size
        self.expert_parallel_size = expert_parallel_size
        self.expert_shard_size = expert_shard_size
        self.schedule = schedule
        self.transport = transport
        self.chunks = chunks
        self.calibrate = calibrate
        self.verify_steps = verify_steps
        self.data_parallel = check_data_parallel(data_parallel)
        self._save_distributed_checkpoint = save_distributed_checkpoint
        self._async_checkpoint = async_checkpoint
        self._bucket_size_bytes = bucket_size_bytes
        self._parallel: ParallelModel | None = None
        self._averages: list[ParallelModel] = []
        self._decisions: AgreedDecisions | None = None
        self._reduce_gradients = True

    # ---------------------------------------------------------------- sizes and processes

    def _resolve(self, world_size: int, rank: int, module: nn.Module | None = None) -> Topology:
        return super()._resolve(world_size, rank, self.lightning_module if module is None else module)

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._start_method != "popen":
            self._launcher = WholeWeightsLauncher(self, start_method=self._start_method)

    @property
    def launcher(self) -> _Launcher | None:
        """The launcher; Lightning asks for it last before it starts processes, so sizes are checked here."""
        if self.lightning_module is not None and self._topology is None:
            self._resolve(self.num_nodes * self.num_processes, rank=0)
        return self._launcher

    def setup_environment(self) -> None:
        """Start the process groups, and give the module its ``device_mesh``."""
        super().setup_environment()
        self._topology = self._resolve(self.world_size, self.global_rank)
        module = self.lightning_module
        if module is not None:
            module._device_mesh = self._topology.dense_mesh(self.root_device.type)

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Reduce over ``group``, by default over data-parallel ranks: tensor-parallel peers hold duplicates."""
        if not isinstance(tensor, Tensor):
            return tensor
        if group is None and self.topology.tensor_parallel_size > 1:
            group = self.topology.group("data_parallel")
            if group is None:
                return tensor
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks have decided so, or any of them; tensor-parallel peers are asked too."""
        vote = torch.tensor(int(decision), device=self.root_device)
        if dist.is_initialized():
            dist.all_reduce(vote, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(vote)

    # ---------------------------------------------------------------- the model

    @property
    def parallel_model(self) -> ParallelModel:
        """The module cut over the ranks; the first call of a run cuts it."""
        if self._parallel is None:
            module = self.lightning_module
            assert module is not None
            trainer: Any = module._trainer
            copies = () if trainer is None else averaged_copies(trainer.callbacks)
            self._parallel, *self._averages = (
                ParallelModel(
                    model,
                    self.topology,
                    self.root_device,
                    self.schedule,
                    self.transport,
                    self.chunks,
                    self.data_parallel,
                )
                for model in (module, *copies)
            )
        return self._parallel

    def setup(self, trainer: Any) -> None:
        """Cut the model, make replicas equal, and build optimizers and gradient buckets."""
        module = self.lightning_module
        assert self.accelerator is not None
        assert module is not None
        self.accelerator.setup(trainer)
        self._decisions = AgreedDecisions(trainer, lambda decision: self.reduce_boolean_decision(decision, all=False))
        fitting = trainer.state.fn == TrainerFn.FITTING
        parallel = self.parallel_model
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(module)
        self.model = self.precision_plugin.convert_module(self.model or module)
        self.model_to_device()
        for copy in self._averages:
            copy.module.to(self.root_device)  # callbacks make them before the model moves; collectives want both there
        for model in (parallel, *self._averages):
            model.make_replicas_equal()
        if self.topology.world_size > 1:
            # Tensor-parallel peers hold the same activations, so they must draw the same dropout masks; others do not.
            torch.manual_seed(self.broadcast(torch.initial_seed()) + self.topology.data_parallel_rank)
        if self.topology.tensor_parallel_size > 1:
            count_duplicates_once(module, self.topology.dense_mesh(self.root_device.type).get_group("data_parallel"))
        if fitting:
            parallel.prepare_training(self._bucket_size_bytes, self.calibrate, self.verify_steps)
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                check_groups(optimizer)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Write a directory with every rank's part, or one file from rank 0; averaged weights included."""
        if self._averages and "current_model_state" in checkpoint:
            checkpoint = pack_averages(checkpoint, self._averages[0], self._sharded, self.is_global_zero)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a file or a directory, whichever topology wrote it; averaged weights included."""
        return unpack_averages(super().load_checkpoint(checkpoint_path, weights_only), self.parallel_model)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Before the second batch, choose the schedules for the sizes that the first one had."""
        assert self._decisions is not None
        self._decisions.before_batch()
        self.parallel_model.before_batch()

    def on_train_end(self) -> None:
        """End the process after the fit if any rank was told to end in its last batch or validation."""
        assert self._decisions is not None
        self._decisions.after_fit()

    def on_validation_start(self) -> None:
        """Evaluate with the first rank's buffers everywhere, as ``ddp`` does."""
        self.parallel_model.make_buffers_equal()

    on_test_start = on_predict_start = on_validation_start

    def teardown(self) -> None:
        """Leave the module without hooks, so that another Trainer may take it."""
        if self._parallel is not None:
            self._parallel.release()
            self._parallel, self._averages = None, []
        super().teardown()

    # ---------------------------------------------------------------- gradients

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Backward, with gradients averaged over ranks before ``on_after_backward`` returns them to the user."""
        assert self.lightning_module is not None
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        with self.parallel_model.averaging(self._reduce_gradients):
            self.precision_plugin.backward(closure_loss, self.lightning_module, optimizer, *args, **kwargs)
        return self.precision_plugin.post_backward(closure_loss, self.lightning_module)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Within it gradients stay local and add up, for accumulation and manual optimisation."""
        before, self._reduce_gradients = self._reduce_gradients, False
        try:
            yield
        finally:
            self._reduce_gradients = before

    @property
    def precision_plugin(self) -> Precision:
        """The precision plugin, clipping by the norm of the whole model instead of this rank's part."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = precision_plugin
        if precision_plugin is not None:
            precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]
            precision_plugin.clip_grad_by_value = self._clip_grad_by_value  # type: ignore[method-assign]

    def setup_precision_plugin(self) -> None:
        """Connect the precision plugin; a gradient scaler must skip a step on all ranks or on none."""
        plugin = self.precision_plugin
        scaler = getattr(plugin, "scaler", None)
        if isinstance(scaler, torch.amp.GradScaler):
            plugin.scaler = AgreedGradScaler(scaler, self.root_device.type)  # type: ignore[attr-defined]
        super().setup_precision_plugin()

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Norm of the gradients of the whole model, equal on every rank; every rank must call it.

        Args:
            norm_type: Order of the norm, ``float("inf")`` for the largest absolute value.
        """
        return self.parallel_model.grad_norm(norm_type)

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        if clip_val > 0:
            self.parallel_model.clip_gradients(clip_val, optimizer)

    def _clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        if clip_val > 0:
            clip_by_value(self.parallel_model.placed(optimizer), clip_val)
