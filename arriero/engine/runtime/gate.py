"""Admission: how far a source may run ahead of the trainer. One half of the bound on staleness.

While version v is the newest, at most `(v + staleness + 1) * groups_per_version` prompts are admitted and not
dropped; prompts that a version went without (its batch was short) count as not yet trained, so that never
more than `(staleness + 1) * groups_per_version` are in flight. The gate stands where prompts enter the
graph, so that nobody ever holds a lease on a record that it may not yet use. It counts from the ledger
alone: admission numbers, versions, drops; a restart can't inflate it.
"""

from __future__ import annotations

import asyncio

from arriero.engine.rates import Window
from arriero.engine.runtime.ledger import Ledger
from arriero.engine.runtime.results import Results
from arriero.schemas.ledger import DroppedEvent, Event

_FOR_GOOD = {"too_long", "invalid"}  # reasons that hold in the next epoch too


class Gate:
    """Opens for source record k as soon as every window admits it; closes for good when `steps` are done.

    `steps` is the number of versions after which the trainers stop; None: never. `changed` is set whenever
    the answer to a question may have changed.
    """

    def __init__(self, windows: tuple[Window, ...], steps: int | None) -> None:
        self._windows, self._steps = windows, steps
        self._ledger = Ledger()
        self.results = Results(tuple(w.producer for w in windows))
        self._last_drop: DroppedEvent | None = None
        self.changed = asyncio.Event()

    def apply(self, event: Event) -> None:
        """Take one event of the ledger into account. Raises LedgerError if it contradicts earlier ones."""
        self._ledger.apply(event)
        self.results.apply(event)
        if isinstance(event, DroppedEvent):
            self._last_drop = event
        self.changed.set()

    @property
    def version(self) -> int:
        """The newest version that all loops have reached."""
        return min((self._ledger.version(w.producer) for w in self._windows), default=0)

    @property
    def finished(self) -> bool:
        return self._steps is not None and bool(self._windows) and self.version >= self._steps

    @property
    def held_out_back(self) -> int:
        """Held-out prompts that have come back, with scores or dropped."""
        return self._ledger.held_out_back

    def _dropped(self, window: Window) -> int:
        """Prompts dropped, less those that the versions so far went without."""
        lacked = self._ledger.version(window.producer) * window.per_version
        return self._ledger.dropped.total() - lacked + self._ledger.trained_by(window.producer)

    def limit(self) -> int | None:
        """Source records that may be admitted now; None: as many as the edges hold."""
        limits = [w.limit(self._ledger.version(w.producer), self._dropped(w)) for w in self._windows]
        if self._steps is not None:
            limits += [self._steps * w.per_version + self._dropped(w) for w in self._windows]
        return min(limits, default=None)

    def open_for(self, k: int) -> bool:
        limit = self.limit()
        return limit is None or k < limit

    def min_version(self, k: int) -> int:
        """The version with which record k may be started: the oldest that is fresh enough when trained."""
        return max([0, *((k - self._dropped(w)) // w.per_version - w.staleness for w in self._windows)])

    def whole_versions(self, admitted: int) -> int:
        """The version that `admitted` source records are enough for."""
        return min(((admitted - self._dropped(w)) // w.per_version for w in self._windows), default=0)

    def hopeless(self, epoch: int) -> str:
        """Why more epochs are of no use: all `epoch` records of the first were dropped for what they are."""
        drop, dropped = self._last_drop, self._ledger.dropped
        if drop is None or self._ledger.trained or not {*dropped} <= _FOR_GOOD:
            return ""
        if not self._ledger.all_dropped(epoch):
            return ""
        reasons = ", ".join(f"{n} {reason}" for reason, n in dropped.items())
        return (
            f"all {epoch} records of the first epoch were dropped, so nothing is left to train on "
            f"({reasons}; the last by {drop.node}: {drop.detail})"
        )

    def state(self, k: int) -> str:
        """For the wait graph: why record k is held."""
        names = ", ".join(
            f"{w.producer} at version {self._ledger.version(w.producer)}" for w in self._windows
        )
        return f"admission of record {k} (limit {self.limit()}; {names})"
