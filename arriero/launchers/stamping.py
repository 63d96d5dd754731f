"""The head of a record's chain in the metadata of the model files that the run left.

The trainer leaves room for it where it saves them: 64 zeros, for the record isn't closed by then. They are
overwritten in place; the tensors don't move.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from arriero.schemas.lineage import HEAD, NO_HEAD

_LENGTH = 8  # bytes of the length of the header, little-endian
_MOST = 100 << 20  # of a header, as safetensors limits it


def stamp(model: Path, head: str) -> None:
    """Write `head` into every safetensors file of the directory that has room for it."""
    for path in sorted(model.glob("*.safetensors")):
        header = _header(path)
        room = f'"{HEAD}":"{NO_HEAD}"'.encode()
        if (at := header.find(room)) < 0:
            continue
        with path.open("r+b") as file:
            file.seek(_LENGTH + at)
            file.write(f'"{HEAD}":"{head}"'.encode())
            file.flush()
            os.fsync(file.fileno())


def stamps(model: Path) -> dict[str, str]:
    """The head that each file names; files without one, or with room for one only, are left out."""
    found: dict[str, str] = {}
    for path in sorted(model.glob("*.safetensors")):
        metadata: dict[str, str] = json.loads(_header(path) or b"{}").get("__metadata__", {})
        if (head := metadata.get(HEAD, NO_HEAD)) != NO_HEAD:
            found[path.name] = head
    return found


def _header(path: Path) -> bytes:
    """The JSON before the tensors; empty where there is none."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(_LENGTH), "little")
        return file.read(size) if size <= _MOST else b""
