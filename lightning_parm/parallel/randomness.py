"""Random numbers on tensor-parallel ranks: equal where activations are replicated, different where they are cut."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

_STRIDE = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: seeds of neighbours are far apart


def tensor_parallel_mesh(parameter: Tensor) -> DeviceMesh | None:
    """The tensor-parallel ranks over which ``parameter`` was distributed; None where it is whole, or they are one.

    Example:
        >>> tensor_parallel_mesh(torch.ones(3)) is None
        True
    """
    if not isinstance(parameter, DTensor) or "tensor_parallel" not in (parameter.device_mesh.mesh_dim_names or ()):
        return None
    mesh = parameter.device_mesh["tensor_parallel"]
    return mesh if mesh.size() > 1 else None


@contextmanager
def different_on_peers(mesh: DeviceMesh | None, device: torch.device) -> Generator[None, None, None]:
    """Within it every rank of ``mesh`` draws its own random numbers; before and after it, all ranks draw alike.

    Needed for dropout of activations that are cut over tensor-parallel ranks: of attention heads, or of a sequence. The
    seed comes from the default generator, so activation checkpointing repeats the same numbers when it recomputes.

    Args:
        mesh: The ranks, for instance ``self.device_mesh["tensor_parallel"]``; None for a rank on its own.
        device: Where the numbers are drawn.

    Example:
        >>> with different_on_peers(None, torch.device("cpu")):
        ...     torch.nn.functional.dropout(torch.ones(4), 0.5).shape
        torch.Size([4])
    """
    if mesh is None:
        yield
        return
    seed = int(torch.randint(2**62, (), dtype=torch.int64))  # on the host: it need not wait for the device
    generator = torch.default_generator
    if device.type != "cpu":
        module = torch.get_device_module(device)
        generator = module.default_generators[module.current_device() if device.index is None else device.index]
    state = generator.get_state()
    generator.manual_seed((seed + (mesh.get_local_rank() + 1) * _STRIDE) % 2**63)
    try:
        yield
    finally:
        generator.set_state(state)


def draw_differently_inside(
    module: nn.Module, cutting: Iterable[nn.Module], joining: Iterable[nn.Module], mesh: DeviceMesh | None
) -> None:
    """Let a module that was written for one rank draw by :func:`different_on_peers` while its activations are cut.

    That is from the first of its layers that cut them (queries, keys and values, say) to the one that joins them (the
    output projection); before and after, ranks draw alike. A module whose dropout is 0 draws nothing more than before.

    Args:
        module: A module in training, with dropout of its own or in children.
        cutting: Its layers whose output is cut.
        joining: Its layers whose input is cut.
        mesh: The ranks; None for a rank on its own.

    Example:
        >>> layer = nn.ModuleDict({"up": nn.Linear(4, 8), "drop": nn.Dropout(0.1), "down": nn.Linear(8, 4)})
        >>> draw_differently_inside(layer, [layer["up"]], [layer["down"]], mesh=None)
    """
    inside = ExitStack()

    def cut(layer: nn.Module, _: Any) -> None:
        inside.close()
        if module.training and _drops(module):
            inside.enter_context(different_on_peers(mesh, next(layer.parameters()).device))

    def join(*_: Any) -> None:
        inside.close()

    for layer in cutting:
        layer.register_forward_pre_hook(cut)
    for layer in joining:
        layer.register_forward_pre_hook(join)
    module.register_forward_hook(join, always_call=True)  # also where an error ends it, or a checkpoint's recomputation


def _drops(module: nn.Module) -> bool:
    numbers = [value for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]
    return any(numbers) or any(isinstance(child, nn.Dropout) and child.p > 0 for child in module.modules())
