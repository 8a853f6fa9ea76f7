"""What FabricParmStrategy does in ``fabric.save`` and ``fabric.load``, and what a directory of Fabric's holds."""

from __future__ import annotations

import atexit
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.fabric.strategies.strategy import _validate_keys_for_strict_loading
from lightning.fabric.utilities.types import _PATH, _Stateful
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parm.checkpoint.background import BackgroundSaves, check_saves
from lightning_parm.checkpoint.directory import is_sharded, load_optimizer_tensors, load_sharded
from lightning_parm.checkpoint.save import ShardedSave
from lightning_parm.launcher import GarbageStaysBehind
from lightning_parm.parallel.model import ParallelModel


class CheckpointingFabricStrategy(DDPStrategy):
    """The part of :class:`~lightning_parm.fabric.FabricParmStrategy` that saves and loads directories and files."""

    _save_distributed_checkpoint: bool = True
    _async_checkpoint: bool = False
    _background: BackgroundSaves | None = None

    @abstractmethod
    def _owner(self, value: Any) -> ParallelModel | None:
        """The model that ``value`` is, or whose parameters it optimises."""

    def _configure_launcher(self) -> None:
        check_saves(self, "FabricParmStrategy", "Fabric")
        super()._configure_launcher()
        if self._start_method != "popen":
            self._launcher = SavedLauncher(self, start_method=self._start_method)

    @property
    def _sharded(self) -> bool:
        return self._save_distributed_checkpoint and self.world_size > 1

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The module's state: DTensors for a sharded checkpoint, else whole tensors on rank 0; every rank calls it."""
        model = self._owner(module)
        if model is None:
            return super().get_module_state_dict(module)
        return model.state_dict() if self._sharded else model.whole_state_dict(keep=self.is_global_zero)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load whole or sharded tensors, keeping this rank's part."""
        model = self._owner(module)
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

    # ---------------------------------------------------------------- saving

    def save_checkpoint(
        self,
        path: _PATH,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write a directory with every rank's part, at once or on a thread, or one file from rank 0 as ``ddp`` would.

        Raises:
            RuntimeError: On every rank, if one of them cannot write, or could not on a thread earlier.
        """
        if not self._sharded:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        converted = self._convert_stateful_objects_in_state(state, filter=filter or {})
        modules = [key for key in converted if isinstance(state[key], nn.Module)]
        optimizers = [key for key in converted if isinstance(state[key], Optimizer) and self._owner(state[key])]
        save = ShardedSave(as_checkpoint(converted, modules, optimizers), path, self.broadcast, storage_options)
        if not self._async_checkpoint:
            save.write()
            return
        if self._background is None:
            self._background = BackgroundSaves(self._timeout)
            atexit.register(self._close_saves)  # Fabric tears no strategy down when a script ends
        self._background.save(save)

    def finish_saves(self) -> None:
        """Return when every save on its way is whole; every rank calls it.

        Raises:
            RuntimeError: On every rank, if one of them could not write.
        """
        if self._background is not None:
            self._background.wait()

    def _close_saves(self) -> None:
        background, self._background = self._background, None
        if background is not None:
            background.close()

    def teardown(self) -> None:
        """Wait for saves on their way, and leave everything as a Fabric expects it."""
        atexit.unregister(self._close_saves)
        try:
            self._close_saves()
        finally:
            super().teardown()

    # ---------------------------------------------------------------- loading

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
        self.finish_saves()
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


class SavedLauncher(GarbageStaysBehind, _MultiProcessingLauncher):
    """Lets spawned and forked ranks end when what they save is whole, with the failure of what is not."""

    def _wrapping_function(self, process_idx: int, function: Callable[..., Any], *rest: Any) -> None:
        def and_finish(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            assert isinstance(self._strategy, CheckpointingFabricStrategy)
            self._strategy.finish_saves()
            return result

        super()._wrapping_function(process_idx, and_finish, *rest)


def as_checkpoint(state: Mapping[str, Any], modules: Sequence[str], optimizers: Sequence[str]) -> dict[str, Any]:
    """A state under the keys of the user's as a checkpoint that :class:`ShardedSave` takes; see :func:`by_keys`.

    Args:
        state: By key what to save; states stand for modules and optimizers.
        modules: Keys whose values are states of modules.
        optimizers: Keys whose values are states of optimizers, with names for positions.
    """
    return {
        "state_dict": {f"{key}.{name}": value for key in modules for name, value in state[key].items()},
        "optimizer_states": [state[key] for key in optimizers],
        "fabric": {
            "modules": list(modules),
            "optimizers": list(optimizers),
            "rest": {key: value for key, value in state.items() if key not in (*modules, *optimizers)},
        },
    }


def by_keys(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint under the keys that the user gave, also one that was made one file; others stay as they are.

    Example:
        >>> by_keys(as_checkpoint({"model": {"weight": 1.0}, "step": 3}, modules=["model"], optimizers=[]))
        {'step': 3, 'model': {'weight': 1.0}}
    """
    if "fabric" not in checkpoint:
        return checkpoint
    layout = checkpoint["fabric"]
    loaded: dict[str, Any] = {
        **layout["rest"],
        **dict(zip(layout["optimizers"], checkpoint["optimizer_states"], strict=True)),
    }
    for key in layout["modules"]:
        prefix = f"{key}."
        loaded[key] = {n[len(prefix) :]: v for n, v in checkpoint["state_dict"].items() if n.startswith(prefix)}
    return loaded


def load_state(
    path: str | Path,
    like: Mapping[str, Mapping[str, Tensor]],
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Read a directory that ``fabric.save`` wrote.

    Args:
        path: The directory.
        like: By key of a module, or of an optimizer, the module's tensors by name, which tell how this rank wants them
            cut; others are read whole.
        weights_only: As in :func:`torch.load`.

    Raises:
        ValueError: If something else wrote the directory.
    """
    flat = {f"{key}.{name}": tensor for key, tensors in like.items() for name, tensor in tensors.items()}
    checkpoint = load_sharded(path, flat, weights_only)
    if "fabric" not in checkpoint:
        raise ValueError(
            f"The checkpoint {str(path)!r} was saved by a Trainer and not by fabric.save: resume it with a Trainer, or "
            "take its weights to one file with `lightning-parm consolidate` and load that."
        )
    optimizers = checkpoint["fabric"]["optimizers"]
    states = [load_optimizer_tensors(checkpoint, i, dict(like.get(key, {}))) for i, key in enumerate(optimizers)]
    return by_keys({**checkpoint, "optimizer_states": states})
