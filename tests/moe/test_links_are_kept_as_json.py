"""Constants of a cluster survive the disk, and a file that holds none is refused."""

from pathlib import Path

import pytest

from lightning_parm.moe.links import PUBLISHED_32_GPUS, Line, Links

LINKS = Links(
    {"all_to_all": Line(1e-5, 1e-10), "all_to_all/fused": Line(2e-5, 3e-10)},
    flops_per_second=1e14,
    copy_bytes_per_second=1e12,
    overlaps={"compute+fused": 0.8},
    overheads={"s1/fused": (1e-3, 1e-4)},
    residual=0.1,
    source="a test",
)


def test_a_calibration_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    LINKS.save(tmp_path / "links.json")
    assert Links.load(tmp_path / "links.json") == LINKS
    assert [file.name for file in tmp_path.iterdir()] == ["links.json"]
    assert Links.from_json(PUBLISHED_32_GPUS.to_json()) == PUBLISHED_32_GPUS  # whose rates are infinite


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"collectives": {"all_to_all": 3}}', '{"collectives": {}}'])
def test_a_file_without_a_calibration_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "links.json").write_text(text)
    with pytest.raises(ValueError, match=r"links\.json: This is no calibration"):
        Links.load(tmp_path / "links.json")


def test_the_line_of_an_axis_goes_before_that_of_all_axes() -> None:
    assert LINKS.seconds("all_to_all", "fused", 1_000_000) == pytest.approx(3.2e-4)
    assert LINKS.seconds("all_to_all", "expert_parallel", 1_000_000) == pytest.approx(1.1e-4)
    with pytest.raises(ValueError, match="no constants for all_reduce over expert_shard, only for all_to_all"):
        LINKS.seconds("all_reduce", "expert_shard", 1)


def test_overlaps_have_no_direction_and_are_none_by_default() -> None:
    assert LINKS.overlap("fused", "compute") == LINKS.overlap("compute", "fused") == 0.8
    assert LINKS.overlap("fused", "tensor_parallel") == 0.0
