"""What ``fabric.save`` writes as a directory: modules and optimizers under the keys of the user's state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_parm.checkpoint.directory import load_optimizer_tensors, load_sharded, save_sharded


def save_state(
    path: str | Path,
    state: Mapping[str, Any],
    modules: Sequence[str],
    optimizers: Sequence[str],
    broadcast: Callable[[Any], Any],
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Write a state as a directory; every rank calls this.

    Args:
        path: The directory.
        state: By key what to save; states stand for modules and optimizers.
        modules: Keys whose values are states of modules.
        optimizers: Keys whose values are states of optimizers, with names for positions.
        broadcast: Sends rank 0's object to all ranks.
        storage_options: Of fsspec, for URLs.
    """
    tensors = {f"{key}.{name}": value for key in modules for name, value in state[key].items()}
    rest = {key: value for key, value in state.items() if key not in (*modules, *optimizers)}
    checkpoint = {
        "state_dict": tensors,
        "optimizer_states": [state[key] for key in optimizers],
        "fabric": {"modules": list(modules), "optimizers": list(optimizers), "rest": rest},
    }
    save_sharded(checkpoint, path, broadcast, storage_options)


def load_state(
    path: str | Path,
    like: Mapping[str, Mapping[str, Tensor]],
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Read what :func:`save_state` wrote.

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


def by_keys(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint under the keys that the user gave, also one that was made one file; others stay as they are."""
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
