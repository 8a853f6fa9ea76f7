"""A bounded folder of fetched or decoded parts, shared by the processes of a machine."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

DEFAULT_LIMIT_BYTES = 16 << 30

T = TypeVar("T")


def default_folder() -> Path:
    """Return where indices and parts are kept when nobody says otherwise."""
    return Path.home() / ".cache" / "lightning_parm"


class DiskCache:
    """Files by key; the least recently used go when the limit is passed.

    Several processes may ask for the same key at once: one produces the file, the others wait for it. A file that is
    removed while another process has it mapped stays readable there.

    Args:
        folder: where the files lie.
        limit_bytes: how large the kept files may become; files that are still being written come on top.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes

    def path(self, key: str, suffix: str = "") -> Path:
        """Return where the file of ``key`` lies, if it does."""
        return self.folder / (hashlib.blake2b(key.encode(), digest_size=16).hexdigest() + suffix)

    def fetch(
        self, key: str, produce: Callable[[Path], None], use: Callable[[Path], T], suffix: str = "", inner: bool = False
    ) -> T:
        """Return what ``use`` makes of the file of ``key``, which ``produce`` writes if it is not there.

        A new file is opened before others can see it, so that none of them can remove it too early. A key that is asked
        for while another is produced is an ``inner`` one, on every occasion: those have locks of their own, so that
        nobody waits for a lock that is held by whom it keeps waiting.
        """
        path = self.path(key, suffix)
        name = path.name.removesuffix(suffix)
        with suppress(FileNotFoundError):
            return self._reuse(path, use)
        self.folder.mkdir(parents=True, exist_ok=True)
        stripe = int(name[:2], 16) % 64  # one of 64 lock files, so that they do not pile up
        with self._lock(f"inner.{stripe}" if inner else f"{stripe}"):
            with suppress(FileNotFoundError):
                return self._reuse(path, use)
            partial = self.folder / f".{name}.{os.getpid()}{suffix}"
            try:
                produce(partial)
                with self._lock("room"):  # one at a time: two that made room at once would both fill it
                    self._evict()
                    used = use(partial)
                    partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
        return used

    def _reuse(self, path: Path, use: Callable[[Path], T]) -> T:
        os.utime(path)
        return use(path)

    @contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        with (self.folder / f".lock.{name}").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # closing would not, while a process forked meanwhile has it open

    def _evict(self) -> None:
        """Remove what was not used for longest until all files are within the limit, or nothing is left to remove."""
        entries, total_bytes = [], 0
        for entry in os.scandir(self.folder):
            try:
                status = entry.stat()
            except FileNotFoundError:  # another process was faster
                continue
            total_bytes += status.st_size * entry.is_file()
            if not entry.name.startswith("."):
                entries.append((status.st_mtime_ns, status.st_size, entry.path))
        for _, size, path in sorted(entries):
            if total_bytes <= self.limit_bytes:
                break
            Path(path).unlink(missing_ok=True)
            total_bytes -= size
