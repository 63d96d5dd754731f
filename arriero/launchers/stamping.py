"""The head of a record's chain in the metadata of the model files that the run left.

The trainer leaves room for it where it saves them: 64 zeros, for the record isn't closed by then. They are
overwritten in place; the tensors don't move.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

from arriero.schemas.lineage import HEAD, NO_HEAD

_LENGTH = 8  # bytes of the length of the header, little-endian
_MOST = 100 << 20  # of a header, as safetensors limits it
_STAMPED = re.compile(f'("{HEAD}":")[0-9a-f]{{{len(NO_HEAD)}}}'.encode())
_BLOCK = 1 << 20


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
        try:
            metadata: dict[str, str] = json.loads(_header(path) or b"{}").get("__metadata__", {})
        except ValueError:  # no safetensors
            continue
        if (head := metadata.get(HEAD, NO_HEAD)) != NO_HEAD:
            found[path.name] = head
    return found


def model_sha256(model: Path) -> dict[str, str]:
    """Of each file of the directory, by name; of one that names a head, as it was before it was stamped."""
    files = sorted(path for path in model.glob("*") if path.is_file())
    return {path.name: _unstamped_sha256(path) for path in files}


def _unstamped_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            size = file.read(_LENGTH)
            header = file.read(min(int.from_bytes(size, "little"), _MOST))
            digest.update(size + _STAMPED.sub(b"\\g<1>" + NO_HEAD.encode(), header))
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _header(path: Path) -> bytes:
    """The JSON before the tensors; empty where there is none."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(_LENGTH), "little")
        return file.read(size) if size <= _MOST else b""
