"""A checkpoint's folder, on a disk or behind a URL that fsspec knows."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future


class _LocalReader(dcp.FileSystemReader):
    """Reads the metadata once, and names the file that it cannot read."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            try:
                self._metadata = super().read_metadata(*args, **kwargs)
            except Exception as error:
                raise self._damaged(".metadata", error) from error
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            try:
                super().read_data(replace(plan, items=items), planner)
            except Exception as error:
                raise self._damaged(name, error) from error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _damaged(self, name: str, error: Exception) -> RuntimeError:
        return RuntimeError(
            f"The file '{self.path}/{name}' of a checkpoint is missing or damaged ({type(error).__name__}: {error}). "
            "Restore it from a copy, or resume from another checkpoint."
        )


class _UrlReader(_LocalReader, FsspecReader):
    """The same behind a URL."""


class Folder:
    """The few operations that a checkpoint needs of a folder.

    Args:
        path: A local path, or a URL such as ``"s3://bucket/run/step=500.ckpt"``.
        storage_options: Arguments of the URL's filesystem.

    Example:
        >>> folder = Folder("memory://run/last.ckpt")
        >>> folder.create()
        >>> folder.write("meta.pt", b"all of it")
        >>> folder.entries(), folder.open("meta.pt").read()
        (['meta.pt'], b'all of it')
        >>> folder.remove()
        >>> folder.exists()
        False
    """

    def __init__(self, path: str | Path, storage_options: Mapping[str, Any] | None = None) -> None:
        self._options = dict(storage_options or {})
        self._fs, self._path = url_to_fs(str(path), **self._options)
        self._local = type(self._fs) is LocalFileSystem
        self.name = self._path if self._local else str(path)

    def __str__(self) -> str:
        return self.name

    def __truediv__(self, entry: str) -> str:
        return f"{self.name.rstrip('/')}/{entry}"

    def _inside(self, entry: str) -> str:
        return f"{self._path.rstrip('/')}/{entry}"

    def exists(self, entry: str = "") -> bool:
        """Whether the folder, or an entry in it, exists."""
        return bool(self._fs.exists(self._inside(entry) if entry else self._path))

    def is_folder(self) -> bool:
        """Whether there is a folder of this name, rather than a file or nothing."""
        return bool(self._fs.isdir(self._path))

    def is_link(self) -> bool:
        """Whether this is a link to another folder."""
        return self._local and os.path.islink(self._path)

    def create(self) -> None:
        """Make the folder and those above it; a file of this name gets another, until :meth:`forget_file`."""
        if self._fs.isfile(self._path):
            self._fs.mv(self._path, self._replaced)
        self._fs.makedirs(self._path, exist_ok=True)

    def forget_file(self) -> None:
        """Remove the file that :meth:`create` found in the folder's place, if there was one."""
        if self._fs.exists(self._replaced):
            self._fs.rm(self._replaced)

    @property
    def _replaced(self) -> str:
        return f"{self._path.removesuffix('.ckpt')}-replaced"  # never taken for a checkpoint

    def entries(self) -> list[str]:
        """Names of what is in the folder, sorted."""
        return sorted(str(path).rstrip("/").rsplit("/", 1)[-1] for path in self._fs.ls(self._path, detail=False))

    def modified(self, entry: str) -> Any:
        """When an entry was written last."""
        return self._fs.modified(self._inside(entry))

    def open(self, entry: str) -> BinaryIO:
        """Open an entry for reading."""
        return cast(BinaryIO, self._fs.open(self._inside(entry), "rb"))

    def write(self, entry: str, content: bytes) -> None:
        """Write an entry so that readers find the old content or the new one and, on a local disk, a crash too."""
        partial, whole = self._inside(f"{entry}.partial"), self._inside(entry)
        if not self._local:
            self._fs.pipe_file(partial, content)
            self._fs.mv(partial, whole)
            return
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, whole)
        with suppress(OSError):  # some filesystems have no open directories
            directory = os.open(self._path, os.O_RDONLY)
            os.fsync(directory)
            os.close(directory)

    def remove(self, entry: str = "") -> None:
        """Remove an entry or the whole folder, if it exists; of a link, the link."""
        path = self._inside(entry) if entry else self._path
        if self._local and os.path.islink(path):
            os.unlink(path)
        elif self._local and os.path.isdir(path):
            shutil.rmtree(path)
        elif self._fs.exists(path):
            self._fs.rm(path, recursive=True)

    def beside(self) -> list[Folder]:
        """The other folders of the folder that this one is in."""
        parent = Folder(self.name.rstrip("/").rsplit("/", 1)[0], self._options)
        others = [Folder(parent / entry, self._options) for entry in parent.entries()]
        return [other for other in others if other.name != self.name and other.is_folder()]

    def writer(self, entry: str) -> dcp.StorageWriter:
        """What torch.distributed.checkpoint writes a folder of shards with."""
        if self._local:
            return dcp.FileSystemWriter(self / entry)
        return FsspecWriter(self / entry, sync_files=False, **self._options)

    def reader(self, entry: str) -> dcp.FileSystemReader:
        """What torch.distributed.checkpoint reads a folder of shards with; it names files that it cannot read."""
        if self._local:
            return _LocalReader(self / entry)
        return _UrlReader(self / entry, **self._options)
