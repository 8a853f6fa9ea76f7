"""Output, losses and every gradient of every schedule equal the dense float64 reference, on up to 8 ranks.

Every topology meets every schedule, transport and number of chunks; routers, capacities, activations, losses and k take
turns over all, so that each meets every schedule many times.
"""

from __future__ import annotations

from itertools import count, product
from typing import Any

import pytest
from distributed import run_ranks
from moe.equality import Case, E, H, compare

RAGGED, EQUAL = (5, 4, 0, 7), (6,)
TURNS: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({}, RAGGED),
    ({"capacity_factor": 1.0}, RAGGED),
    ({"num_shared_experts": 1, "expert_bias": True, "activation": "gelu"}, RAGGED),
    ({"balance_loss_weight": 0.3, "z_loss_weight": 0.2}, RAGGED),
    ({"sequence_parallel": True, "num_shared_experts": 2}, RAGGED),
    ({"capacity_factor": 1.0, "drop_policy": "probability", "static_shapes": True}, EQUAL),
    ({"router": "sigmoid", "weight_scale": 2.5, "balance_loss_weight": 0.3}, RAGGED),
    ({"balance_loss_weight": 0.3, "balance_scope": "global_batch", "normalize_weights": False}, RAGGED),
    ({"router": "expert_choice", "z_loss_weight": 0.2}, RAGGED),
    ({"expert_bias": True, "activation": "relu_squared", "recompute": True}, RAGGED),
    ({"capacity_factor": 0.5, "sequence_parallel": True, "static_shapes": True}, EQUAL),
    ({"router": "uniform", "balance_loss_weight": 0.3, "sequence_parallel": True}, RAGGED),
    ({"num_router_groups": 4, "num_chosen_groups": 2, "router": "sigmoid"}, RAGGED),
]


def plans(mp: int, esp: int) -> list[tuple[str, str, int]]:
    """Schedule, transport and chunks that can run."""
    simple = ["plain"] * (mp == esp) + ["baseline"] * (mp % esp == 0 or esp % mp == 0)
    paused = product(("s1", "s2"), ("fused", "two_hop"), (1, 2, 3))
    never = [("s0", "fused", chunks) for chunks in (1, 2, 3)] if mp == esp else []
    return [(name, "fused", 1) for name in simple] + never + list(paused)


def grid(world: int) -> list[Case]:
    sizes = [size for size in range(1, world + 1) if world % size == 0]
    topologies = [
        (mp, ep, esp) for mp, ep, esp in product(sizes, repeat=3) if world % (ep * esp) == E % ep == H % esp == 0
    ]
    turn, cases = count(), []
    for mp, ep, esp in topologies:
        for schedule, transport, chunks in plans(mp, esp):
            number = next(turn)
            settings, counts = TURNS[number % len(TURNS)]
            settings = {"top_k": (1, 2, 4)[number % 3], **settings}
            if settings.get("static_shapes") and settings.get("sequence_parallel") and EQUAL[0] % mp:
                counts = (8,)  # equal shares for every mp peer
            cases.append(Case(mp, ep, esp, schedule, transport, chunks, counts, tuple(settings.items())))
    return cases


@pytest.mark.parametrize("world", [1, 2, 4, 6, 8])
def test_every_schedule_equals_the_reference(world: int) -> None:
    cases = grid(world)
    for case in cases:
        case.reference(world)  # once, for all ranks
    assert run_ranks(world, compare, cases, timeout=280.0) == [len(cases)] * world
