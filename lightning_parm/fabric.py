"""FabricParmStrategy: the same training in a loop that the user writes, with Lightning's Fabric."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_parm.checkpoint.fabric import CheckpointingFabricStrategy
from lightning_parm.parallel.gradients import AgreedGradScaler, clip_by_global_norm, clip_by_value, global_norm
from lightning_parm.parallel.model import ParallelModel
from lightning_parm.parallel.placement import check_groups
from lightning_parm.parallel.sizes import SizedStrategy, check_data_parallel


class FabricParmStrategy(SizedStrategy, CheckpointingFabricStrategy):
    """:class:`~lightning_parm.ParmStrategy` for Fabric: ``Fabric(strategy="parm")`` or an instance.

    ``fabric.setup`` cuts the model, ``fabric.backward`` averages the gradients of every model that was set up (those
    within ``fabric.no_backward_sync`` excepted), ``fabric.clip_gradients`` clips by the norm over all ranks, and what
    is ``"auto"`` of the schedules is chosen after the first step of a model's optimizer.

    With ``async_checkpoint`` the end of the process waits for saves on their way, but can only report one that fails:
    a script that must know calls ``fabric.strategy.finish_saves()``.

    Args:
        tensor_parallel_size: As in :class:`~lightning_parm.ParmStrategy`, like all that follow.
        expert_parallel_size: N_EP; ``"auto"`` follows from the experts of each model.
        expert_shard_size: N_ESP.
        schedule: Where communication is placed.
        transport: How rows travel to the shards of an expert.
        chunks: Pieces in which a layer's rows travel.
        save_distributed_checkpoint: Let ``fabric.save`` write a directory with every rank's part instead of one file.
        process_group_backend: Backend of the default process group; None takes the device's own.
        timeout: How long a collective may take before its rank gives up.
        start_method: How processes are started.
        bucket_size_bytes: Gradients are averaged in buckets of this size while backward runs.
        calibrate: Whether what is ``"auto"`` is chosen by a cost model with measured constants.
        data_parallel: Whether data-parallel ranks hold replicas, or each a part of what they hold otherwise.
        async_checkpoint: Let ``fabric.save`` write directories on a thread.
        verify_steps: Optimizer steps for which each of the two schedules that were predicted best is timed, with all
            batches that they accumulate, before the faster is kept; 0 trusts the prediction.

    Raises:
        ValueError: If the sizes do not multiply to the number of ranks, or one argument excludes another; in Fabric's
            constructor. If ``data_parallel`` is unknown.

    Example:
        >>> from lightning.fabric import Fabric
        >>> from lightning_parm import MoE
        >>> fabric = Fabric(accelerator="cpu", devices=4, strategy=FabricParmStrategy(tensor_parallel_size=2))
        >>> fabric.strategy.tensor_parallel_size
        2
    """

    _topology_exists = "once fabric.launch() has set up the processes."

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
        self._models: dict[nn.Module, ParallelModel] = {}
        self._paces: dict[ParallelModel, Optimizer] = {}  # whose steps count a model's batches
        self._local = _LocalGradients()
        self._backward_sync_control = self._local

    def setup_environment(self) -> None:
        """Start the process groups."""
        super().setup_environment()
        self._topology = self._resolve(self.world_size, self.global_rank)
        self._replaced = WeakTensorKeyDictionary()  # parameter before the cut -> parameter after it

    # ---------------------------------------------------------------- models and optimizers

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """Cut the model in place, make replicas equal, and watch its gradients; it is not wrapped."""
        self._topology = self._resolve(self.world_size, self.global_rank, module)
        before = dict(module.named_parameters(remove_duplicate=False))
        model = ParallelModel(
            module,
            self._topology,
            self.root_device,
            self.schedule,
            self.transport,
            self.chunks,
            self.data_parallel,
        )
        model.make_replicas_equal()
        self._note_replaced(before, module)
        if self.tensor_parallel_size > 1 and not self._models:
            # Peers hold the same activations, so they must draw the same dropout masks.
            torch.manual_seed(self.broadcast(torch.initial_seed()) + self._topology.data_parallel_rank)
        model.prepare_training(self._bucket_size_bytes, self.calibrate, self.verify_steps)
        model.before_batch()
        self._models[module] = model
        self._agree_on_overflows()
        return module

    def _note_replaced(self, before: dict[str, nn.Parameter], module: nn.Module) -> None:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if parameter is not before[name]:
                self._replaced[before[name]] = parameter

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Let an optimizer that was made before the model was cut follow its parameters.

        Raises:
            ValueError: If its fused or foreach kernels are to take parameters that are spread in different ways.
        """
        saved = optimizer.state_dict() if optimizer.state else None
        for module, model in self._models.items():
            before = dict(module.named_parameters(remove_duplicate=False))  # some gathered, by an evaluation
            self._note_replaced(before, model.module)
        for group in optimizer.param_groups:
            group["params"] = [self._replaced.get(parameter, parameter) for parameter in group["params"]]
        owner = self._owner(optimizer)
        if saved is not None and owner is not None:
            owner.load_optimizer_state(optimizer, saved)
        check_groups(optimizer)
        for model in self._models.values():
            if model.placed(optimizer):
                self._paces.setdefault(model, optimizer)
        return optimizer

    def _owner(self, value: Any) -> ParallelModel | None:
        """The model that ``value`` is, or whose parameters it optimises."""
        if isinstance(value, Optimizer):
            return next((model for model in self._models.values() if model.placed(value)), None)
        return self._models.get(value) if isinstance(value, nn.Module) else None

    def _agree_on_overflows(self) -> None:
        """A gradient scaler must skip a step on all ranks or on none."""
        scaler = getattr(self.precision, "scaler", None)
        if isinstance(scaler, torch.amp.GradScaler) and not isinstance(scaler, AgreedGradScaler):
            self.precision.scaler = AgreedGradScaler(scaler, self.root_device.type)  # type: ignore[attr-defined]

    # ---------------------------------------------------------------- gradients

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Backward, with gradients averaged over ranks when it returns."""
        with ExitStack() as stack:
            for each, model in self._models.items():
                stack.enter_context(model.averaging(each not in self._local.modules))
            super().backward(tensor, module, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step; after a model's first one, choose its schedules for the sizes that its batch had, then time them."""
        for model in self._models.values():
            model.give_back()  # what an evaluation has gathered would keep the values from before the step
        output = super().optimizer_step(optimizer, **kwargs)
        for model, pace in self._paces.items():
            if pace is optimizer:
                model.before_batch()
        return output

    def grad_norm(self, optimizer: Optimizer | None = None, norm_type: float = 2.0) -> Tensor:
        """Norm of the gradients over all ranks, equal on each; every rank must call it.

        Args:
            optimizer: Count its parameters only.
            norm_type: Order of the norm, ``float("inf")`` for the largest absolute value.
        """
        return global_norm(self._placed(optimizer), norm_type, self.root_device)

    def _placed(self, optimizer: Optimizer | None) -> list[Any]:
        return [pair for model in self._models.values() for pair in model.placed(optimizer)]

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the gradients of ``optimizer`` by their norm over all ranks, which is returned.

        Raises:
            RuntimeError: If the norm is infinite or not a number; it is on every rank then.
        """
        self.precision.unscale_gradients(optimizer)
        norm = clip_by_global_norm(self._placed(optimizer), max_norm, norm_type, self.root_device)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(
                f"The norm of the gradients is {float(norm)}, so they cannot be clipped. Find the batch that causes "
                "it, or pass error_if_nonfinite=False to go on."
            )
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float | int) -> None:
        """Clamp the gradients of ``optimizer``."""
        self.precision.unscale_gradients(optimizer)
        clip_by_value(self._placed(optimizer), clip_val)

    def teardown(self) -> None:
        """Leave the models without hooks, so that another strategy may take them."""
        for model in self._models.values():
            model.release()
        self._models.clear()
        self._paces.clear()
        super().teardown()


class _LocalGradients(_BackwardSyncControl):
    """The modules inside ``fabric.no_backward_sync``, whose gradients stay local and add up."""

    def __init__(self) -> None:
        self.modules: set[nn.Module] = set()

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return self._within(module) if enabled else nullcontext()

    @contextmanager
    def _within(self, module: nn.Module) -> Generator[None, None, None]:
        self.modules.add(module)
        try:
            yield
        finally:
            self.modules.discard(module)
