"""Files at a fsspec URL, as far as the record needs them.

On a local disk what `write` and `append` were given stands there when they return (fsync); the names of new
files do after `settle`. A store of objects has them when it says so.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import fsspec


class Files:
    """The files in one folder of `url`; names are relative to it."""

    def __init__(self, url: str, folder: str) -> None:
        found: Any = fsspec
        self._fs, root = found.url_to_fs(url)
        self.root = f"{root.rstrip('/')}/{folder}"
        protocol: Any = self._fs.protocol
        protocols = {protocol} if isinstance(protocol, str) else {*protocol}
        self.local = "file" in protocols
        self._changed: set[Path] = set()  # folders with names that may be in memory only

    def names(self, ending: str) -> list[str]:
        """In order; none where there is no folder."""
        try:
            found = self._fs.ls(self.root, detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(p).rpartition("/")[2] for p in found if str(p).endswith(ending))

    def read(self, name: str) -> bytes:
        return bytes(self._fs.cat_file(f"{self.root}/{name}"))

    def write(self, name: str, data: bytes) -> None:
        """The whole file, in place of what was there; a reader, or a kill, never meets a part of it."""
        path = f"{self.root}/{name}"
        if not self.local:
            self._fs.pipe_file(path, data)
            return
        part = Path(f"{path}.part")
        try:
            _write(part, "wb", data)
        except FileNotFoundError:
            made = [folder for folder in part.parents if not folder.exists()]
            part.parent.mkdir(parents=True, exist_ok=True)
            self._changed.update(folder.parent for folder in made)
            _write(part, "wb", data)
        part.replace(path)
        self._changed.add(part.parent)

    def append(self, name: str, data: bytes) -> None:
        """To a file that is there already; only where files are `local`."""
        _write(Path(f"{self.root}/{name}"), "ab", data)

    def made(self, folder: str) -> None:
        """Somebody else has made this folder; its name and those above it go with the next `settle`."""
        path = Path(f"{self.root}/{folder}")
        if self.local:
            self._changed.update(
                (path, *(p for p in path.parents if p.is_relative_to(Path(self.root).parent)))
            )

    def settle(self) -> None:
        """Make the names of all files that were written last, whatever happens to the machine."""
        for folder in self._changed:
            handle = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        self._changed.clear()

    def remove(self, name: str) -> None:
        self._fs.rm_file(f"{self.root}/{name}")


def _write(path: Path, mode: Literal["wb", "ab"], data: bytes) -> None:
    with path.open(mode) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
