"""Admission: how far a source may run ahead of the trainer. One half of the bound on staleness.

While version v is the newest, at most `(v + staleness + 1) * groups_per_step` prompts are admitted and not
dropped. The gate stands where prompts enter the graph, so that nobody ever holds a lease on a record that it
may not yet use. It counts from the ledger alone: admission number, versions, drops; a restart can't inflate it.
"""

from __future__ import annotations

import asyncio

from arriero.engine.broker import Broker
from arriero.engine.rates import Window
from arriero.engine.runtime.journal import follow_ledger
from arriero.engine.runtime.ledger import Ledger


class Gate:
    """Opens for source record k as soon as every window admits it; closes for good when `steps` are done.

    `steps` is the number of versions after which the trainers stop; None: never. `changed` is set whenever the
    answer to a question may have changed.
    """

    def __init__(self, broker: Broker, windows: tuple[Window, ...], steps: int | None) -> None:
        self._broker, self._windows, self._steps = broker, windows, steps
        self._ledger = Ledger()
        self._error: Exception | None = None
        self.changed = asyncio.Event()

    async def follow(self) -> None:
        """Keep the account up to date; runs as a task beside the source. A fault is raised by `finished`."""
        try:
            async for event in follow_ledger(self._broker):
                self._ledger.apply(event)
                self.changed.set()
        except Exception as error:  # noqa: BLE001  # raised where the source asks next
            self._error = error
            self.changed.set()

    @property
    def version(self) -> int:
        """The newest version that all loops have reached."""
        return min((self._ledger.version(w.producer) for w in self._windows), default=0)

    @property
    def finished(self) -> bool:
        if self._error is not None:
            raise self._error
        return self._steps is not None and bool(self._windows) and self.version >= self._steps

    @property
    def evaluating(self) -> bool:
        return self._ledger.evaluating

    def limit(self) -> int | None:
        """Source records that may be admitted now; None: as many as the edges hold."""
        dropped = self._ledger.dropped.total()
        limits = [w.limit(self._ledger.version(w.producer), dropped) for w in self._windows]
        if self._steps is not None:
            limits += [self._steps * w.per_version + dropped for w in self._windows]
        return min(limits, default=None)

    def open_for(self, k: int) -> bool:
        limit = self.limit()
        return limit is None or k < limit

    def min_version(self, k: int) -> int:
        """The version with which record k may be started: the oldest that is fresh enough when it is trained."""
        ahead = k - self._ledger.dropped.total()
        return max([0, *(ahead // w.per_version - w.staleness for w in self._windows)])

    def whole_versions(self, admitted: int) -> int:
        """Versions that `admitted` source records are enough for."""
        alive = admitted - self._ledger.dropped.total()
        return min((alive // w.per_version for w in self._windows), default=0)

    def state(self, k: int) -> str:
        """For the wait graph: why record k is held."""
        names = ", ".join(f"{w.producer} at version {self._ledger.version(w.producer)}" for w in self._windows)
        return f"admission of record {k} (limit {self.limit()}; {names})"
