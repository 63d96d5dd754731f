"""What a node gives: made durable on its edge and its loops, and only then its parents acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from arriero.engine.broker import Broker, Lease, Producer
from arriero.engine.codec import encode
from arriero.engine.runtime.inputs import give_back
from arriero.engine.runtime.journal import record as journal
from arriero.engine.runtime.waits import NodeClock
from arriero.schemas.ledger import Event, loop_log
from arriero.schemas.messages import Record

_AHEAD = 16


class Outbox:
    """Publishes in the background, so that a component doesn't wait for the engine's answers.

    An answer is one task: its events, its output, then the acknowledgements. Answers start in order and run
    side by side, at most 16 outputs at a time (versions one at a time); a full edge therefore stops the
    component soon. When all consumers have left (`consumers_left`) nobody will ever take another record, and
    outputs are let go.

    `failed` never has a result; it raises the first error of an answer.
    """

    def __init__(
        self,
        broker: Broker,
        producer: Producer | None,
        loops: tuple[str, ...],
        *,
        clock: NodeClock,
        consumers_left: asyncio.Event | None,
        max_deliveries: int,
    ) -> None:
        self._broker, self._producer, self._clock = broker, producer, clock
        self._logs = tuple(loop_log(name) for name in loops)
        self._consumers_left, self._max_deliveries = consumers_left, max_deliveries
        self._most = 1 if loops else _AHEAD
        self._answers: dict[asyncio.Task[None], tuple[Lease, ...]] = {}
        self._outputs: set[asyncio.Task[None]] = set()
        self._moved = asyncio.Event()
        self._gone: asyncio.Task[bool] | None = None  # done when all consumers have left
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def put(
        self,
        record: Record,
        leases: tuple[Lease, ...],
        *,
        first: Event | None = None,
        beside: Event | None = None,
    ) -> None:
        """Hand over a stamped record and the leases that its publication acknowledges; waits for room.

        The event `first` is durable before the record is sent; `beside` is recorded at the same time.
        """
        while len(self._outputs) >= self._most:
            await self._wait("room on its own edge")
        self._check()
        self._outputs.add(self._start(self._publish(record, leases, first, beside), leases))

    def settle(self, events: tuple[Event, ...], leases: tuple[Lease, ...]) -> None:
        """Record `events`, then acknowledge `leases`."""
        self._start(self._settle(events, leases), leases)

    def acknowledge_again(self, lease: Lease) -> None:
        """Acknowledge a second delivery, when the answer to the first is durable."""
        self._start(self._after(tuple(self._answers), lease), (lease,))

    async def flush(self) -> None:
        """Wait until everything handed over is durable and acknowledged. Raises the first error."""
        while self._answers:
            await self._wait("its last outputs to be durable")
        self._check()

    async def stop(self) -> None:
        """Break off what is under way and give its leases back; what was published is known by its id."""
        broken_off = tuple(lease for leases in self._answers.values() for lease in leases)
        tasks = tuple(self._answers)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(give_back(lease, self._max_deliveries) for lease in broken_off))
        if self._gone is not None:
            self._gone.cancel()
        if not self.failed.done():
            self.failed.cancel()

    def _check(self) -> None:
        if self.failed.done():
            self.failed.result()

    async def _wait(self, what: str) -> None:
        self._check()
        self._moved.clear()
        await self._clock.wait(self._moved.wait(), what)

    def _start(self, answer: Coroutine[Any, Any, None], leases: tuple[Lease, ...]) -> asyncio.Task[None]:
        task = asyncio.create_task(answer)
        self._answers[task] = leases
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._outputs.discard(task)
        if not task.cancelled():
            if (error := task.exception()) is None:
                del self._answers[task]
            elif not self.failed.done():
                self.failed.set_exception(error)
                self.failed.exception()  # seen: whoever runs the node raises it
        self._moved.set()

    async def _publish(
        self, record: Record, leases: tuple[Lease, ...], first: Event | None, beside: Event | None
    ) -> None:
        payload = encode(record)
        if first is not None:
            await journal(self._broker, first)
        sends: list[Coroutine[Any, Any, Any]] = []
        if beside is not None:  # first: the gate waits for it
            sends.append(journal(self._broker, beside))
        sends += [self._broker.append(log, record.id, payload) for log in self._logs]
        if self._producer is not None and self._consumers_left is not None:
            sends.append(self._put_unless_left(self._producer, self._consumers_left, record.id, payload))
        await together(*sends)
        await together(*(lease.ack() for lease in leases))

    async def _settle(self, events: tuple[Event, ...], leases: tuple[Lease, ...]) -> None:
        await together(*(journal(self._broker, event) for event in events))
        await together(*(lease.ack() for lease in leases))

    async def _after(self, earlier: tuple[asyncio.Task[None], ...], lease: Lease) -> None:
        if earlier:
            await asyncio.wait(earlier)
        self._check()
        await lease.ack()

    async def _put_unless_left(
        self, producer: Producer, left: asyncio.Event, key: str, payload: bytes
    ) -> None:
        if left.is_set():
            return
        gone = self._gone = self._gone or asyncio.create_task(left.wait())  # one for all puts
        put = asyncio.ensure_future(producer.put(key, payload))
        try:
            await asyncio.wait({put, gone}, return_when=asyncio.FIRST_COMPLETED)
            if put.done():
                put.result()
        finally:
            if not put.done():
                put.cancel()
                await asyncio.gather(put, return_exceptions=True)


async def together(*work: Coroutine[Any, Any, Any]) -> None:
    """Do all of `work` side by side; the first error breaks off the rest. Alone, it costs no task."""
    if len(work) == 1:
        await work[0]
        return
    tasks = [asyncio.create_task(w) for w in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
