"""Where measured constants and the indices of data are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_parm.data.sources.cache import default_folder


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/lightning_parm``, or the folder under ``~/.cache`` that the data wing takes by itself.

    Example:
        >>> cache_folder().name
        'lightning_parm'
    """
    root = os.environ.get("XDG_CACHE_HOME")
    return Path(root) / "lightning_parm" if root else default_folder()
