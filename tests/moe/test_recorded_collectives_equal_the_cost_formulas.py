"""Every call and byte of every schedule, forward and backward, equals the formulas, on 8, 64 and 512 ranks.

The ranks are those of torch's fake process group: one process, real calls, no data. The uniform router gives every
expert equally many tokens whatever the data, and counts come back as they were sent, as they would from equal peers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_parm.moe.cost import Workload, collectives, total_bytes
from lightning_parm.moe.layer import MoE
from lightning_parm.moe.topology import Topology

M, H, K = 4, 64, 2
KINDS = {
    "all_to_all_single": "all_to_all",
    "all_gather_single": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "all_reduce": "all_reduce",
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"sequence_parallel": True},
    {"capacity_factor": 1.0, "static_shapes": True},
    {"num_shared_experts": 1, "auxiliary_loss": False},
]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """(kind, group, bytes) of every collective from here on."""
    calls: list[tuple[Any, ...]] = []

    def watched(name: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, group: Any = None, **kwargs: Any) -> Any:
            buffers = [arg for arg in args if isinstance(arg, torch.Tensor)]
            calls.append((KINDS[name], group, max(b.numel() * b.element_size() for b in buffers)))
            if buffers[0].dtype == torch.int64:
                buffers[0].copy_(buffers[-1] if buffers[0].numel() == buffers[-1].numel() else buffers[-1].max())
            return original(*args, group=group, **kwargs)

        return call

    for name in KINDS:
        monkeypatch.setattr(dist, name, watched(name))
    yield calls
    dist.destroy_process_group()


def plans(mp: int, esp: int) -> list[tuple[str, str, int]]:
    nested = mp % esp == 0 or esp % mp == 0
    simple = [("plain", "fused", 1)] * (mp == esp) + [("baseline", "fused", 1)] * nested
    simple += [("s0", "fused", chunks) for chunks in (1, 2, 4)] * (mp == esp)
    return simple + list(product(("s1", "s2"), ("fused", "two_hop"), (1, 2, 4)))


@pytest.mark.parametrize(
    ("world", "mp", "ep", "esp"),
    [
        (8, 2, 2, 2),
        (8, 4, 4, 2),
        (8, 1, 8, 1),
        (8, 8, 1, 8),
        (64, 4, 16, 4),
        (64, 8, 8, 2),
        (512, 8, 32, 8),
        (512, 4, 64, 4),
    ],
)
def test_recorded_calls_equal_the_formulas(
    recorded: list[tuple[Any, ...]], world: int, mp: int, ep: int, esp: int
) -> None:
    rank = world - 3
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    topology = Topology(world, rank, mp, ep, esp)
    num_tokens = 4 * ep * mp
    for settings, (schedule, transport, chunks) in product(SETTINGS, plans(mp, esp)):
        if settings.get("static_shapes") and schedule in ("s0", "s1") and chunks > 1:
            continue  # then rows are counted and sent as without static shapes
        work = Workload(num_tokens, M, H, ep, min(K, ep), mp, ep, esp, **settings)
        options = {name: value for name, value in settings.items() if name != "auxiliary_loss"}
        layer = MoE(M, H, ep, work.top_k, router="uniform", balance_loss_weight=float(work.auxiliary_loss), **options)
        layer.parallelize(topology, schedule, transport, chunks)  # type: ignore[arg-type]
        own = num_tokens // mp if layer.sequence_parallel else num_tokens
        x = torch.randn(own, M, requires_grad=True)
        recorded.clear()
        y = layer(x)
        forward = len(recorded)
        y.sum().backward()
        axes = {topology.group(axis): axis for axis in ("tensor_parallel", "expert_shard", "expert_parallel", "fused")}
        sizes = {axis: topology.size(axis) for axis in axes.values()}
        found = Counter(
            (kind, axes[group], size, number >= forward) for number, (kind, group, size) in enumerate(recorded)
        )
        wanted = Counter(
            (call.kind, axes[topology.group(call.axis)], call.num_bytes, call.backward)
            for call in collectives(work, schedule, transport, chunks)  # type: ignore[arg-type]
        )
        assert found == wanted, f"{schedule} {transport} {chunks} {settings}: {found - wanted} but {wanted - found}"
        assert all(sizes[axes[group]] == dist.get_world_size(group) for _, group, _ in recorded)


def test_totals_are_the_closed_forms() -> None:
    """With ETM = E C M and BLM = S M bytes: the table of the documentation."""
    sizes = {"num_tokens": 4096, "model_dim": 64, "hidden_dim": 1, "num_experts": 32, "top_k": 2}
    mp, esp = 4, 2
    work = Workload(
        **sizes,
        tensor_parallel_size=mp,
        expert_parallel_size=8,
        expert_shard_size=esp,
        capacity_factor=1.25,
        static_shapes=True,
    )
    blm = 4096 * 64 * 4
    etm = work.rows(4096) * 64 * 4

    def large(schedule: str, transport: str = "fused", work: Workload = work) -> int:
        calls = collectives(work, schedule, transport)  # type: ignore[arg-type]
        return total_bytes([call for call in calls if call.num_bytes > 32 * 64 * 4])

    assert large("s1") == 4 * etm * esp // mp + 2 * blm
    assert large("s2") == 4 * etm * esp // mp + 2 * etm
    assert large("baseline") == esp * (4 * etm + 2 * etm + 2 * blm)
    assert large("s1", "two_hop") == 4 * etm // mp + 4 * etm * esp // mp + 2 * blm
    plain = Workload(
        **sizes,
        tensor_parallel_size=2,
        expert_parallel_size=8,
        expert_shard_size=2,
        capacity_factor=1.25,
        static_shapes=True,
    )
    assert large("plain", work=plain) == 4 * etm + 2 * etm
    assert large("s0", work=plain) == 4 * etm + 2 * blm + 4096 * 2 * 4


def test_one_process_sends_nothing() -> None:
    alone = Workload(num_tokens=8, model_dim=4, hidden_dim=4, num_experts=4, top_k=2)
    for schedule in ("baseline", "plain", "s0", "s1", "s2"):
        assert collectives(alone, schedule) == []  # type: ignore[arg-type]
