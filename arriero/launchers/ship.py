"""The code of a run, for hosts that don't have it: one wheel of arriero, and the user's own modules.

ship/start.py    what a replica starts with: checks the rest, see `start`
ship/code.json   SHA-256 of each archive; its own SHA-256 is the digest of the code
ship/arriero-VERSION-py3-none-any.whl    arriero as it is imported here; pip can install it
ship/user.zip    modules of the user's that were imported to build the graph, and their packages
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import io
import json
import sys
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import arriero
from arriero.engine.errors import UserError
from arriero.launchers import start

FOLDER = "ship"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # zip's first day: the same code gives the same bytes
_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Code:
    """Files for one folder, by name; `digest` is that of the index."""

    files: Mapping[str, bytes]

    @property
    def digest(self) -> str:
        return _sha256(self.files[start.INDEX])

    def write(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        for name, data in self.files.items():
            (folder / name).write_bytes(data)


def code(roots: Iterable[Path]) -> Code:
    """arriero's code and the user's. `roots`: folders whose imported modules go along.

    Raises UserError if the user's part is absurdly large.
    """
    archives = {wheel_name(): wheel(), "user.zip": user_archive(roots)}
    index = json.dumps({name: _sha256(data) for name, data in archives.items()}, sort_keys=True).encode()
    return Code({**archives, start.INDEX: index, "start.py": Path(start.__file__).read_bytes()})


def wheel_name() -> str:
    return f"arriero-{arriero.__version__}-py3-none-any.whl"


def wheel() -> bytes:
    """arriero as it is imported here, with its metadata, as a wheel."""
    root = Path(arriero.__file__).parent
    info = f"arriero-{arriero.__version__}.dist-info"
    files = {f"arriero/{p.relative_to(root).as_posix()}": p.read_bytes() for p in _package_files(root)}
    installed = importlib.metadata.distribution("arriero")
    for name in ("METADATA", "entry_points.txt"):
        if text := installed.read_text(name):
            files[f"{info}/{name}"] = text.encode()
    files[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: arriero\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    record = [f"{name},sha256={_urlsafe(data)},{len(data)}" for name, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    return _zip(files)


def user_archive(roots: Iterable[Path]) -> bytes:
    """Modules that are imported from `roots` and not installed there; of packages all Python files."""
    files: dict[str, bytes] = {}
    for root in dict.fromkeys(r.resolve() for r in roots):
        for top in _own_modules(root):
            for path in sorted(top.rglob("*.py")) if top.is_dir() else [top]:
                files.setdefault(path.relative_to(root).as_posix(), path.read_bytes())
    if (size := sum(map(len, files.values()))) > _MOST_BYTES:
        raise UserError(
            f"the modules imported from here are {size >> 20} MiB; "
            "start from a folder that holds the pipeline alone"
        )
    return _zip(files)


def _own_modules(root: Path) -> list[Path]:
    """Files and packages directly in `root` that hold an imported module."""
    installed = {Path(p).resolve() for p in (sys.prefix, sys.base_prefix, arriero.__path__[0])}
    found: dict[Path, None] = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py"):
            continue
        path = Path(file).resolve()
        if not path.is_relative_to(root) or any(path.is_relative_to(p) for p in installed - {root}):
            continue
        top = root / path.relative_to(root).parts[0]
        # A script in a subfolder that isn't a package came from another entry of the search path.
        if top.is_file() or module.__name__.partition(".")[0] == top.name:
            found[top] = None
    return sorted(found)


def _package_files(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("*") if p.suffix in (".py", ".typed") and p.is_file())


def _zip(files: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED, 9)
    return out.getvalue()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _urlsafe(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
