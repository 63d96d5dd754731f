"""Files at a fsspec URL, as far as the record needs them.

A store that isn't of this host may take `PATIENCE_S` for each call; a local one, which may be a mount that
hangs, for each commit (`LineageWriter`). On a local disk what was given to `write` and `append`, and before
`settle` to `stage`, is there for good when they return (fsync). A store of objects has it when it says so.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from arriero.engine.patience import Patience

T = TypeVar("T")
PATIENCE_S = 120.0
_AT_ONCE = 8


class FileChangedError(RuntimeError):
    """A file isn't as it was left."""


class Lock:
    """Held until it is closed, or forgotten, or its process ends, however it does."""

    def __init__(self, handle: int | None = None) -> None:
        self._handle = handle

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.close()


class Files:
    """The files in one folder of `url`; names are relative to it."""

    def __init__(self, url: str, folder: str) -> None:
        found: Any = fsspec
        self._patience = Patience(f"the store of the record {url}", PATIENCE_S)
        self._fs, root = self._patience.call("connect", lambda: found.url_to_fs(url))
        self.root = f"{root.rstrip('/')}/{folder}"
        protocol: Any = self._fs.protocol
        protocols = {protocol} if isinstance(protocol, str) else {*protocol}
        self.local = "file" in protocols
        self._staged: dict[Path, Path] = {}
        self._changed: set[Path] = set()  # folders with names that may be in memory only

    def patiently(self, what: str, work: Callable[[], T]) -> T:
        """A call of the store. TimeoutError, naming it, if one that isn't of this host doesn't answer."""
        return work() if self.local else self._patience.call(what, work)

    def hurry(self, bound_s: float) -> None:
        """From now on a store that isn't of this host may take no longer than that for a call."""
        self._patience.hurry(bound_s)

    def names(self, ending: str) -> list[str]:
        """In order; none where there is no folder."""
        try:
            found = self.patiently(f"list {self.root}", lambda: self._fs.ls(self.root, detail=False))
        except FileNotFoundError:
            return []
        return sorted(str(p).rpartition("/")[2] for p in found if str(p).endswith(ending))

    def sizes(self, ending: str) -> dict[str, int]:
        """Bytes of the files that are called so, in order of their names, as they are now."""
        self._fs.invalidate_cache(self.root)
        try:
            found = self.patiently(f"list {self.root}", lambda: self._fs.ls(self.root, detail=True))
        except FileNotFoundError:
            return {}
        known = {str(f["name"]).rpartition("/")[2]: int(f["size"] or 0) for f in found}
        return {name: known[name] for name in sorted(known) if name.endswith(ending)}

    def below(self) -> list[str]:
        """All files in the folder and the folders in it."""
        try:
            found = self.patiently(f"list {self.root}", lambda: self._fs.find(self.root))
        except FileNotFoundError:
            return []
        return sorted(str(p).removeprefix(self.root).lstrip("/") for p in found)

    def read(self, name: str) -> bytes:
        path = f"{self.root}/{name}"
        return self.patiently(f"give {path}", lambda: bytes(self._fs.cat_file(path)))

    def write(self, name: str, data: bytes) -> None:
        """The whole file, in place of what was there; a reader, or a kill, never meets a part of it."""
        self.stage(name, data)
        self.settle()

    def stage(self, name: str, data: bytes) -> None:
        """The same with the next `settle`; until then what was there before is read."""
        path = f"{self.root}/{name}"
        if not self.local:
            self.patiently(f"take {path}", lambda: self._fs.pipe_file(path, data))
            return
        # Two processes may make the same file of an index at once: each puts a whole one in its place.
        part = Path(f"{path}.{os.getpid()}-{secrets.token_hex(4)}.part")
        try:
            part.write_bytes(data)
        except FileNotFoundError:
            made = [folder for folder in part.parents if not folder.exists()]
            part.parent.mkdir(parents=True, exist_ok=True)
            self._changed.update(folder.parent for folder in made)
            part.write_bytes(data)
        self._staged[part] = Path(path)

    def locked(self) -> Lock | None:
        """For the one who writes here; None if somebody has it. Of `local` files alone."""
        if not self.local:
            return Lock()
        path = Path(self.root).parent / "lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        return Lock(handle)

    def append(self, name: str, data: bytes, *, at: int) -> None:
        """To a file that is there already, of `at` bytes; only where files are `local`.

        Raises FileChangedError if it has another size.
        If that fails (a full disk, say), the file is as it was, for the next append must not follow a part.
        """
        with Path(f"{self.root}/{name}").open("ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if size != at:
                raise FileChangedError(f"{name} has {size} bytes, not {at}")
            left = memoryview(data)
            try:
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(size)
                raise

    def made(self, folder: str) -> None:
        """Somebody else has made this folder; its name and those above it go with the next `settle`."""
        path = Path(f"{self.root}/{folder}")
        if self.local:
            self._changed.update(
                (path, *(p for p in path.parents if p.is_relative_to(Path(self.root).parent)))
            )

    def settle(self) -> None:
        """What was staged takes its place and lasts, with all new names, whatever happens to the machine."""
        if not self._staged and not self._changed:
            return
        with ThreadPoolExecutor(_AT_ONCE) as pool:  # together they share a few commits of the file system
            list(pool.map(_sync, self._staged))
            for part, path in self._staged.items():
                part.replace(path)
                self._changed.add(path.parent)
            list(pool.map(_sync, self._changed))
        self._staged.clear()
        self._changed.clear()

    def remove(self, name: str) -> None:
        path = f"{self.root}/{name}"
        self.patiently(f"remove {path}", lambda: self._fs.rm_file(path))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
