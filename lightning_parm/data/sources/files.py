"""From a path, a folder, a pattern or a URL to an ordered list of token files of one format."""

from __future__ import annotations

import difflib
import glob
import json
import os
from collections.abc import Sequence
from pathlib import Path

from lightning_parm.data.sources.cache import DiskCache
from lightning_parm.data.sources.format import Format
from lightning_parm.data.sources.places import LocalPlace, Place, RemotePlace


def find_files(path: str, name: str, formats: Sequence[Format], cache: DiskCache) -> tuple[Place, Format]:
    """Return where the token files of a source lie, in order, and their format.

    Args:
        path: a file, a folder (searched with its sub-folders), a pattern with ``*``, ``?`` or ``[``, or a URL.
        name: the source's name, for messages.
        formats: the formats to try, in order; the first that matches a file decides.
        cache: where fetched files are kept.

    Raises:
        ValueError: nothing is there, no file is of a known format, or the files are of several formats.
    """
    place: Place = RemotePlace(path, cache) if "://" in path else _list(path, name)
    matched: dict[str, tuple[Format, list[str]]] = {}
    for file in place.names:
        if isinstance(place, RemotePlace) and matched:  # one look over the network tells for all of that suffix
            _, files = next(iter(matched.values()))
            files += [file] * (Path(file).suffix == Path(files[0]).suffix)
            continue
        for format_ in formats:
            if format_.matches(place.path(file)):
                matched.setdefault(format_.name, (format_, []))[1].append(file)
                break
        place.release(file)
    place.release("")
    if not matched:
        raise ValueError(
            f"Source {name!r}: no token files in {path} ({len(place.names)} files looked at). Known formats are "
            f"{', '.join(f.name for f in formats)} (and raw, with dtype=...); turn text into tokens with "
            f"`lightning-parm tokenize`."
        )
    if len(matched) > 1:
        counts = ", ".join(f"{len(files)} {kind}" for kind, (_, files) in matched.items())
        raise ValueError(
            f"Source {name!r}: {path} mixes formats ({counts}). Name one with format=..., or give a pattern such as "
            f"{path.rstrip('/')}/*{Path(next(iter(matched.values()))[1][0]).suffix}."
        )
    format_, place.names = next(iter(matched.values()))
    return place, format_


def find_sources(path: str, formats: Sequence[Format]) -> dict[str, str]:
    """Return the sources that one path stands for: each sub-folder of token files, or all of it as ``"data"``.

    A folder without token files of its own whose sub-folders hold some is a mix, as fms-fsdp lays it out.
    """
    folder = Path(path)
    if "://" in path or not folder.is_dir():
        return {"data": path}

    def holds_tokens(files: list[Path]) -> bool:
        return any(file.is_file() and any(f.matches(file) for f in formats) for file in files)

    entries = [folder / name for name in sorted(os.listdir(folder)) if not name.startswith((".", "_"))]
    if holds_tokens(entries):
        return {"data": path}
    found = {
        entry.name: str(entry)
        for entry in entries
        if entry.is_dir() and holds_tokens([entry / name for name in _walk(entry)])
    }
    return found or {"data": path}


def selected_rows(place: Place) -> tuple[str, ...]:
    """Return the indices files of a Hugging Face ``datasets`` folder: which rows of its files belong to it."""
    state = _datasets_state(place.root) if isinstance(place, LocalPlace) else {}
    return tuple(str(entry["filename"]) for entry in state.get("_indices_data_files") or [])


def _list(path: str, name: str) -> LocalPlace:
    if glob.has_magic(path) and not Path(path).exists():
        root = Path()
        for piece in Path(path).parts:
            if glob.has_magic(piece):
                break
            root /= piece
        files = [Path(found) for found in glob.glob(path, recursive=True) if Path(found).is_file()]
        if not files:
            raise ValueError(f"Source {name!r}: no file matches {path}.{_suggest(root)}")
    else:
        root = Path(path)
        if not root.exists():
            raise ValueError(f"Source {name!r}: there is no {path}.{_suggest(root)}")
        if root.is_file():
            return LocalPlace(root.parent, [root.name])
        if (root / "dataset_dict.json").is_file():
            splits = json.loads((root / "dataset_dict.json").read_text()).get("splits", [])
            raise ValueError(f"Source {name!r}: {path} holds several splits ({', '.join(splits)}). Name one of them.")
        state = _datasets_state(root)
        if state:
            return LocalPlace(root, [entry["filename"] for entry in state["_data_files"]])
        return LocalPlace(root, _walk(root))
    names = sorted(file.relative_to(root).as_posix() for file in files)
    return LocalPlace(root, [name for name in names if not any(p.startswith((".", "_")) for p in name.split("/"))])


def _walk(root: Path) -> list[str]:
    """Return the visible files below a folder in order; plain strings, because there may be very many."""
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        inside = Path(folder).relative_to(root).as_posix()
        prefix = "" if inside == "." else f"{inside}/"
        visible = [name for name in files if not name.startswith((".", "_"))]
        names += [prefix + name for name in visible if os.path.isfile(os.path.join(folder, name))]
    return sorted(names)


def _datasets_state(root: Path) -> dict[str, list[dict[str, str]]]:
    """Return the ``state.json`` of a folder that Hugging Face ``datasets`` saved, or nothing."""
    try:
        state = json.loads((root / "state.json").read_text())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) and "_data_files" in state else {}


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
