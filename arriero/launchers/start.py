"""Start a module of arriero from the code that a run was launched with: `start.py DIGEST MODULE ARGS...`.

It is copied beside that code (`code.json`: SHA-256 of each archive) and runs before arriero can be imported,
so it uses the standard library alone. It checks every archive, unpacks them once per host, and becomes
`python -m MODULE`. Code that isn't what DIGEST names ends it with exit code 2.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

INDEX = "code.json"
CODE = "ARRIERO_CODE"  # the digest of the code that runs, for whoever records it


def main(argv: list[str]) -> int:
    """The exit code when it went wrong; else this process becomes another program."""
    digest, module, *args = argv
    here = Path(__file__).resolve().parent
    try:
        place = unpacked(here, digest, _cache())
    except (OSError, ValueError) as error:
        print(f"arriero: error: {error}", file=sys.stderr)
        return 2
    path = os.pathsep.join(p for p in (str(place), os.environ.get("PYTHONPATH", "")) if p)
    # Safe: the current directory, which may hold another arriero, isn't searched.
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", CODE: digest}
    return os.execve(sys.executable, [sys.executable, "-m", module, *args], environment)


def unpacked(here: Path, digest: str, cache: Path) -> Path:
    """The folder with the code of `here` that `digest` names. Raises ValueError if it isn't that code."""
    place = cache / digest[:32]
    if place.is_dir():
        return place
    index = (here / INDEX).read_bytes()
    found = hashlib.sha256(index).hexdigest()
    if found != digest:
        raise ValueError(
            f"{here / INDEX} is not what the run was launched with ({found[:12]}, not {digest[:12]})"
        )
    part = Path(tempfile.mkdtemp(dir=cache))
    try:
        for name, wanted in json.loads(index).items():
            data = (here / name).read_bytes()
            if hashlib.sha256(data).hexdigest() != wanted:
                raise ValueError(f"{here / name} is not what the run was launched with; launch it again")
            with zipfile.ZipFile(here / name) as archive:
                archive.extractall(part)
        part.rename(place)
    except OSError:
        if not place.is_dir():  # another process of this host was quicker
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return place


def _cache() -> Path:
    """A folder of this user on this host that nobody else can write to."""
    cache = Path(tempfile.gettempdir()) / f"arriero-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    stat = cache.lstat()
    if not cache.is_dir() or cache.is_symlink() or stat.st_uid != os.getuid() or stat.st_mode & 0o022:
        raise ValueError(
            f"{cache} belongs to somebody else or can be written by others; remove it, or set TMPDIR"
        )
    return cache


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
