"""The state of optimizers and modules with names for positions, as DTensors or as whole tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_parm.parallel.placement import ParameterPlacement

#: Where Lightning's WeightAveraging keeps the state of the model, whose place in ``state_dict`` its average takes. In a
#: directory it is the prefix of names, so that both are one state in shards.
CURRENT = "current_model_state"


def split_current(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The averages in a directory's state, and the state of the model itself.

    Example:
        >>> split_current({"weight": 1.5, "current_model_state.weight": 2.0})
        ({'weight': 1.5}, {'weight': 2.0})
    """
    prefix = f"{CURRENT}."
    averages = {name: value for name, value in state.items() if not name.startswith(prefix)}
    return averages, {name.removeprefix(prefix): value for name, value in state.items() if name not in averages}


def optimizer_names(optimizer: Optimizer, module: nn.Module) -> list[list[str]]:
    """Names of the parameters of each group of ``optimizer``.

    Raises:
        RuntimeError: If the optimizer holds a parameter that is not one of the module's.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        missing = [tuple(p.shape) for p in group["params"] if id(p) not in names]
        if missing:
            raise RuntimeError(
                f"The optimizer holds {len(missing)} parameter(s) of shapes {missing[:3]} that are not parameters of "
                "the LightningModule, so their state cannot be named in a checkpoint. Register them on the module."
            )
        groups.append([names[id(p)] for p in group["params"]])
    return groups


def optimizer_state(
    optimizer: Optimizer, module: nn.Module, placements: dict[str, ParameterPlacement]
) -> dict[str, Any]:
    """State of ``optimizer`` keyed by parameter names, with DTensors for what is sharded."""
    names = optimizer_names(optimizer, module)
    state: dict[str, dict[str, Any]] = {}
    for group, members in zip(optimizer.param_groups, names, strict=True):
        for parameter, name in zip(group["params"], members, strict=True):
            if parameter in optimizer.state:
                state[name] = {
                    key: placements[name].as_dtensor(value) if _follows(value, parameter) else value
                    for key, value in optimizer.state[parameter].items()
                }
    groups = [
        {**{k: v for k, v in group.items() if k != "params"}, "params": members}
        for group, members in zip(optimizer.param_groups, names, strict=True)
    ]
    return {"state": state, "param_groups": groups}


def _follows(value: Any, parameter: Tensor) -> bool:
    """Whether a value of the optimizer's state is cut like its parameter (a moment is, a step count is not)."""
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.dim() > 0


def load_optimizer_state(
    optimizer: Optimizer, module: nn.Module, placements: dict[str, ParameterPlacement], saved: dict[str, Any]
) -> None:
    """Load a state keyed by names (sharded) or by position (one file, any strategy), cutting it to this rank.

    Raises:
        RuntimeError: If the saved groups hold another number of parameters than the optimizer's.
    """
    names = optimizer_names(optimizer, module)
    known = {name for group in saved["param_groups"] for name in group["params"] if isinstance(name, str)}
    unknown = [name for members in names for name in members if known and name not in known]
    if unknown:
        rank_zero_warn(
            f"The checkpoint has no optimizer state for {len(unknown)} of {sum(map(len, names))} parameters, which "
            f"start with a fresh one: {', '.join(unknown[:3])}{', ...' if len(unknown) > 3 else ''}. Were they renamed?"
        )
    sizes, saved_sizes = [len(g) for g in names], [len(g["params"]) for g in saved["param_groups"]]
    if sizes != saved_sizes:
        raise RuntimeError(
            f"The checkpoint's optimizer has groups of {saved_sizes} parameters and this one has {sizes}; load it with "
            "the configure_optimizers it was saved with."
        )
    state: dict[int, dict[str, Any]] = {}
    position = 0
    groups = []
    for group, members, saved_group in zip(optimizer.param_groups, names, saved["param_groups"], strict=True):
        keys = [key if isinstance(key, int) else name for key, name in zip(saved_group["params"], members, strict=True)]
        for parameter, name, key in zip(group["params"], members, keys, strict=True):
            if key in saved["state"]:
                placement = placements[name]
                full = placement.full_shape(parameter)
                state[position] = {
                    entry: placement.as_local(value, parameter)
                    if isinstance(value, Tensor) and value.dim() > 0 and value.shape == full
                    else value
                    for entry, value in saved["state"][key].items()
                }
            position += 1
        groups.append({**saved_group, "params": list(range(position - len(members), position))})
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def full_tensors(values: Iterable[tuple[str, Any]], keep: bool) -> dict[str, Any]:
    """Gather DTensors one by one to the CPU; ranks with ``keep=False`` take part and keep nothing."""
    gathered: dict[str, Any] = {}
    for name, value in values:
        full = value.full_tensor().cpu() if isinstance(value, DTensor) else value
        if keep:
            gathered[name] = full
    return gathered


def by_position(named: dict[str, Any], keep: bool) -> dict[str, Any]:
    """A state keyed by names as torch's optimizers write it: whole tensors, keyed by the parameter's position."""
    state: dict[int, dict[str, Any]] = {}
    groups = []
    position = 0
    for group in named["param_groups"]:
        members = group["params"]
        for offset, name in enumerate(members):
            if name in named["state"]:
                state[position + offset] = full_tensors(named["state"][name].items(), keep)
        groups.append({**group, "params": list(range(position, position + len(members)))})
        position += len(members)
    return {"state": state, "param_groups": groups} if keep else {}
