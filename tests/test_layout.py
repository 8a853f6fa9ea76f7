"""The house keeps its shape: layers import downwards, wings never touch, files stay short, nothing prints."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lightning_parm"
FILES = sorted(PACKAGE.rglob("*.py"))
CEILING = 350

#: What each part of the package may never import.
FORBIDDEN = {
    "moe": ("lightning.", "pytorch_lightning.", "lightning_parm.data.", "lightning_parm.strategy."),
    "data": ("lightning.", "pytorch_lightning.", "lightning_parm.moe.", "torch.distributed."),
    "parallel": (
        "lightning_parm.strategy.",
        "lightning_parm.fabric.",
        "lightning_parm.checkpoint.",
        "lightning_parm.data.",
    ),
    "checkpoint": ("lightning_parm.strategy.", "lightning_parm.fabric."),
}
#: The order of layers inside the MoE wing, low to high: a file imports only from those before it or beside it.
MOE_LAYERS = (
    {"topology", "cost", "links", "timeline", "wire"},
    {"collectives", "layout", "overlap", "prediction", "experts", "routers", "routing", "transport"},
    {"stages"},
    {"schedules", "choice", "hardware"},
    {"layer"},
    {"calibrate"},
)


def imported_modules(file: Path) -> set[str]:
    """Absolute names of everything a file imports, a dot at the end; names taken from a module count as its members."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {f"{name}." for name in names}


@pytest.mark.parametrize("wing", FORBIDDEN)
def test_no_part_imports_what_stands_above_or_beside_it(wing: str) -> None:
    files = [file for file in FILES if wing == file.relative_to(PACKAGE).parts[0]]
    assert files
    for file in files:
        for name in imported_modules(file):
            assert not name.startswith(FORBIDDEN[wing]), f"{file.relative_to(PACKAGE)} imports {name[:-1]}"


def test_moe_layers_import_downwards_only() -> None:
    height = {name: level for level, names in enumerate(MOE_LAYERS) for name in names}
    for file in (PACKAGE / "moe").glob("*.py"):
        for name in imported_modules(file):
            parts = name.split(".")
            if parts[:2] == ["lightning_parm", "moe"] and parts[2] in height and file.stem in height:
                assert height[parts[2]] <= height[file.stem], f"moe/{file.name} imports upwards: {name[:-1]}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_a_file_is_short_and_silent(file: Path) -> None:
    text = file.read_text()
    assert len(text.splitlines()) <= CEILING
    calls = [node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    assert not [call for call in calls if isinstance(call, ast.Name) and call.id == "print"]


def test_files_are_short_on_the_whole() -> None:
    sizes = sorted(len(file.read_text().splitlines()) for file in FILES if file.name != "__init__.py")
    assert sizes[len(sizes) // 2] <= 200
