"""Files at a fsspec URL, as far as the record needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
            part.write_bytes(data)
        except FileNotFoundError:
            part.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(data)
        part.replace(path)

    def append(self, name: str, data: bytes) -> None:
        """To a file that is there already; only where files are `local`."""
        with Path(f"{self.root}/{name}").open("ab") as file:
            file.write(data)

    def remove(self, name: str) -> None:
        self._fs.rm_file(f"{self.root}/{name}")
