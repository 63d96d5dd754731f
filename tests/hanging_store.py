"""A store of fsspec that really hangs: what it is asked to do doesn't come back."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class HangingStore(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Memory, but while `goes_on` isn't set, nothing comes back of what is about paths with `stuck`."""

    protocol = "stuck"
    goes_on = threading.Event()
    asked: ClassVar[list[str]] = []
    stuck = ""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: object) -> None:
        self._stand_still(path)
        plain: Any = super()
        plain.pipe_file(path, value, mode, **kwargs)

    def cat_file(self, path: str, *args: object, **kwargs: object) -> bytes:
        self._stand_still(path)
        plain: Any = super()
        return bytes(plain.cat_file(path, *args, **kwargs))

    def _stand_still(self, path: str) -> None:
        if self.stuck in path and not self.goes_on.is_set():
            self.asked.append(path)
            self.goes_on.wait(60)


@contextmanager
def hanging_at(path: str) -> Generator[str, None, None]:
    """The URL of a store that hangs on paths with `path` in them, inside."""
    registry: Any = fsspec
    registry.register_implementation("stuck", HangingStore, clobber=True)
    HangingStore.asked.clear()
    HangingStore.stuck = path
    HangingStore.goes_on.clear()
    try:
        yield f"stuck://{secrets.token_hex(4)}"
    finally:
        HangingStore.goes_on.set()
