"""FabricParmStrategy: the same training in a loop that the user writes, with Lightning's Fabric."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl, _validate_keys_for_strict_loading
from lightning.fabric.utilities.types import _PATH, _Stateful
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_parm.checkpoint.directory import is_sharded
from lightning_parm.checkpoint.fabric import by_keys, load_state, save_state
from lightning_parm.parallel.gradients import AgreedGradScaler, clip_by_global_norm, clip_by_value, global_norm
from lightning_parm.parallel.model import ParallelModel
from lightning_parm.parallel.sizes import SizedStrategy


class FabricParmStrategy(SizedStrategy, DDPStrategy):
    """:class:`~lightning_parm.ParmStrategy` for Fabric: ``Fabric(strategy="parm")`` or an instance.

    ``fabric.setup`` cuts the model, ``fabric.backward`` averages the gradients of every model that was set up (those
    within ``fabric.no_backward_sync`` excepted), ``fabric.clip_gradients`` clips by the norm over all ranks, and what
    is ``"auto"`` of the schedules is chosen after the first step of a model's optimizer.

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

    Raises:
        ValueError: If the sizes do not multiply to the number of ranks; in Fabric's constructor.

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
        schedule: Literal["auto", "baseline", "plain", "s1", "s2"] = "auto",
        transport: Literal["auto", "fused", "two_hop"] = "auto",
        chunks: int | Literal["auto"] = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        bucket_size_bytes: int = 25 * 2**20,
        calibrate: bool = True,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout, start_method=start_method)
        self.tensor_parallel_size = tensor_parallel_size
        self.expert_parallel_size = expert_parallel_size
        self.expert_shard_size = expert_shard_size
        self.schedule = schedule
        self.transport = transport
        self.chunks = chunks
        self.calibrate = calibrate
        self._save_distributed_checkpoint = save_distributed_checkpoint
        self._bucket_size_bytes = bucket_size_bytes
        self._models: dict[nn.Module, ParallelModel] = {}
        self._undecided: list[ParallelModel] = []  # models whose schedules are not chosen yet
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
        model = ParallelModel(module, self._topology, self.root_device, self.schedule, self.transport, self.chunks)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if parameter is not before[name]:
                self._replaced[before[name]] = parameter
        model.make_replicas_equal()
        if self.tensor_parallel_size > 1 and not self._models:
            # Peers hold the same activations, so they must draw the same dropout masks.
            torch.manual_seed(self.broadcast(torch.initial_seed()) + self._topology.data_parallel_rank)
        model.prepare_training(self._bucket_size_bytes, self.calibrate)
        model.before_batch()
        self._models[module] = model
        self._undecided.append(model)
        self._agree_on_overflows()
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Let an optimizer that was made before the model was cut follow its parameters."""
        saved = optimizer.state_dict() if optimizer.state else None
        for group in optimizer.param_groups:
            group["params"] = [self._replaced.get(parameter, parameter) for parameter in group["params"]]
        owner = self._owner(optimizer)
        if saved is not None and owner is not None:
            owner.load_optimizer_state(optimizer, saved)
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
        """Step; after a model's first one, choose its schedules for the sizes that its batch had."""
        output = super().optimizer_step(optimizer, **kwargs)
        for model in [model for model in self._undecided if model.placed(optimizer)]:
            model.before_batch()
            self._undecided.remove(model)
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
        self._undecided.clear()
        super().teardown()

    # ---------------------------------------------------------------- checkpoints

    @property
    def _sharded(self) -> bool:
        return self._save_distributed_checkpoint and self.world_size > 1

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The module's state: DTensors for a sharded checkpoint, else whole tensors on rank 0; every rank calls it."""
        model = self._models.get(module)
        if model is None:
            return super().get_module_state_dict(module)
        return model.state_dict() if self._sharded else model.whole_state_dict(keep=self.is_global_zero)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load whole or sharded tensors, keeping this rank's part."""
        model = self._models.get(module)
        if model is None:
            super().load_module_state_dict(module, state_dict, strict)
        else:
            model.load_state_dict(state_dict, strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state by parameter name, or as torch writes it for one file; every rank calls it."""
        model = self._owner(optimizer)
        if model is None:
            return super().get_optimizer_state(optimizer)
        if self._sharded:
            return model.optimizer_state(optimizer)
        return model.whole_optimizer_state(optimizer, keep=self.is_global_zero)

    def save_checkpoint(
        self,
        path: _PATH,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write a directory with every rank's part, or one file from rank 0, as ``ddp`` would."""
        if not self._sharded:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        converted = self._convert_stateful_objects_in_state(state, filter=filter or {})
        modules = [key for key in converted if isinstance(state[key], nn.Module)]
        optimizers = [key for key in converted if isinstance(state[key], Optimizer) and self._owner(state[key])]
        save_state(path, converted, modules, optimizers, self.broadcast, storage_options)

    def load_checkpoint(
        self,
        path: _PATH,
        state: nn.Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a file or a directory, whichever topology wrote it; gives what ``state`` does not ask for.

        Raises:
            KeyError: If ``strict`` and the checkpoint lacks something that ``state`` asks for.
        """
        wanted = state if isinstance(state, dict) else {}
        if is_sharded(path):
            owners = {key: self._owner(value) for key, value in wanted.items()}
            cut = {key: model.parameters_as_dtensors() for key, model in owners.items() if model is not None}
            checkpoint = load_state(path, cut, weights_only)
        else:
            checkpoint = by_keys(self.checkpoint_io.load_checkpoint(path, weights_only=weights_only))
        if isinstance(state, nn.Module | Optimizer):
            self._restore(state, checkpoint, strict)
            return {}
        _validate_keys_for_strict_loading(wanted.keys(), checkpoint.keys(), strict=strict)
        for key, value in list(wanted.items()):
            if key in checkpoint:
                saved = checkpoint.pop(key)
                if isinstance(value, _Stateful):
                    self._restore(value, saved, strict)
                else:
                    wanted[key] = saved
        return checkpoint

    def _restore(self, target: Any, saved: Any, strict: bool) -> None:
        if isinstance(target, nn.Module):
            self.load_module_state_dict(target, saved, strict)
        elif (owner := self._owner(target)) is not None:
            owner.load_optimizer_state(target, saved)
        else:
            target.load_state_dict(saved)


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
