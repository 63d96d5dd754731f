"""The record of a run for the page: its tables, made again when the run has gone on, but not too often."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

from arriero.engine.errors import UserError
from arriero.engine.lineage.chain import ChainError
from arriero.engine.lineage.index import Index
from arriero.launchers.rundir import RunDir

_LEAST_S, _TIMES = 5.0, 10.0  # the tables are as old as this, or as ten times the time that making them takes


class Record:
    """The index of a run's record. One thread at a time asks it."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        options = run.read_options()
        self._place = (options.record_url or str(run.path)) if options.record else ""
        self._lock = threading.Lock()
        self._index: Index | None = None
        self._ended = 0  # as `_ended_at`, before the tables were made
        self._until = 0.0

    @contextmanager
    def index(self) -> Generator[Index]:
        """The tables. Raises UserError where there is no record, or nothing in it yet."""
        if not self._place:
            raise UserError("the run has no record: it was started with --record false")
        with self._lock:
            ended = self._ended_at()
            if self._index is None or ended != self._ended or time.monotonic() > self._until:
                self._index = self._made(ended)
            yield self._index

    def _ended_at(self) -> int:
        """When its summary was written (ns), which a run that goes on writes anew; 0 while it goes on."""
        try:
            return self._run.summary.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def _made(self, ended: int) -> Index:
        begun = time.monotonic()
        try:
            made = Index(self._place)
        except ChainError as error:
            raise UserError(f"nothing has been recorded yet: {error}") from error
        took_s = time.monotonic() - begun
        self._ended = ended
        self._until = float("inf") if ended else time.monotonic() + max(_LEAST_S, _TIMES * took_s)
        return made
