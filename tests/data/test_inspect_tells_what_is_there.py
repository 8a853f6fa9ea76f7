import io
import json

import numpy as np
import pytest
from data.corpora import numbered_documents, write_arrow
from rich.console import Console

from lightning_parm.data.inspect import inspect, render


@pytest.fixture
def folder(tmp_path):
    documents = [*numbered_documents([5, 9, 300] * 30, dtype="uint16"), np.array([], dtype="uint16")]
    write_arrow(tmp_path / "web" / "0.arrow", documents, delimiter=0)
    write_arrow(tmp_path / "code" / "0.arrow", numbered_documents([2000], dtype="uint32"), delimiter=60_000)
    return tmp_path


def test_its_numbers(folder):
    result = json.loads(json.dumps(inspect(str(folder), sequence_length=16)))
    code, web = result["sources"]
    assert (web["files"], web["documents"], web["empty_documents"]) == (1, 90, 1)
    assert (web["tokens"], web["dtype"], web["delimiter"], web["format"]) == (9420 + 90, "uint16", 0, "arrow")
    assert web["largest_id"] == 9420
    assert web["delimiter_share"] == pytest.approx(90 / 9510, abs=1e-6)
    assert web["lengths"] == {"min": 5, "median": 9.0, "mean": 104.7, "max": 300}
    assert sum(web["histogram"]["counts"]) == 90
    assert web["windows"] == 9509 // 16
    assert web["logical_shards"] == web["largest_data_parallel_size"] == 8
    assert (code["largest_id"], code["delimiter"]) == (60_000, 60_000)
    assert result["tokens"] == 9510 + 2001


def test_its_tables_and_its_plot(folder, tmp_path):
    (folder / "web" / "1.arrow").write_bytes(b"ARROW1 but no more")
    result = inspect(str(folder), plot=str(tmp_path / "lengths.png"))
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render(result))
    text = console.export_text()
    for expected in (
        "9,420",
        "60,000",
        "largest useful data-parallel size",
        "1.arrow, which is not",
        "1 empty documents",
    ):
        assert expected in text
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
