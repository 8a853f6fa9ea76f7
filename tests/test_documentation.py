"""Every ```python block of README.md and docs/*.md runs: a file's blocks in order, in one namespace, in a fresh folder.

The folder holds a small corpus as ``data/*.arrow``. Sizes that a laptop has no time for are cut down by a prelude, and
nothing else: at most 2 processes and 20 steps, windows of 32 tokens, and models no wider than 64.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from data.corpora import write_arrow
from distributed import run_command

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

PRELUDE = """
import functools, inspect, warnings
warnings.filterwarnings("ignore", ".*treespec, LeafSpec.*")

def _smaller(cls, given=(), **limits):
    constructor = cls.__init__

    @functools.wraps(constructor)
    def __init__(self, *args, **options):
        bound = inspect.signature(constructor).bind(self, *args, **options)
        bound.arguments.update(given)
        for name, limit in limits.items():
            if isinstance(bound.arguments.get(name), int):
                bound.arguments[name] = min(bound.arguments[name], limit)
        constructor(*bound.args, **bound.kwargs)

    cls.__init__ = __init__

import lightning as L
import lightning_parm, lightning_parm.models

_smaller(L.Trainer, {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}, devices=2, max_steps=20)
_smaller(lightning_parm.TokenDataModule, sequence_length=32, batch_size=4)
_smaller(lightning_parm.models.GPT, {"model_dim": 64, "hidden_dim": 64, "num_layers": 1})
"""


def blocks_of(page: Path) -> list[tuple[int, str]]:
    """Return (line number, code) of every block."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, match.start(1)) + 1, match.group(1)) for match in BLOCK.finditer(text)]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)], ids=lambda page: page.name)
def test_code_blocks_run(page: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    documents = [random.integers(0, 300, 400).astype(np.uint16) for _ in range(60)]
    write_arrow(tmp_path / "data" / "corpus.arrow", documents, delimiter=0)
    script = PRELUDE
    for line, code in blocks_of(page):
        # Empty lines put each block where it is on its page, so that a traceback's line number is the page's.
        script += f"exec(compile({chr(10) * (line - 1) + code!r}, {str(page)!r}, 'exec'))\n"
    (tmp_path / "page.py").write_text(script, encoding="utf-8")
    result = run_command([sys.executable, "page.py"], cwd=tmp_path, fresh=False)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]


def test_pages_with_code_are_found() -> None:
    assert blocks_of(ROOT / "README.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which does not exist"
