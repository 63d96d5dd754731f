"""`reward_version`: what a score rests on, in 16 hexadecimal digits."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import cast

from arriero.engine.portable import to_json

_LIBRARIES = ("math-verify", "latex2sympy2-extended", "sympy", "jsonschema", "langdetect", "reasoning-gym")
_HERE = Path(__file__).parent


def reward_version(component: object) -> str:
    """Changes with the configuration, our code, the file of a user's function, and the libraries that judge.

    Not with how many workers compute it, nor with where. A function that can't be imported by name has only
    its name in it.
    """
    digest = hashlib.sha256(json.dumps(_configuration(component), sort_keys=True).encode())
    for path in sorted(_sources(component)):
        digest.update(path.name.encode() + _contents(path))
    for name in _LIBRARIES:
        digest.update(f"{name}={_installed(name)}".encode())
    return digest.hexdigest()[:16]


def _configuration(component: object) -> object:
    if dataclasses.is_dataclass(component) and not isinstance(component, type):
        kept = [f.name for f in dataclasses.fields(component) if f.name not in ("workers", "limits")]
        return {
            "": type(component).__qualname__,
            **{n: _configuration(getattr(component, n)) for n in kept},
        }
    if isinstance(component, tuple | list):
        return [_configuration(c) for c in cast("tuple[object, ...]", component)]
    try:
        return to_json(component)
    except ValueError:
        return getattr(component, "__qualname__", type(component).__qualname__)


def _sources(component: object) -> set[Path]:
    found = {*_HERE.glob("*.py"), _HERE.parent / "rewards.py", _HERE.parent / "gym_rows.py"}
    modules = {getattr(part, "__module__", "") for part in _parts(component)}
    files = [getattr(sys.modules.get(m), "__file__", None) for m in modules if isinstance(m, str)]
    return found | {Path(f) for f in files if f}


def _parts(component: object) -> Iterator[object]:
    """The component's class, functions in its configuration, and the same of what it holds."""
    if callable(component) and not dataclasses.is_dataclass(component):
        yield component
    elif dataclasses.is_dataclass(component) and not isinstance(component, type):
        yield type(component)
        for f in dataclasses.fields(component):
            yield from _parts(getattr(component, f.name))
    elif isinstance(component, Mapping):
        for value in cast("Mapping[object, object]", component).values():
            yield from _parts(value)
    elif isinstance(component, tuple | list):
        for value in cast("tuple[object, ...]", component):
            yield from _parts(value)


@cache
def _contents(path: Path) -> bytes:
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError:
        return b""


@cache
def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
