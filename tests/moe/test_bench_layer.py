"""The layer benchmark times what it says: its contestants compute the same, and the result is JSON and a table."""

from __future__ import annotations

import io
import json

import torch
from rich.console import Console

from lightning_parm.bench.layer import _Loop, _mixtral, layer, render
from lightning_parm.moe.layer import MoE


def test_contestants_compute_the_same() -> None:
    ours = MoE(16, 32, 4)
    x = torch.randn(12, 16)
    for other in (_Loop(ours), _mixtral(ours, "eager"), _mixtral(ours, "grouped_mm")):
        tokens = x if isinstance(other, _Loop) else x.unsqueeze(0)
        torch.testing.assert_close(other(tokens).view_as(x), ours(x))


def test_the_result_is_json_and_a_table_of_all_contestants() -> None:
    result = layer(num_tokens=64, model_dim=16, hidden_dim=32, num_experts=4, repetitions=1, device="cpu")
    assert json.loads(json.dumps(result)) == result
    assert result["contestants"]["dense matrix products"]["share_of_dense"] == 1.0
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(render(result))
    text = console.export_text()
    assert all(name in text for name in result["contestants"])
    assert len(result["contestants"]) == 5
