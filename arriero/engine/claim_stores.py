"""Where claimed payloads lie: a folder in the memory of this host, or any fsspec URL."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

from arriero.engine.nats_names import token


class ClaimStore(Protocol):
    """Payloads by edge and name, held until every group has released them. All calls block."""

    @property
    def bounded(self) -> bool:
        """Whether it lies in memory, so that the capacity of the edges must hold for it too."""
        ...

    def url(self, edge: str, name: str) -> str:
        """For messages."""
        ...

    def write(self, edge: str, name: str, groups: tuple[str, ...], payload: bytes) -> None: ...

    def read(self, edge: str, name: str, group: str) -> bytes:
        """Raises OSError if it isn't there."""
        ...

    def release(self, edge: str, name: str, group: str, groups: tuple[str, ...]) -> None:
        """`group` doesn't need it any more; the last one frees its bytes. Idempotent."""
        ...

    def bury(self, edge: str, name: str, group: str) -> None:
        """`group` gave it up: keep it, but not as a part of the edge. Idempotent."""
        ...

    def held(self, edge: str) -> int:
        """Bytes of the payloads of an edge."""
        ...

    def destroy(self) -> None: ...


class FolderStore:
    """Files in one folder, for processes of one host; the name of the run makes it unique.

    Each group has its own hard link to a payload, so the bytes are free when the last one is removed,
    whatever happened to the processes. Folders are 0700, files 0600.
    """

    bounded = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def in_memory(cls, run: str) -> FolderStore:
        """In /dev/shm."""
        return cls(Path("/dev/shm") / f"arriero-{run}")

    def _path(self, edge: str, name: str, group: str) -> Path:
        if not name.isalnum():
            raise FileNotFoundError(f"{name!r} is no name of a payload")
        return self.folder / token(edge) / f"{name}.{token(group)}"

    def _grave(self, edge: str, name: str, group: str) -> Path:
        if not name.isalnum():
            raise FileNotFoundError(f"{name!r} is no name of a payload")
        return self.folder / "=dead" / token(edge) / f"{name}.{token(group)}"

    def url(self, edge: str, name: str) -> str:
        return f"file://{self.folder / token(edge) / name}"

    def write(self, edge: str, name: str, groups: tuple[str, ...], payload: bytes) -> None:
        first, *others = (self._path(edge, name, group) for group in groups)
        try:
            self._write(first, payload)
            for other in others:
                os.link(first, other)
        except OSError:
            for path in (first, *others):
                with contextlib.suppress(OSError):
                    path.unlink()
            raise

    def _write(self, path: Path, payload: bytes) -> None:
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileNotFoundError:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(file, "wb", buffering=0) as out:
            rest = memoryview(payload)
            while rest:
                rest = rest[out.write(rest) :]

    def read(self, edge: str, name: str, group: str) -> bytes:
        try:
            return self._path(edge, name, group).read_bytes()
        except FileNotFoundError:
            return self._grave(edge, name, group).read_bytes()

    def release(self, edge: str, name: str, group: str, groups: tuple[str, ...]) -> None:
        self._path(edge, name, group).unlink(missing_ok=True)

    def bury(self, edge: str, name: str, group: str) -> None:
        grave = self._grave(edge, name, group)
        grave.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self._path(edge, name, group).rename(grave)

    def held(self, edge: str) -> int:
        sizes: dict[int, int] = {}
        nothing_yet = (FileNotFoundError, NotADirectoryError)
        with contextlib.suppress(*nothing_yet), os.scandir(self.folder / token(edge)) as found:
            for entry in found:
                with contextlib.suppress(FileNotFoundError):  # released meanwhile
                    stat = entry.stat()
                    sizes[stat.st_ino] = stat.st_size
        return sum(sizes.values())

    def destroy(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class _FileSystem(Protocol):
    """The part of fsspec's file systems that is used here; the package has no types."""

    def pipe_file(self, path: str, value: bytes) -> None: ...
    def cat_file(self, path: str) -> bytes: ...
    def find(self, path: str, *, prefix: str = "") -> list[str]: ...
    def makedirs(self, path: str, *, exist_ok: bool) -> None: ...
    def exists(self, path: str) -> bool: ...
    def rm_file(self, path: str) -> None: ...
    def rm(self, path: str, recursive: bool = False) -> None: ...


class UrlStore:
    """Objects under an fsspec URL, for processes of several hosts.

    Each group that has acknowledged leaves a mark beside the payload; who sees all marks removes payload and
    marks. The space isn't bounded by the capacity of the edges.
    """

    bounded = False

    def __init__(self, url: str) -> None:
        import fsspec.core

        self._url = url.rstrip("/")
        url_to_fs = fsspec.core.url_to_fs  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        find = cast(Callable[[str], tuple[_FileSystem, str]], url_to_fs)
        self._system, self._root = find(self._url)

    def _object(self, edge: str, name: str) -> str:
        if not name.isalnum():
            raise FileNotFoundError(f"{name!r} is no name of a payload")
        return f"{self._root}/{token(edge)}/{name}"

    def url(self, edge: str, name: str) -> str:
        return f"{self._url}/{token(edge)}/{name}"

    def write(self, edge: str, name: str, groups: tuple[str, ...], payload: bytes) -> None:
        path = self._object(edge, name)
        self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._system.pipe_file(path, payload)

    def read(self, edge: str, name: str, group: str) -> bytes:
        return self._system.cat_file(self._object(edge, name))

    def release(self, edge: str, name: str, group: str, groups: tuple[str, ...]) -> None:
        path = self._object(edge, name)
        marks = [f"{path}.done.{token(g)}" for g in groups]
        if len(groups) > 1:
            if not self._system.exists(path):
                return
            self._system.pipe_file(f"{path}.done.{token(group)}", b"")
            if not all(self._system.exists(mark) for mark in marks):
                return
        for found in (path, *(marks if len(groups) > 1 else ())):
            with contextlib.suppress(FileNotFoundError):
                self._system.rm_file(found)

    def bury(self, edge: str, name: str, group: str) -> None:
        """Nothing to do: without the mark of `group` it stays."""

    def held(self, edge: str) -> int:
        raise NotImplementedError("the space of an object store isn't counted")

    def destroy(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._system.rm(self._root, recursive=True)
