"""The ledger folded: what became of every prompt, and whether the account balances.

A training prompt is admitted, then trained or dropped, once: `admitted = trained + dropped + in flight`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from arriero.schemas.ledger import (
    Admitted,
    DroppedEvent,
    Evaluated,
    Event,
    Learned,
    Restarted,
    Resumed,
    Scaled,
    Trained,
    Unhealthy,
)  # fmt: skip


def effective(events: Iterable[Event]) -> list[Event]:
    """What counts of a ledger: without what a resumed run has undone, and without the news of lives.

    Give all of its events: what a run that went on with other data has let go stays dropped in every later
    life.
    """
    kept: list[Event] = []
    for_good: set[str] = set()  # parents of drops that no later life undoes
    for event in events:
        match event:
            case Resumed():
                undone = [k for k in kept if _undone(k, event, for_good)]
                gone = {k.origin for k in undone if isinstance(k, Admitted)}
                kept = _without([k for k in kept if not _undone(k, event, for_good)], gone)
                if event.anew:
                    for_good |= {k.parent for k in kept if isinstance(k, DroppedEvent)}
            case Restarted() | Scaled():
                pass
            case _:
                kept.append(event)
    return kept


def _without(events: Iterable[Event], origins: set[int]) -> list[Event]:
    """Without drops of these records, which were never let in."""
    kept: list[Event] = []
    for event in events:
        if isinstance(event, DroppedEvent) and not origins.isdisjoint(event.origins):
            left = tuple(o for o in event.origins if o not in origins)
            kept += [event.model_copy(update={"origins": left})] if left else []
        else:
            kept.append(event)
    return kept


def _undone(event: Event, by: Resumed, for_good: set[str]) -> bool:
    newest = min(by.versions.values(), default=0)
    match event:
        case Trained() | Unhealthy():
            return event.version > by.versions.get(event.node, event.version)
        case Learned():
            return event.version > by.learned.get(event.node, event.version)
        case DroppedEvent():
            return event.reason == "end_of_run" and not by.anew and event.parent not in for_good
        case Admitted():
            return event.split == "eval" and event.min_version > newest
        case Evaluated():
            return event.version > newest
        case _:
            return False


_AHEAD = 1 << 20  # admissions under way at a time, at most
_UNKNOWN, _IN_FLIGHT, _TRAINED, _DROPPED = range(4)


class LedgerError(RuntimeError):
    """The record contradicts itself: a prompt trained twice, or dropped after it was trained."""


class Ledger:
    """State after the events applied so far. Training prompts have origins 0, 1, ..., in about this order.

    With several trainers in a graph a prompt counts as trained when the first of them has trained it; each
    of them may train it once.
    """

    def __init__(self) -> None:
        self._state = bytearray()
        self._trained_by: dict[str, bytearray] = {}  # by node: 1 for a prompt that it has trained
        self._num_trained: Counter[str] = Counter()
        self.admitted = self.trained = 0
        self.dropped: Counter[str] = Counter()
        self.versions: dict[str, int] = {}
        self.staleness_max = 0
        self.held_out_sent = self.held_out_back = 0

    @property
    def in_flight(self) -> int:
        return self.admitted - self.trained - self.dropped.total()

    @property
    def in_flight_origins(self) -> list[int]:
        return [k for k, state in enumerate(self._state) if state == _IN_FLIGHT]

    def all_dropped(self, count: int) -> bool:
        """Whether the first `count` training prompts are all dropped."""
        return self._state.count(_DROPPED, 0, count) == count

    @property
    def evaluating(self) -> bool:
        """Whether held-out prompts are still under way."""
        return self.held_out_sent > self.held_out_back

    def version(self, node: str) -> int:
        """The newest version that `node` has made; 0 before its first step."""
        return self.versions.get(node, 0)

    def trained_by(self, node: str) -> int:
        """Prompts that `node` has trained."""
        return self._num_trained[node]

    def apply(self, event: Event) -> None:
        """Take one event into account. Raises LedgerError if it contradicts an earlier one."""
        match event:
            case Admitted():
                self._admit(event)
            case Trained():
                self._train(event)
            case DroppedEvent():
                self._drop(event)
            case Evaluated():
                self.held_out_back += 1
            case _:  # nothing that became of a prompt
                pass

    def _admit(self, event: Admitted) -> None:
        if event.split == "eval":
            self.held_out_sent += 1
            return
        # Admissions are written side by side: a later one may be durable first, but not one so much later.
        if not 0 <= event.origin < len(self._state) + _AHEAD:
            before = len(self._state)
            raise LedgerError(f"prompt {event.id} is admitted as number {event.origin}, the {before}th")
        self._state.extend(bytes(max(event.origin + 1 - len(self._state), 0)))
        if self._state[event.origin] != _UNKNOWN:
            raise LedgerError(
                f"prompt {event.id} is admitted as number {event.origin}, which was admitted before"
            )
        self._state[event.origin] = _IN_FLIGHT
        self.admitted += 1

    def _train(self, event: Trained) -> None:
        mine = self._trained_by.setdefault(event.node, bytearray())
        mine.extend(bytes(len(self._state) - len(mine)))
        for k in event.origins:
            state = self._known(k, f"trained in version {event.version}")
            if mine[k] or state == _DROPPED:
                earlier = "dropped" if state == _DROPPED else "trained"
                raise LedgerError(
                    f"prompt number {k} is trained in version {event.version}, but was {earlier} before"
                )
            mine[k] = 1
            self._num_trained[event.node] += 1
            if state == _IN_FLIGHT:
                self._state[k] = _TRAINED
                self.trained += 1
        self.versions[event.node] = max(self.version(event.node), event.version)
        self.staleness_max = max(self.staleness_max, event.staleness_max)

    def _drop(self, event: DroppedEvent) -> None:
        for k in event.origins:
            if k < 0:
                self.held_out_back += 1
            elif (state := self._known(k, f"dropped by {event.node}")) == _IN_FLIGHT:
                self._state[k] = _DROPPED
                self.dropped[event.reason] += 1
            else:
                earlier = "trained" if state == _TRAINED else "dropped"
                raise LedgerError(f"prompt number {k} is dropped by {event.node}, but was {earlier} before")

    def _known(self, k: int, how: str) -> int:
        if not 0 <= k < len(self._state) or self._state[k] == _UNKNOWN:
            raise LedgerError(f"prompt number {k} is {how}, but was never admitted")
        return self._state[k]
