"""What a checkpoint keeps of the ledger, folded as it goes on."""

from __future__ import annotations

from collections import defaultdict
from threading import Lock

from arriero.engine.runtime.ledger import Ledger
from arriero.schemas.checkpoints import Frontier
from arriero.schemas.ledger import Admitted, Evaluated, Event
from arriero.schemas.messages import Outcome


class FrontierFold:
    """`frontier` says how far the run has come, by the events applied so far; from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._ledger = Ledger()
        self._events = self._cursor = 0
        self._right: defaultdict[int, int] = defaultdict(int)  # by version
        self._samples: defaultdict[int, int] = defaultdict(int)

    def apply(self, event: Event) -> None:
        """Take one event of the ledger into account."""
        with self._lock:
            self._apply(event)

    def _apply(self, event: Event) -> None:
        self._events += 1
        self._ledger.apply(event)
        match event:
            case Admitted() if event.split == "train":
                self._cursor = max(self._cursor, event.origin + 1)
            case Evaluated():
                self._right[event.version] += sum(o is Outcome.OK for o in event.outcomes)
                self._samples[event.version] += len(event.outcomes)
            case _:
                pass

    def frontier(self) -> Frontier:
        """As of now."""
        with self._lock:
            return self._now()

    def _now(self) -> Frontier:
        shares = {v: self._right[v] / n for v, n in self._samples.items() if n}
        best = max(shares, key=lambda v: shares[v], default=None)
        ledger = self._ledger
        return Frontier(
            events=self._events, cursor=self._cursor, admitted=ledger.admitted, trained=ledger.trained,
            dropped={reason: n for reason, n in ledger.dropped.items() if n},
            held_out_sent=ledger.held_out_sent, held_out_back=ledger.held_out_back,
            best_version=best, best_share=None if best is None else shares[best],
        )  # fmt: skip
