"""What of the records that arrive a component may take, and what becomes of those it may not or can't."""

from __future__ import annotations

import math
from collections.abc import Callable

from arriero.engine.broker import Broker, Lease
from arriero.engine.graph import HasWant, Node, PerRecord
from arriero.engine.rates import Window, by_record, repetitions, windows
from arriero.engine.runtime.guard import dropped, held_out, sampled_otherwise, stale_groups
from arriero.engine.runtime.history import Done
from arriero.engine.runtime.journal import dropped_already, record
from arriero.engine.runtime.outputs import Outbox
from arriero.engine.stream import Loop
from arriero.schemas.graph import GraphSpec
from arriero.schemas.ledger import DroppedEvent
from arriero.schemas.messages import Batch, Record, ScoredGroup

_RECORDS_AHEAD = 4  # hides the way to the engine and back behind the work on a record
_TOLD = 256  # records in a heartbeat


class Intake:
    """The guard in its place, and the end of records that fail.

    `window` is the loop that bounds what the node may take (None: it may take everything), `version` the one
    that its next output will replace. `done` are the prompts that have been trained: after a crash they may
    come again, by themselves or in another batch, and then go no further.
    """

    def __init__(
        self,
        node: str,
        broker: Broker,
        outbox: Outbox,
        *,
        window: Window | None,
        done: Done,
        version: Callable[[], int],
        max_deliveries: int,
    ) -> None:
        self._node, self._broker, self._outbox = node, broker, outbox
        self._window, self._version, self._max_deliveries = window, version, max_deliveries
        self._done = done

    def accept(self, lease: Lease, arrived: Record) -> Record | None:
        """What of a record the component may take: nothing held out, nothing too stale; answers the rest."""
        if (left := self._untrained(arrived)) is None:
            self._outbox.settle((), (lease,))
            return None
        return self._fresh(lease, left)

    def _untrained(self, arrived: Record) -> Record | None:
        """Without what has been trained already."""
        fresh = [s for s in arrived.samples if not s.replayed] if isinstance(arrived, Batch) else []
        if isinstance(arrived, Batch) and fresh:
            trained = frozenset(s.group for s in fresh if s.origin in self._done)
            if not trained:
                return arrived
            left = arrived.without(trained)
            return left if any(not s.replayed for s in left.samples) else None
        if arrived.origins and all(origin in self._done for origin in arrived.origins):
            return None
        return arrived

    def _fresh(self, lease: Lease, arrived: Record) -> Record | None:
        if self._window is None:
            return arrived
        if isinstance(arrived, ScoredGroup) and (evaluated := held_out(arrived)) is not None:
            if why := sampled_otherwise(arrived):
                answer = DroppedEvent(
                    node=self._node, parent=arrived.id, origins=arrived.origins, reason="invalid", detail=why
                )
                self._outbox.settle((answer,), (lease,))
            else:
                self._outbox.settle((evaluated,), (lease,))
            return None
        stale = stale_groups(arrived, self._version(), self._window.staleness)
        if not stale:
            return arrived
        events = tuple(dropped(self._node, s) for s in stale)
        if isinstance(arrived, Batch):
            left = arrived.without(frozenset(s.group for s in stale))
            if left.samples:
                self._outbox.settle(events, ())
                return left
        self._outbox.settle(events, (lease,))
        return None

    def again(self, lease: Lease) -> None:
        """A second delivery of what the node has answered already."""
        self._outbox.acknowledge_again(lease)

    async def settled(self, lease: Lease, arrived: Record) -> bool:
        """See to a record that a lost holder left behind: true if it was dropped."""
        if not await dropped_already(self._broker, arrived.id):
            return False
        await lease.ack()
        return True

    async def poisoned(self, lease: Lease, error: str) -> None:
        """A record that can't be decoded."""
        await self.failed(lease, (), error)

    async def failed(self, lease: Lease, origins: tuple[int, ...], error: str) -> None:
        """Give a record back. The last time the broker buries it, and the ledger says so first."""
        if lease.deliveries >= self._max_deliveries:
            event = DroppedEvent(
                node=self._node, parent=lease.id, origins=origins, reason="dead_letter", detail=error
            )
            await record(self._broker, event)
        await lease.nack(error)


def want(spec: GraphSpec, node: Node, port: str) -> int:
    """Records leased ahead: what a firing takes, a few for a component that takes one after the other.

    A component that works on many at once says how many; but a replica takes no more than its share of a
    version, or it would leave the others idle.
    """
    if isinstance(node.component, HasWant):
        followed = {s.source for s in node.inputs.values() if isinstance(s, Loop)}
        shares = [math.ceil(w.per_version / node.replicas) for w in windows(spec) if w.loop in followed]
        return max(1, min([node.component.want(), *shares]))
    if isinstance(node.component, PerRecord):
        return min(_RECORDS_AHEAD, math.ceil(repetitions(spec)[node.name] / node.replicas))
    return max(1, node.rates.consumes.get(port, 1))


def remembered(spec: GraphSpec, name: str) -> int:
    """Of how many records a node tells how long they took: those of several heartbeats, if one is lost.

    None of a node that gathers records: what it waits for is others' work.
    """
    if not by_record(spec, name):
        return 0
    admitted = max((w.limit(1, 0) for w in windows(spec)), default=_TOLD)
    return min(_TOLD, math.ceil(2 * admitted / spec.node(name).replicas))
