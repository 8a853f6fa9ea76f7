"""Constants measured on real groups are the same on all ranks, kept on disk, and leave no trace in the process."""

from pathlib import Path

import pytest
import torch
from distributed import run_ranks

from lightning_parm.moe import MoE, Topology
from lightning_parm.moe import calibrate as calibrate_module
from lightning_parm.moe.calibrate import calibrate
from lightning_parm.moe.choice import choose
from lightning_parm.moe.links import Line, Links


def measure_and_keep(rank: int, world_size: int, folder: str) -> dict[str, object]:
    torch.manual_seed(rank)
    before = torch.get_rng_state()
    topology = Topology.resolve(world_size, rank, tensor_parallel_size=2, num_experts=[4])
    links = calibrate(topology, "cpu", folder)
    untouched = torch.equal(before, torch.get_rng_state())
    again = calibrate(topology, "cpu", folder)
    choice = choose(topology, 32, 32, 32, 4, 2, None, links)

    torch.manual_seed(0)
    layer = MoE(16, 32, 4).parallelize(topology, choice.schedule, choice.transport, choice.chunks)
    layer(torch.ones(8, 16)).sum().backward()
    (file,) = Path(folder).iterdir()
    if rank == 0:
        file.write_text("cut off")
    repaired = calibrate(topology, "cpu", folder)
    marked = Links({}, 1.0, 1.0, source="measured a third time")
    calibrate_module._Calibration.links = lambda self: marked  # type: ignore[method-assign]
    kept = calibrate(topology, "cpu", folder)
    refreshed = calibrate(topology, "cpu", folder, refresh=True)
    return {
        "links": links,
        "again": again,
        "repaired": repaired,
        "kept": kept,
        "refreshed": refreshed,
        "untouched": untouched,
        "choice": choice.candidate,
    }


def test_constants_are_equal_on_all_ranks_kept_and_measured_anew_on_request(tmp_path: Path) -> None:
    results = run_ranks(4, measure_and_keep, str(tmp_path), timeout=120)
    for name in ("links", "again", "repaired", "refreshed", "choice"):
        assert all(result[name] == results[0][name] for result in results), name
    links, refreshed = results[0]["links"], results[0]["refreshed"]
    assert results[0]["again"] == links
    assert results[0]["repaired"] != links  # a broken file is measured anew
    assert results[0]["kept"] == results[0]["repaired"]
    assert refreshed.source == "measured a third time"
    assert all(result["untouched"] for result in results)
    (file,) = tmp_path.iterdir()
    assert Links.load(file) == refreshed

    axes = ("fused", "expert_parallel", "expert_shard", "tensor_parallel")
    assert {f"all_to_all/{axis}" for axis in axes[:3]} < links.collectives.keys()
    assert links.collectives["all_gather/expert_shard"] == links.collectives["all_gather/tensor_parallel"]
    assert all(isinstance(line, Line) and line.beta_seconds >= 0 for line in links.collectives.values())
    assert all(line.floor_seconds > 0 for line in links.collectives.values())
    assert all(0.0 <= share <= 1.0 for share in links.overlaps.values())
    assert {"compute+fused", "fused+tensor_parallel"} <= links.overlaps.keys()
    assert {"plain/fused", "s1/two_hop", "s2/fused"} <= links.overheads.keys()
    assert 1e8 < links.flops_per_second < 1e13


def test_one_rank_has_nothing_to_calibrate() -> None:
    with pytest.raises(ValueError, match="One rank has no links to calibrate"):
        calibrate(Topology.local(), "cpu")
