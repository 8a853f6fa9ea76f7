"""The layer on an accelerator that only pretends: fake tensors, a fake process group, no memory and no kernels.

torch's fake tensors know their device, type, shape and strides, and refuse what mixes devices, what a kernel would
refuse, and what needs a value. The device is torch's spare one, for a build without CUDA runs no backward on fake CUDA
tensors. Shown is that forward and backward of every schedule keep every tensor on the device and in its type, that
``grouped_mm`` gets strides that it takes, that the host reads those numbers that it must and no others, that no copy
makes it wait, and that the collectives are those of the same layer on the CPU. Nothing is shown about values, streams,
memory or speed. Expert choice and jitter are left out: there the host reads one more number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.backend_registration as backends
from distributed import run_ranks
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_parm.moe import experts
from lightning_parm.moe.layer import MoE
from lightning_parm.moe.topology import Topology

M, H, E, TOKENS = 16, 32, 4, 8
GPU = "pretended"
AUTOCAST = torch.library.Library("_", "IMPL")
TOPOLOGIES = [(8, 2, 2, 2), (8, 4, 4, 2), (1, 1, 1, 1)]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"capacity_factor": 1.0, "static_shapes": True},
    {"capacity_factor": 1.0, "drop_policy": "probability", "balance_loss_weight": 0.1, "z_loss_weight": 0.1},
    {"num_shared_experts": 1, "expert_bias": True, "activation": "gelu"},
    {"capacity_factor": 0.5, "static_shapes": True, "sequence_parallel": True, "recompute": True},
    {"router": "sigmoid", "num_router_groups": 2, "num_chosen_groups": 1, "activation": "relu_squared"},
    {"balance_loss_weight": 0.1, "balance_scope": "global_batch", "sequence_parallel": True},
]


class Accelerator(backends._DummyBackendModule):
    """Of no memory, so that fake tensors never ask it for any."""

    def is_available(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class Waiting(TorchDispatchMode):
    """Counts the copies between devices for which the host waits."""

    copies = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and out.device.type != args[0].device.type:
            self.copies += not (kwargs or {}).get("non_blocking")
        return out


class Log:
    """What two runs of one layer must have in common: collectives, and numbers that the host reads.

    Numbers are those of the first run, on the CPU; the second, on fake tensors, is told them.
    """

    def __init__(self) -> None:
        self.collectives: list[tuple[Any, ...]] = []
        self.numbers: list[list[int]] = []
        self.reads = 0
        for name in ("all_to_all_single", "all_gather_single", "reduce_scatter_single", "all_reduce"):
            setattr(dist, name, self._watched(name, getattr(dist, name)))
        read = Tensor.tolist
        Tensor.tolist = lambda tensor: self._recorded(read(tensor))  # type: ignore[method-assign]
        FakeTensor.tolist = lambda tensor: self._told(tensor)  # type: ignore[method-assign]

    def clear(self) -> None:
        self.collectives, self.numbers, self.reads = [], [], 0

    def _recorded(self, numbers: list[int]) -> list[int]:
        self.numbers.append(numbers)
        return numbers

    def _told(self, tensor: Tensor) -> list[int]:
        numbers = self.numbers[self.reads]
        assert (tensor.device.type, tuple(tensor.shape)) == (GPU, (len(numbers),))
        self.reads += 1
        return numbers

    def _watched(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, group: Any = None, **kwargs: Any) -> Any:
            buffers = [arg for arg in args if isinstance(arg, Tensor)]
            assert len({buffer.device for buffer in buffers}) == 1
            self.collectives.append((name, group, [(buffer.dtype, tuple(buffer.shape)) for buffer in buffers]))
            if buffers[0].dtype == torch.int64:  # counts come back as they were sent
                buffers[0].copy_(buffers[-1] if buffers[0].numel() == buffers[-1].numel() else buffers[-1].max())
            return original(*args, group=group, **kwargs)

        return call


def pretend(world_size: int) -> None:
    """Make this forked process a rank of a job with accelerators whose grouped kernel takes what CUDA's does."""
    backends._setup_privateuseone_for_python_backend(GPU, Accelerator())
    AUTOCAST.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    torch.autograd.set_multithreading_enabled(False)  # backward stays where the modes are
    experts._has_kernel = lambda rows, weight: rows.device.type == GPU and experts._fits_kernel(rows, weight)
    dist.destroy_process_group()
    dist.init_process_group(f"cpu:fake,{GPU}:fake", store=FakeStore(), rank=world_size // 2, world_size=world_size)


def layer_on(device: str, topology: Topology, plan: tuple[str, str, int], options: dict[str, Any]) -> MoE:
    layer = MoE(M, H, E, device="meta", **options)
    layer.parallelize(topology, *plan)  # type: ignore[arg-type]
    for module in layer.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                there = torch.zeros_like(tensor, device=device)
                setattr(module, name, nn.Parameter(there) if name in module._parameters else there)
    return layer


def step(layer: MoE, device: str, dtype: torch.dtype, autocast: bool) -> dict[str, tuple[Any, ...]]:
    """Type, shape and device of everything that a forward and a backward leave."""
    x = torch.randn(TOKENS, M, device=device, dtype=dtype, requires_grad=True)
    with torch.autocast(device, torch.bfloat16) if autocast else nullcontext():
        y = layer(x)
    (y.float().sum() + layer.auxiliary_loss).backward()
    left = {"output": y, "input gradient": x.grad, "loss": layer.auxiliary_loss, "dropped": layer.dropped_share}
    left |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    left["load"] = layer.tokens_per_expert
    assert {tensor.device.type for tensor in left.values()} == {device}
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in left.items()}


