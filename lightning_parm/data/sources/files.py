"""From a path, a folder or a pattern to an ordered list of token files of one format."""

from __future__ import annotations

import difflib
import glob
from collections.abc import Sequence
from pathlib import Path

from lightning_parm.data.sources.format import Format


def find_files(path: str, name: str, formats: Sequence[Format]) -> tuple[Path, list[Path], Format]:
    """Return the common folder, the files in the order of their relative names, and their format.

    Args:
        path: a file, a folder (searched with its sub-folders) or a pattern with ``*``, ``?`` or ``[``.
        name: the source's name, for messages.
        formats: the formats to try, in order; the first that matches a file decides.

    Raises:
        ValueError: nothing is there, no file is of a known format, or the files are of several formats.
    """
    root, candidates = _list(path, name)
    matched: dict[str, tuple[Format, list[Path]]] = {}
    for file in candidates:
        for format_ in formats:
            if format_.matches(file):
                matched.setdefault(format_.name, (format_, []))[1].append(file)
                break
    if not matched:
        raise ValueError(
            f"Source {name!r}: no token files in {path} ({len(candidates)} files looked at). Known formats are "
            f"{', '.join(f.name for f in formats)}; turn text into tokens with `lightning-parm tokenize`."
        )
    if len(matched) > 1:
        counts = ", ".join(f"{len(files)} {kind}" for kind, (_, files) in matched.items())
        raise ValueError(
            f"Source {name!r}: {path} mixes formats ({counts}). Name one with format=..., or give a pattern such as "
            f"{path.rstrip('/')}/*{next(iter(matched.values()))[1][0].suffix}."
        )
    format_, files = next(iter(matched.values()))
    return root, files, format_


def _list(path: str, name: str) -> tuple[Path, list[Path]]:
    if glob.has_magic(path) and not Path(path).exists():
        fixed = Path()
        for piece in Path(path).parts:
            if glob.has_magic(piece):
                break
            fixed /= piece
        files = [Path(found) for found in glob.glob(path, recursive=True) if Path(found).is_file()]
        if not files:
            raise ValueError(f"Source {name!r}: no file matches {path}.{_suggest(fixed)}")
    else:
        fixed = Path(path)
        if not fixed.exists():
            raise ValueError(f"Source {name!r}: there is no {path}.{_suggest(fixed)}")
        if fixed.is_file():
            return fixed.parent, [fixed]
        files = [file for file in fixed.rglob("*") if file.is_file()]
    visible = [f for f in files if not any(part.startswith((".", "_")) for part in f.relative_to(fixed).parts)]
    return fixed, sorted(visible, key=lambda file: file.relative_to(fixed).as_posix())


def _suggest(path: Path) -> str:
    """Return a sentence that names what is there instead of the first missing piece of a path."""
    missing = path
    while not missing.parent.exists():
        missing = missing.parent
    if missing.exists():
        return ""
    neighbours = sorted(entry.name for entry in missing.parent.iterdir()) if missing.parent.is_dir() else []
    close = difflib.get_close_matches(missing.name, neighbours, n=3, cutoff=0.5)
    if close:
        return f" Did you mean {' or '.join(str(missing.parent / found) for found in close)}?"
    listed = ", ".join(neighbours[:5]) or "nothing"
    return f" {missing.parent} holds {listed}{', ...' if len(neighbours) > 5 else ''}."
