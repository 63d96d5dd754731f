"""Records that the broker gave up by itself: their holders died or never answered. The ledger has to know.

A node that gives a record up writes that into the ledger before it lets go. Nobody does so for a record whose
lease ran out again and again; its prompts would stay under way for ever, and their places in the admission
window with them. Whoever supervises the run writes it for them; the event's id is the same, so that what a
node has written already counts once.
"""

from __future__ import annotations

from typing import cast

from arriero.engine.backlog import backlog_edge
from arriero.engine.broker import Broker, DeadLetter
from arriero.engine.codec import CodecError, decode
from arriero.engine.lineage.recorder import RECORD
from arriero.engine.portable import resolve
from arriero.engine.runtime.journal import record
from arriero.schemas.continuations import Continuation
from arriero.schemas.graph import GraphSpec
from arriero.schemas.ledger import DroppedEvent
from arriero.schemas.messages import Record


class Burials:
    """Writes the broker's dead letters into the ledger, each once."""

    def __init__(self, spec: GraphSpec) -> None:
        self._spec = spec
        self._written: set[tuple[str, str]] = set()

    async def write(self, broker: Broker) -> None:
        """Record what is new. Raises BrokerError, or TimeoutError for what the lineage will lack."""
        for letter in await broker.dead_letters():
            if letter.group == RECORD:
                raise TimeoutError(f"the record lacks {letter.id} of edge {letter.edge}: {letter.error}")
            if (letter.group, letter.id) not in self._written:
                self._written.add((letter.group, letter.id))
                await record(broker, self._event(letter))

    def _event(self, letter: DeadLetter) -> DroppedEvent:
        parent = letter.id
        try:
            if letter.edge == backlog_edge(letter.group.rpartition("-")[0]):
                continuation = decode(letter.payload, Continuation)
                parent, origins = continuation.prompt.id, continuation.origins
            else:
                kind = cast("type[Record]", resolve(self._spec.node(letter.edge).output))
                origins = decode(letter.payload, kind).origins
        except CodecError:  # it names no prompts: the run ends on the count of dead letters, or at its bound
            origins = ()
        detail = letter.error or f"given up after {letter.deliveries} deliveries that nobody answered"
        return DroppedEvent(
            node=letter.group.rpartition("-")[0],
            parent=parent,
            origins=origins,
            reason="dead_letter",
            detail=detail,
        )