def _same_on_both(rank: int, _: int, sizes: tuple[int, int, int, int]) -> int:
    world, mp, ep, esp = sizes
    pretend(world)
    log = Log()
    topology = Topology(world, world // 2, mp, ep, esp)
    for axis in ("data_parallel", "tensor_parallel", "expert_parallel", "expert_shard", "fused"):
        topology.group(axis)  # type: ignore[arg-type]
    plans = [("plain", "fused", 1)] * (mp == esp) + [("baseline", "fused", 1)]
    plans += [("s0", "fused", chunks) for chunks in (1, 3)] * (mp == esp)
    plans += itertools.product(("s1", "s2"), ("fused", "two_hop"), (1, 3))
    cases = list(itertools.product(plans, SETTINGS))[TOPOLOGIES.index(sizes) :: len(TOPOLOGIES)]
    turns = itertools.cycle(itertools.product(("bfloat16", "autocast", "float32"), (1, 2)))
    for (plan, settings), (precision, top_k) in zip(cases, turns, strict=False):
        dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        options = {"top_k": top_k, "dtype": dtype, **settings}
        log.clear()
        expected = step(layer_on("cpu", topology, plan, options), "cpu", dtype, precision == "autocast")
        collectives, log.collectives = log.collectives, []
        with FakeTensorMode(), Waiting() as waiting:
            found = step(layer_on(GPU, topology, plan, options), GPU, dtype, precision == "autocast")
        case = f"{sizes} {plan} {options}"
        assert found == expected, case
        assert log.collectives == collectives, case
        schedule, _, chunks = plan
        counts = not settings.get("static_shapes") or (schedule in ("s0", "s1") and chunks > 1)
        tokens_of_esp = schedule == "baseline" and esp > 1
        tokens_of_mp = schedule != "s1" and "sequence_parallel" in settings and mp > 1
        assert log.reads == len(log.numbers) == counts + tokens_of_esp + tokens_of_mp, case
        assert waiting.copies == 0, case
    return len(cases)


@pytest.mark.parametrize("sizes", TOPOLOGIES)
def test_an_accelerator_gets_what_the_cpu_gets(sizes: tuple[int, int, int, int]) -> None:
    (count,) = run_ranks(1, _same_on_both, sizes, timeout=200)
    assert count > 0


def _refused(rank: int, world: int) -> list[str]:
    pretend(world)
    messages = []
    with FakeTensorMode():
        options = {"dtype": torch.bfloat16, "num_shared_experts": 1, "capacity_factor": 1.0, "static_shapes": True}
        layer = layer_on(GPU, Topology.local(), ("plain", "fused", 1), options)
        rows = torch.zeros(M, TOKENS + 1, device=GPU, dtype=torch.bfloat16).t()
        assert layer(rows).device.type == GPU  # whatever the strides of the user's tokens
        for call in (
            lambda: experts._GroupedKernel.apply(rows, layer.experts.w_out.mT, [3, 3, 3, 0]),
            lambda: layer(torch.zeros(TOKENS, M, dtype=torch.bfloat16)),
            lambda: int(layer.tokens_per_expert[0]),
        ):
            try:
                call()
            except (RuntimeError, NotImplementedError) as error:
                messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_what_an_accelerator_would_refuse_is_refused() -> None:
    ((strides, devices, value),) = run_ranks(1, _refused)
    assert "stride along 1 dim to be multiple of 16 bytes, got 9" in strides
    assert "at least two devices, cpu and pretended:0" in devices
    assert "DataDependentOutputException" in value
