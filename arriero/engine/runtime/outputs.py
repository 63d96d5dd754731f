"""What a node gives: sent to its edge and its loops, and once it is safe its parents are acknowledged.

On a durable edge it is safe when it is there, on one in memory when all readers have answered for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
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
    side by side, at most 16 outputs on their way at a time (versions, and with `one_by_one` all, one at a
    time); a full edge therefore stops the component soon. When all consumers have left (`consumers_left`)
    nobody will ever take another record, and outputs are let go.

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
        one_by_one: bool = False,
    ) -> None:
        self._broker, self._producer, self._clock = broker, producer, clock
        self._logs = tuple(loop_log(name) for name in loops)
        self._consumers_left, self._max_deliveries = consumers_left, max_deliveries
        self._most = 1 if loops or one_by_one else _AHEAD
        self._answers: dict[asyncio.Task[None], tuple[Lease, ...]] = {}
        self._sending: set[object] = set()  # one for each output that isn't on its edge and loops yet
        self._moved = asyncio.Event()
        self._scopes: set[asyncio.Timeout] = set()  # around the calls that end when all consumers have left
        self._watcher: asyncio.Task[None] | None = None
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def put(
        self,
        record: Record,
        leases: tuple[Lease, ...],
        *,
        first: Event | None = None,
        beside: Event | None = None,
        after: Event | None = None,
        siblings: Sequence[asyncio.Task[None]] = (),
        earlier: int = 0,
    ) -> asyncio.Task[None]:
        """Hand over a stamped record and the leases that its publication acknowledges; waits for room.

        The event `first` is durable before the record is sent; `beside` is recorded at the same time,
        and `after` when it is there, before the leases are acknowledged.
        `siblings` are the answers to the same leases that were handed over before, `earlier` is how often its
        parents had been delivered in vain. Returns the answer.
        """
        while len(self._sending) >= self._most:
            await self._wait("room on its own edge")
        self._check()
        sending = object()
        self._sending.add(sending)
        work = self._publish(record, first, beside, after, partial(self._sending.discard, sending), earlier)
        answer = self._start(self._acknowledged(work, leases, siblings), leases)
        answer.add_done_callback(lambda _: self._sending.discard(sending))
        return answer

    def settle(self, events: tuple[Event, ...], leases: tuple[Lease, ...]) -> None:
        """Record `events`, then acknowledge `leases`."""
        self._start(self._settle(events, leases), leases)

    def acknowledge_again(self, lease: Lease) -> None:
        """Acknowledge a second delivery, when the answer to the first is durable."""
        self._start(self._after(tuple(self._answers), lease), (lease,))

    async def sent(self) -> None:
        """Wait until every output is where its readers find it. Raises the first error."""
        while self._sending:
            await self._wait("its last outputs to be sent")
        self._check()

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
        if self._watcher is not None:
            self._watcher.cancel()
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
        if not task.cancelled():
            if (error := task.exception()) is None:
                del self._answers[task]
            elif not self.failed.done():
                self.failed.set_exception(error)
                self.failed.exception()  # seen: whoever runs the node raises it
        self._moved.set()

    async def _acknowledged(
        self,
        work: Coroutine[Any, Any, None],
        leases: tuple[Lease, ...],
        siblings: Sequence[asyncio.Task[None]],
    ) -> None:
        await work
        if siblings:
            await asyncio.wait(siblings)
            self._check()
        await together(*(lease.ack() for lease in leases))

    async def _publish(
        self,
        record: Record,
        first: Event | None,
        beside: Event | None,
        after: Event | None,
        sent: Callable[[], None],
        earlier: int,
    ) -> None:
        payload = encode(record)
        if first is not None:
            await journal(self._broker, first)
        sends: list[Coroutine[Any, Any, Any]] = []
        if beside is not None:  # first: the gate waits for it
            sends.append(journal(self._broker, beside))
        sends += [self._broker.append(log, record.id, payload) for log in self._logs]
        producer, left = self._producer, self._consumers_left
        if producer is not None and left is not None:
            sends.append(self._unless(left, producer.put(record.id, payload, earlier=earlier)))
        await together(*sends)
        if after is not None:
            await journal(self._broker, after)
        sent()
        self._moved.set()
        if producer is not None and left is not None and not producer.durable:
            await self._unless(left, producer.settled(record.id))

    async def _settle(self, events: tuple[Event, ...], leases: tuple[Lease, ...]) -> None:
        await together(*(journal(self._broker, event) for event in events))
        await together(*(lease.ack() for lease in leases))

    async def _after(self, earlier: tuple[asyncio.Task[None], ...], lease: Lease) -> None:
        if earlier:
            await asyncio.wait(earlier)
        self._check()
        await lease.ack()

    async def _unless(self, left: asyncio.Event, call: Coroutine[Any, Any, object]) -> None:
        """The call of a producer, broken off as soon as all consumers have `left`."""
        self._watcher = self._watcher or asyncio.create_task(self._end_scopes(left))
        scope = asyncio.timeout(0.0 if left.is_set() else None)
        try:
            async with scope:
                self._scopes.add(scope)
                await call
        except TimeoutError:
            if not scope.expired():  # the call's own
                raise
        finally:
            self._scopes.discard(scope)

    async def _end_scopes(self, left: asyncio.Event) -> None:
        await left.wait()
        for scope in self._scopes:
            scope.reschedule(0.0)


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
