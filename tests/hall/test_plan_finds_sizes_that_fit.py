"""The planner ranks parallel sizes by speed among those that fit, and predicts speed-ups over a grid of layers."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from lightning_parm.moe.choice import choose_for
from lightning_parm.moe.cost import Workload
from lightning_parm.moe.hardware import HARDWARE
from lightning_parm.moe.links import Line, Links
from lightning_parm.moe.topology import Topology
from lightning_parm.plan import plan, render
from lightning_parm.sweep import layers, sweep


def text_of(result: dict[str, object]) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(render(result))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_best_sizes_are_the_fastest_that_fit_and_every_row_is_a_topology() -> None:
    result = plan(nodes=2, num_experts=8, num_layers=32)
    rows = result["topologies"]
    fitting = [row for row in rows if row["fits"]]
    assert 0 < len(fitting) < len(rows)
    assert result["best"]["tokens_per_second"] == max(row["tokens_per_second"] for row in fitting)
    assert len({(row["tensor_parallel"], row["expert_parallel"], row["expert_shard"]) for row in rows}) == len(rows)
    for row in rows:
        topology = Topology(16, 0, row["tensor_parallel"], row["expert_parallel"], row["expert_shard"])
        assert topology.data_parallel_size == row["data_parallel"]
        assert topology.expert_data_parallel_size == row["expert_data_parallel"]
    assert result["best"]["schedule"] in text_of(result)


def test_faster_links_between_nodes_never_make_a_plan_slower() -> None:
    slow, fast = (
        plan(nodes=4, num_experts=16, num_layers=32, inter_bandwidth=gigabytes)["best"]["tokens_per_second"]
        for gigabytes in (5.0, 50.0)
    )
    assert fast > slow


def test_sizes_may_be_fixed_and_a_calibration_needs_them(tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    kinds = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
    Links({kind: Line(1e-3, 1e-9) for kind in kinds}, 1e13, 1e11, source="this test").save(file)
    sizes = {"tensor_parallel_size": 2, "expert_parallel_size": 4, "expert_shard_size": 2}
    result = plan(calibration=str(file), **sizes)  # type: ignore[arg-type]
    assert result["links"] == "this test"
    assert [row["expert_parallel"] for row in result["topologies"]] == [4]
    with pytest.raises(ValueError, match="A calibration holds for the sizes it was measured with; give --tensor"):
        plan(calibration=str(file))


def test_what_cannot_fit_is_refused_with_the_least_that_it_takes() -> None:
    with pytest.raises(ValueError, match=r"fit 8 GPUs with 8 experts into 1.0 GB each: the least is \d+\.\d GB"):
        plan(memory_limit=1.0, num_layers=32)
    with pytest.raises(ValueError, match="No parallel sizes fit 8 GPUs with 8 experts; give sizes that divide both"):
        plan(expert_parallel_size=3)


def test_the_page_holds_every_number_of_the_tables(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    result = plan(html=str(page), num_layers=8)
    html = page.read_text()
    assert html.count("<table>") == 2
    assert f"{result['best']['layer_ms']:.3f}" in html
    assert "http" not in html  # nothing is loaded from elsewhere


def test_on_the_published_links_choosing_beats_every_other_order_on_all_1296_layers() -> None:
    assert sum(1 for _ in layers()) == 1296
    result = sweep(["published 32 GPUs"])
    rows = {(row["sizes"], row["over"]): row for row in result["speed_ups"]}
    assert all(row["lowest"] >= 1.0 for row in rows.values())
    assert rows["all", "baseline"]["layers"] == 1296
    assert rows["N_MP = N_ESP = 4", "deepspeed"]["median"] >= 1.4
    assert "deepspeed" in text_of({"sweep": result})


@pytest.mark.parametrize("ranks", [1024, 16384])
def test_an_all_to_all_among_many_ranks_is_bound_by_its_number_of_peers(ranks: int) -> None:
    def chosen_ms(num_tokens: int) -> float:
        work = Workload(num_tokens, 4096, 2048, ranks // 8, 8, 8, ranks // 8, 8, element_bytes=2)
        choice = choose_for(work, HARDWARE["h100"].links(work))
        return 1e3 * choice.seconds[choice.candidate]

    alone, more = chosen_ms(8), chosen_ms(8192)
    assert alone > 4 * ranks // 8 * HARDWARE["h100"].peer_seconds * 1e3  # four exchanges with next to nothing to send
    assert more > alone
