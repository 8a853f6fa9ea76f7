"""Where a source's files lie: a folder of this machine, or anything that fsspec reaches by a URL."""

from __future__ import annotations

import os
import shutil
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from lightning_parm.data.sources.cache import DiskCache

_ATTEMPTS = 5
_FIRST_PAUSE_SECONDS = 0.2


class Place(Protocol):
    """An ordered list of files, by names relative to a common root."""

    names: list[str]

    def signature(self, name: str) -> str:
        """Return what changes when the file does: its size and time of change."""
        ...

    def path(self, name: str) -> Path:
        """Return the whole file as a file of this machine, to be looked into until :meth:`release`."""
        ...

    def release(self, name: str) -> None:
        """Say that the whole file is not needed any more; with ``""``, that none is."""
        ...

    def describe(self, name: str) -> str:
        """Return how to call the file in a message."""
        ...


class LocalPlace:
    """A folder."""

    def __init__(self, root: Path, names: list[str]) -> None:
        self.root = root
        self.names = names

    def signature(self, name: str) -> str:
        """Return size and time of change of the file, and of an index that a format has beside it."""
        path = os.path.join(self.root, name)
        marks = []
        for file in (path, f"{os.path.splitext(path)[0]}.idx", os.path.join(os.path.dirname(path), "index.json")):
            with suppress(FileNotFoundError):
                status = os.stat(file)
                marks.append(f"{status.st_size}/{status.st_mtime_ns}")
        return " ".join(marks)

    def path(self, name: str) -> Path:
        """Return where the file is."""
        return self.root / name

    def release(self, name: str) -> None:
        """Keep it: the file is the user's."""

    def describe(self, name: str) -> str:
        """Return the path."""
        return str(self.root / name)


class RemotePlace:
    """Objects behind a URL (``s3://``, ``gs://``, ``https://``, ``memory://`` ...), kept in a bounded local cache.

    Args:
        url: a folder, a file or a pattern.
        cache: where fetched files and parts are kept.

    Raises:
        ValueError: nothing is at the URL, or fsspec or a file system of it is not installed.
    """

    def __init__(self, url: str, cache: DiskCache) -> None:
        try:
            import fsspec

            self._files, root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            raise ValueError(f"{url} needs a package that is not installed: {error}") from None
        self.url = url
        self._cache = cache
        self._mirror = cache.folder / f".whole.{uuid.uuid4().hex}"
        self._signatures: dict[str, str] = {}
        if any(sign in root for sign in "*?["):
            found = self._retry(url, lambda: self._files.glob(root))
            root = root[: min(root.index(sign) for sign in "*?[" if sign in root)].rpartition("/")[0]
        else:
            found = self._retry(url, lambda: self._files.find(root))
            if found == [root]:
                root = root.rpartition("/")[0]
        self._root = root.rstrip("/")
        listed = sorted(str(path)[len(self._root) + 1 :] for path in found)
        self.names = [name for name in listed if name and not any(p.startswith((".", "_")) for p in name.split("/"))]

    def signature(self, name: str) -> str:
        """Return the size and whatever the file system says about the version; asked once."""
        if name in self._signatures:
            return self._signatures[name]
        info = self._retry(self.describe(name), lambda: self._files.info(self._full(name)))
        marks = [str(info[key]) for key in ("ETag", "etag", "LastModified", "mtime", "created") if info.get(key)]
        self._signatures[name] = "/".join([str(info.get("size")), *marks[:1]])
        return self._signatures[name]

    def path(self, name: str) -> Path:
        """Fetch the whole file, and what lies beside it under the same stem or as ``index.json``."""
        stem, folder = name.rpartition(".")[0], name.rpartition("/")[0]
        beside = [stem + ".idx", f"{folder}/index.json".lstrip("/")]
        for other in [*(o for o in beside if o in self.names and o != name), name]:
            path = self._mirror / other
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                partial = path.with_name(f".{path.name}.{threading.get_ident()}")
                self._get(other, partial)
                partial.replace(path)
        return path

    def release(self, name: str) -> None:
        """Remove the fetched file, or with ``""`` all of them."""
        if name:
            (self._mirror / name).unlink(missing_ok=True)
        else:
            shutil.rmtree(self._mirror, ignore_errors=True)

    def kept(self, name: str) -> Path:
        """Fetch the whole file into the bounded cache, for formats that decode parts of it."""
        key, suffix = f"{self.describe(name)}/{self.signature(name)}", Path(name).suffix
        self._cache.fetch(key, lambda path: self._get(name, path), lambda path: None, suffix, inner=True)
        return self._cache.path(key, suffix)

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes ``[start, stop)`` of a file by a range request."""
        read: bytes = self._retry(
            self.describe(name), lambda: self._files.cat_file(self._full(name), start=start, end=stop)
        )
        if len(read) != stop - start:
            raise RuntimeError(f"{self.describe(name)} gave {len(read)} bytes for the range {start}-{stop}.")
        return read

    def describe(self, name: str) -> str:
        """Return the object's URL."""
        return str(self._files.unstrip_protocol(self._full(name)))

    def _full(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _get(self, name: str, target: Path) -> None:
        self._retry(self.describe(name), lambda: self._files.get_file(self._full(name), str(target)))

    def _retry(self, what: str, action: Any) -> Any:
        for attempt in range(_ATTEMPTS):
            try:
                return action()
            except FileNotFoundError:
                raise ValueError(f"There is no {what}.") from None
            except Exception as error:  # every file system has errors of its own
                if attempt == _ATTEMPTS - 1:
                    raise RuntimeError(f"{what} cannot be read after {_ATTEMPTS} attempts: {error!r}.") from error
                time.sleep(_FIRST_PAUSE_SECONDS * 2**attempt)
        raise AssertionError("unreachable")
