"""Looks at a run's directory once a second, for everybody who has the page open."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter

from arriero.engine.errors import UserError
from arriero.engine.picture import Live
from arriero.launchers.look import Look, Now, last_lines
from arriero.launchers.rundir import RunDir
from arriero.launchers.step_lines import Line, scalars

_EVERY_S = 1.0
_ALIVE_S = 15.0  # something is sent at least so often, or a reader that has left is never noticed
_NOW: TypeAdapter[Now | None] = TypeAdapter(Now | None)


class Watch:
    """`now` is the run as it was seen last, `spec` its graph; `events` tells of every change."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._look = Look(run)
        self.spec = self._look.spec
        self.now: Now | None = None
        self.leaving: Callable[[], bool] = lambda: False  # whether nobody is to be told any more
        self._stamp: tuple[float, ...] = ()
        self._number = 0
        self._changed = asyncio.Condition()

    async def watch(self) -> None:
        """Until it is cancelled, or `leaving`."""
        while not self.leaving():
            if (stamp := self._stamped()) != self._stamp:
                # A file that is being replaced is there again at the next look.
                with suppress(UserError, OSError, ValueError):
                    self.now = await asyncio.to_thread(self._seen)
                    self._stamp = stamp
                async with self._changed:
                    self._number += 1
                    self._changed.notify_all()
            await asyncio.sleep(_EVERY_S)  # of a file on any file system nothing can be awaited
        async with self._changed:
            self._changed.notify_all()

    async def events(self) -> AsyncIterator[str]:
        """The run now and whenever it has changed, as server-sent events; until it is `leaving`."""
        seen = -1
        while not self.leaving():
            if self._number != seen:
                seen = self._number
                yield f"data: {_NOW.dump_json(self.now).decode()}\n\n"
            else:
                yield ": still there\n\n"
            with suppress(TimeoutError):
                async with asyncio.timeout(_ALIVE_S), self._changed:
                    await self._changed.wait()

    def live(self) -> Live:
        """For the picture of the graph."""
        if self.now is None:
            return Live()
        edges = {e.name: (e.flow, f"{e.messages} of {e.capacity}") for e in self.now.edges}
        return Live(nodes={n.name: (n.activity, f"{n.name} {n.does}") for n in self.now.nodes}, edges=edges)

    def _seen(self) -> Now | None:
        return self._look.now(last_lines(self._run.metrics))

    def _stamped(self) -> tuple[float, ...]:
        return tuple(_changed_at(p) for p in (self._run.vitals, self._run.metrics, self._run.summary))


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # not there, or just now not to be had
        return 0.0


class Measures:
    """Every number of metrics.jsonl by its tag (as TensorBoard has it) and step; read on, never again."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._read = 0
        self._values: dict[str, list[tuple[float, float]]] = {}

    def values(self) -> dict[str, list[tuple[float, float]]]:
        """As far as the file is written; a run that was started anew begins anew."""
        if not self._path.exists():
            return {}
        with self._lock:
            self._read_on()
            return {tag: [*values] for tag, values in self._values.items()}

    def _read_on(self) -> None:
        with self._path.open("rb") as file:
            if file.seek(0, 2) < self._read:
                self._read, self._values = 0, {}
            file.seek(self._read)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(newline)
        for text in whole.splitlines():
            line: dict[str, Any] = json.loads(text)
            for tag, value in scalars(cast("Line", line)):
                self._values.setdefault(tag, []).append((float(line["step"]), value))
