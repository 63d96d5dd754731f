"""The local files that a graph's configuration names (data, models, templates), by their hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import JsonValue

import arriero
from arriero.schemas.graph import GraphSpec
from arriero.schemas.manifest import InputFile

_HASHED_BYTES = 256 << 20  # of larger files the size and the time of the last change tell enough, and at once
_MOST = 2000


def input_files(spec: GraphSpec) -> tuple[InputFile, ...]:
    """Each file that a string in a node's configuration names, and those in the directories named, once."""
    found: dict[Path, InputFile] = {}
    for node in spec.nodes:
        for key, text in _strings(node.config, node.name):
            for path in _files(text):
                if path not in found and len(found) < _MOST:
                    found[path] = _described(key, path)
    return tuple(found.values())


def package_sha256() -> str:
    """Of all Python files of arriero as they are imported, with their names."""
    root = Path(arriero.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _strings(value: JsonValue | Mapping[str, JsonValue], key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _strings(inner, key if name.startswith("$") else f"{key}.{name}")
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _strings(inner, key)


def _files(text: str) -> list[Path]:
    # A word that happens to be a file here is none of the configuration's: paths have a slash or an ending.
    name = text.removeprefix("file://")
    if not name or len(name) > 4096 or "\n" in name or not ("/" in name or "." in name):
        return []
    path = Path(name).expanduser()
    try:
        if path.is_file():
            return [path]
        return sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() and "/" in name else []
    except (OSError, ValueError):
        return []


def _described(key: str, path: Path) -> InputFile:
    stat = path.stat()
    digest = ""
    if stat.st_size <= _HASHED_BYTES:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    return InputFile(key=key, path=str(path), bytes=stat.st_size, changed_s=stat.st_mtime, sha256=digest)
