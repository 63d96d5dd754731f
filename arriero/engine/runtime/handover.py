"""A node's own edge: how a prompt passes from one of its replicas to another, at any moment of any crash.

The next continuation is durable before what it replaces is acknowledged, so a prompt is never lost. Its id
follows from the prompt and from its number, and the answer to a prompt is named after the prompt whatever way
it took, so what a crash made twice is stored once. Nobody works on a record that a lost holder may have put
further: it is put further first, under the very id that the holder would have used.

| who waits | for what                               | unblocked by                                      |
|-----------|----------------------------------------|---------------------------------------------------|
| the node  | a continuation; the end of all of them | a replica that puts one; the last one is answered |

The end: a replica that takes no more prompts, and holds none, ends the edge. When all have, only whoever
holds a continuation can put one; so the edge has ended when nothing is on it.
"""

from __future__ import annotations

import asyncio

from arriero.engine.backlog import backlog_edge
from arriero.engine.broker import Broker, Lease
from arriero.engine.codec import encode
from arriero.engine.runtime.inputs import EdgeSource
from arriero.engine.runtime.intake import Intake
from arriero.engine.runtime.journal import dropped_already
from arriero.engine.runtime.lengths import Lengths
from arriero.engine.runtime.outputs import Outbox
from arriero.engine.runtime.waits import NodeClock
from arriero.schemas.continuations import Continuation
from arriero.schemas.ledger import DroppedEvent
from arriero.schemas.messages import Prompt


class Handover:
    """The backlog of one replica of `node`. `connect` it before anything else."""

    def __init__(
        self,
        node: str,
        broker: Broker,
        outbox: Outbox,
        *,
        replica: int,
        clock: NodeClock,
        consumers_left: asyncio.Event | None,
        max_deliveries: int,
    ) -> None:
        self._node, self._broker, self._outbox, self._clock = node, broker, outbox, clock
        self._consumers_left, self._max_deliveries = consumers_left, max_deliveries
        self.lengths = Lengths(broker, node)
        self._edge = backlog_edge(node)
        self._producer = broker.producer(self._edge, replica)
        self._prompts: EdgeSource[Prompt]
        self._own: EdgeSource[Continuation]

    def connect(self, prompts: EdgeSource[Prompt], intake: Intake) -> EdgeSource[Continuation]:
        """The input beside `prompts`: what comes back on the node's own edge."""
        self._prompts = prompts
        self._own = EdgeSource(
            self._broker.consumer(self._edge, self._edge),
            Continuation,
            name=f"a continuation of {self._node}",
            clock=self._clock,
            accept=lambda _, arrived: arrived,
            poisoned=intake.poisoned,
            again=intake.again,
            want=1,  # more would lie here while another replica has nothing to do
            max_deliveries=self._max_deliveries,
            settled=self.settled,
            key=lambda continuation: continuation.prompt.id,
            on_demand=True,
        )
        return self._own

    # --- as the component sees it -------------------------------------------------------------------------

    def expected_tokens(self, prompt: Prompt) -> int:
        return self.lengths.expected(prompt.row)

    async def refuse_prompts(self) -> None:
        await self._prompts.close()

    def poll(self) -> Continuation | None:
        return self._own.poll()

    def ready(self) -> Continuation | None:
        return self._own.ready()

    async def next(self) -> Continuation | None:
        return await self._own.next()

    async def put(self, record: Continuation) -> bool:
        key = record.prompt.id
        sources = [s for s in (self._prompts, self._own) if key in s.taken]
        if not sources:
            raise ValueError(f"{self._node} puts {key!r} back, which it hasn't taken or has answered already")
        if self._consumers_left is None or not self._consumers_left.is_set():
            hop = 1 + max(_hop(s.taken[key][1]) for s in sources)
            # It may come to us before we know that it is there.
            with self._prompts.moving(key), self._own.moving(key):
                if not await self._offered(record.moved(self._node, hop=hop, losses=0)):
                    return False
            self._clock.count("continuations", 1)
        leases = tuple(s.taken[key][0] for s in sources)
        for source in sources:
            source.answer(key)
        self._outbox.settle((), leases)
        return True

    async def _offered(self, record: Continuation) -> bool:
        """Whether it is on the edge, or was."""
        offer = self._producer.offer(record.id, encode(record))
        stored = await self._clock.wait(offer, f"{self._edge} to take or refuse a continuation")
        self._own.came_back()  # it may come to us, even if the edge had ended for us
        return stored is not None

    # --- losses and the end -------------------------------------------------------------------------------

    async def settled(self, lease: Lease, record: Prompt | Continuation) -> bool:
        """See to a record that a lost holder left behind; False: it has to be worked on as it is.

        That is when there is no room to put it further, for then its holder hasn't done so either.
        """
        continuation = record if isinstance(record, Continuation) else Continuation(prompt=record)
        key, losses = continuation.prompt.id, continuation.losses + lease.deliveries - 1
        if await dropped_already(self._broker, key):
            await lease.ack()
            return True
        if losses >= self._max_deliveries:
            detail = f"{losses} replicas were lost while they held it"
            event = DroppedEvent(
                node=self._node, parent=key, origins=record.origins, reason="dead_letter", detail=detail
            )
            self._outbox.settle((event,), (lease,))
            return True
        if not await self._offered(continuation.moved(self._node, hop=1 + _hop(record), losses=losses)):
            return False
        await lease.ack()
        return True

    async def end_with_the_prompts(self) -> None:
        """End the edge as soon as no prompt is held here and none can come any more."""
        await self._prompts.emptied()
        await self.end()

    async def end(self) -> None:
        """This replica brings no more prompts onto the edge. Idempotent."""
        await self._clock.wait(self.lengths.flush(), "its last notes of lengths to be durable")
        await self._clock.wait(self._producer.end(), f"the end of {self._edge} to be durable")


def _hop(record: Prompt | Continuation) -> int:
    return record.hop if isinstance(record, Continuation) else 0
