"""The formats that are known, and opening the sources of a mix with them."""

from __future__ import annotations

from lightning_parm.data.sources.arrow import ArrowFormat
from lightning_parm.data.sources.format import Format
from lightning_parm.data.sources.source import Source

FORMATS: tuple[Format, ...] = (ArrowFormat(),)


def open_sources(sources: str | dict[str, str], delimiter: int | None = None, bad_files: str = "raise") -> list[Source]:
    """Find and index every source.

    Args:
        sources: a path (file, folder or pattern), or ``{name: path}``; a single path is named ``"data"``.
        delimiter: token put between documents; ``None`` takes what the files say.
        bad_files: ``"raise"`` or ``"skip"``.

    Raises:
        ValueError: there are no sources, or one has no readable file.
    """
    named = {"data": sources} if isinstance(sources, str) else dict(sources)
    if not named:
        raise ValueError("sources is empty: give a path, or a dictionary from names to paths.")
    return [Source.find(name, path, FORMATS, delimiter, bad_files) for name, path in named.items()]
