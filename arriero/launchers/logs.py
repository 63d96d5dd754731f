"""Lines of a replica's log in a run directory, as they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from arriero.engine.errors import UserError

_POLL_S = 0.3


def lines(folder: Path, name: str, *, follow: bool, over: Callable[[], bool]) -> Iterator[str]:
    """Lines of the log of replica `name`, with their ends; with `follow` until the run is `over`.

    Raises UserError if there is no such log (with `follow`, when the run is over).
    """
    ending = False
    while (path := _path(folder, name)) is None:
        if ending or not follow:
            known = ", ".join(sorted(p.stem for p in folder.glob("*.log"))) or "none yet"
            raise UserError(f"{folder} has no log of {name}; there are: {known}")
        ending = over()
        time.sleep(_POLL_S)
    with path.open(encoding="utf-8", errors="replace") as file:
        while True:
            while line := file.readline():
                yield line
            if ending or not follow:
                return
            ending = over()  # what was written before that is still to be read
            time.sleep(_POLL_S)


def _path(folder: Path, name: str) -> Path | None:
    """A role on several hosts has a log for each, the first of which stands for the replica."""
    return next((p for p in (folder / f"{name}.log", folder / f"{name}.0.log") if p.exists()), None)
