"""What had happened when a node started: the first time, after a crash, or in a run that goes on.

A node writes `Started` into the ledger and reads up to there, so that all that was durable before it is in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from secrets import token_hex

from arriero.engine.broker import Broker
from arriero.engine.runtime.journal import follow_ledger, record
from arriero.schemas.ledger import Admitted, DroppedEvent, Evaluated, Event, Learned, Started, Step, Trained


class History:
    """The ledger as a node reads it: `follow` hands every event on, and remembers those before its start.

    `lives`: how often this replica had started before. `made`: the steps of this node. `admitted`: all
    records that were let in, by origin, and `open` those of them that are neither trained nor given up nor
    evaluated; for a `source` alone. All of them are whole when `read` is set.
    """

    def __init__(
        self,
        node: str,
        replica: int,
        broker: Broker,
        heard: Sequence[Callable[[Event], None]],
        *,
        source: bool = False,
    ) -> None:
        self._source = source
        self._node, self._replica, self._broker, self._heard = node, replica, broker, heard
        self._life = token_hex(8)
        self.lives = 0
        self.made: list[Step] = []
        self.admitted: dict[int, Admitted] = {}
        self.open: set[int] = set()
        self.read = asyncio.Event()

    async def follow(self) -> None:
        """Without end. Raises what those raise that hear of the events."""
        started = Started(node=self._node, replica=self._replica, life=self._life)
        await record(self._broker, started)
        async for event in follow_ledger(self._broker):
            if event == started:
                self.read.set()
            elif not self.read.is_set():
                self._remember(event)
            for hear in self._heard:
                hear(event)

    def _remember(self, event: Event) -> None:
        match event:
            case Admitted() if self._source:
                self.admitted[event.origin] = event
                self.open.add(event.origin)
            case Trained():
                self.open.difference_update(event.origins)
                if event.node == self._node:
                    self.made.append(event)
            case Learned() if event.node == self._node:
                self.made.append(event)
            case DroppedEvent():
                self.open.difference_update(event.origins)
            case Evaluated():
                self.open.discard(event.origin)
            case Started() if (event.node, event.replica) == (self._node, self._replica):
                self.lives += 1
            case _:
                pass


class Done:
    """The prompts that a node has trained or learned from: none is twice, whatever comes again."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._origins = bytearray()

    def apply(self, event: Event) -> None:
        """Take one event of the ledger into account."""
        if isinstance(event, Trained | Learned) and event.node == self._node:
            self._origins.extend(bytes(max(0, max(event.origins, default=-1) + 1 - len(self._origins))))
            for origin in event.origins:
                self._origins[origin] = 1

    def __contains__(self, origin: int) -> bool:
        return 0 <= origin < len(self._origins) and bool(self._origins[origin])
