"""Where the checkpoints of a trainer stand, at any fsspec URL, and which of them count.

    <url>/<version, nine digits>/shard-00001-model-....safetensors ...    written first, by all ranks
    <url>/<version>/checkpoint.json                                       the mark, written last

Killed at any moment, a checkpoint has no mark or one that names every file with its hash. What has no mark,
or isn't what its mark says, is passed over, and said. A store that doesn't answer raises TimeoutError.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
from pydantic import ValidationError

from arriero.engine.patience import Patience
from arriero.schemas.checkpoints import CheckpointFile, CheckpointMark

MARK = "checkpoint.json"
PATIENCE_S = 300.0
_DIGITS = 9
_log = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints at `url`. Looking needs no torch; the files are what `checkpoint_files` writes.

    Each call of the store, and each file, may take `patience_s`.
    """

    def __init__(self, url: str, patience_s: float = PATIENCE_S) -> None:
        found: Any = fsspec
        self.patience = Patience(f"the store of checkpoints {url}", patience_s)
        self._fs, root = self.patience.call("connect", lambda: found.url_to_fs(url))
        self._root = str(root).rstrip("/")
        protocol: Any = self._fs.protocol
        self.local = "file" in ({protocol} if isinstance(protocol, str) else {*protocol})

    def place(self, version: int) -> str:
        """The directory of a version; a path of this machine if the store is `local`."""
        return f"{self._root}/{version:0{_DIGITS}}"

    def versions(self) -> list[int]:
        """All that was begun, ascending, whole or not."""
        try:
            found = self.patience.call("list", lambda: self._fs.ls(self._root, detail=False))
        except FileNotFoundError:
            return []
        names = [str(p).rstrip("/").rpartition("/")[2] for p in found]
        return sorted(int(n) for n in names if n.isdigit() and len(n) >= _DIGITS)

    def mark(self, version: int) -> CheckpointMark:
        """Raises ValueError saying why there is none that counts; its files are not looked at."""
        path = f"{self.place(version)}/{MARK}"
        try:
            data = self.patience.call(f"read {path}", lambda: bytes(self._fs.cat_file(path)))
            found = CheckpointMark.model_validate_json(data)
        except FileNotFoundError:
            raise ValueError("it wasn't written to its end") from None
        except ValidationError as error:
            raise ValueError(f"its mark can't be read: {error.errors()[0]['msg']}") from None
        if found.version != version:
            raise ValueError(f"its mark is that of version {found.version}")
        if not found.files:
            raise ValueError("its mark names no files")
        return found

    def problem(self, version: int) -> str:
        """Why the checkpoint doesn't count; empty if it does. Reads every file, for its hash."""
        try:
            mark = self.mark(version)
        except ValueError as error:
            return str(error)
        for file in mark.files:
            path = f"{self.place(version)}/{file.name}"
            try:
                size, digest = self.patience.call(f"read {path}", partial(_measured, self._fs, path))
            except FileNotFoundError:
                return f"{file.name} is missing"
            if size != file.bytes:
                return f"{file.name} has {size} bytes, {file.bytes} were written"
            if digest != file.sha256:
                return f"{file.name} was changed since"
        return ""

    def newest(self, *, at_most: int | None = None) -> int | None:
        """The newest version (up to `at_most`) whose checkpoint counts; None without one.

        Every one that is passed over is said in the log, with the reason.
        """
        for version in reversed(self.versions()):
            if at_most is not None and version > at_most:
                continue
            if not (why := self.problem(version)):
                return version
            _log.warning("the checkpoint of version %d at %s is passed over: %s", version, self._root, why)
        return None

    def remove(self, version: int) -> None:
        """The mark first, so that a checkpoint that is half removed doesn't count."""
        self.patience.call(f"remove version {version}", lambda: self._remove(self.place(version)))

    def _remove(self, path: str) -> None:
        if self._fs.exists(f"{path}/{MARK}"):
            self._fs.rm_file(f"{path}/{MARK}")
        if self._fs.exists(path):
            self._fs.rm(path, recursive=True)

    def begin(self, version: int) -> None:
        """An empty directory for a version, in place of whatever was there."""
        self.remove(version)
        place = self.place(version)
        self.patience.call(f"make {place}", lambda: self._fs.makedirs(place, exist_ok=True))

    def take(self, version: int, directory: Path, names: Sequence[str]) -> list[CheckpointFile]:
        """Put the files `names` of `directory` there for good; what the mark is to say of them."""
        files: list[CheckpointFile] = []
        for name in names:
            work = partial(self._take, directory / name, f"{self.place(version)}/{name}")
            files.append(self.patience.call(f"take {name} of version {version}", work))
        return files

    def _take(self, path: Path, target: str) -> CheckpointFile:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            if self.local:
                os.fsync(file.fileno())
        if not self.local:
            self._fs.put_file(str(path), target)
        return CheckpointFile(name=path.name, bytes=path.stat().st_size, sha256=digest)

    def fetch(self, version: int, directory: Path) -> None:
        """Copy the files of a version to `directory`."""
        for file in self.mark(version).files:
            path = f"{self.place(version)}/{file.name}"
            work = partial(self._fs.get_file, path, str(directory / file.name))
            self.patience.call(f"read {path}", work)

    def commit(self, mark: CheckpointMark) -> None:
        """From now on it counts."""
        self.patience.call(f"mark version {mark.version}", lambda: self._commit(mark))

    def _commit(self, mark: CheckpointMark) -> None:
        data, path = mark.model_dump_json(indent=2).encode(), f"{self.place(mark.version)}/{MARK}"
        if not self.local:
            self._fs.pipe_file(path, data)
            return
        part = Path(f"{path}.part")
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        _sync_directory(part.parent)

    def keep_newest(self, number: int) -> None:
        """Remove what is older than the newest `number` with a mark; what has none and is older goes too."""
        marked = [v for v in self.versions() if self._marked(v)]
        kept = marked[-number:]
        for version in self.versions():
            if kept and version < kept[0]:
                self.remove(version)

    def _marked(self, version: int) -> bool:
        path = f"{self.place(version)}/{MARK}"
        return self.patience.call(f"look for {path}", lambda: bool(self._fs.exists(path)))

    def forget_after(self, version: int) -> None:
        """Remove all that are newer than `version`."""
        for newer in self.versions():
            if newer > version:
                self.remove(newer)


def _measured(fs: Any, path: str) -> tuple[int, str]:
    """Bytes and SHA-256 of a file."""
    with fs.open(path, "rb") as file:
        return int(fs.size(path)), hashlib.file_digest(file, "sha256").hexdigest()


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
