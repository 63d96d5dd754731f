"""What a node gives: encoded, made durable on its edge and its loops, and only then its parents acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from arriero.engine.broker import Broker, Lease, Producer
from arriero.engine.codec import encode
from arriero.engine.runtime.waits import NodeClock
from arriero.schemas.ledger import loop_log
from arriero.schemas.messages import Record

T = TypeVar("T")
_AHEAD = 16

Recorded = Callable[[Record], Awaitable[None]]


class Outbox:
    """Publishes in the background and in order, so that a component doesn't wait for the engine's answer.

    At most 16 records are under way; a full edge therefore stops the component soon. When all consumers have
    left (`consumers_left`), nobody will ever take another record and outputs are let go.
    """

    def __init__(
        self, broker: Broker, producer: Producer | None, loops: tuple[str, ...], *, clock: NodeClock,
        consumers_left: asyncio.Event | None, recorded: Recorded,
    ) -> None:  # fmt: skip
        self._broker, self._producer, self._clock = broker, producer, clock
        self._logs = tuple(loop_log(name) for name in loops)
        self._consumers_left, self._recorded = consumers_left, recorded
        self._queue: asyncio.Queue[tuple[Record, tuple[Lease, ...]]] = asyncio.Queue(_AHEAD)
        self._error: BaseException | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._publish_all())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def put(self, record: Record, parents: tuple[Lease, ...]) -> None:
        """Hand over a stamped record and the leases that its publication acknowledges."""
        self._check()
        if self._queue.full():
            await self._clock.wait(self._or_failed(self._queue.put((record, parents))), "room on its own edge")
        else:
            self._queue.put_nowait((record, parents))

    async def flush(self) -> None:
        """Wait until everything handed over is durable and acknowledged."""
        await self._clock.wait(self._or_failed(self._queue.join()), "its last outputs to be durable")

    async def _or_failed(self, wanted: Awaitable[T]) -> T:
        """`wanted`, unless publishing fails first: then that error."""
        assert self._task is not None
        wait = asyncio.ensure_future(wanted)
        try:
            await asyncio.wait({wait, self._task}, return_when=asyncio.FIRST_COMPLETED)
            self._check()
            return await wait
        finally:
            wait.cancel()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    async def _publish_all(self) -> None:
        try:
            while True:
                record, parents = await self._queue.get()
                await self._publish(record)
                for lease in parents:
                    await lease.ack()
                self._queue.task_done()
        except Exception as error:  # noqa: BLE001  # carried to the component's coroutine, which raises it
            self._error = error

    async def _publish(self, record: Record) -> None:
        payload = encode(record)
        if self._producer is not None and self._consumers_left is not None:
            await self._put_unless_left(self._producer, self._consumers_left, record.id, payload)
        for log in self._logs:
            await self._broker.append(log, record.id, payload)
        await self._recorded(record)

    async def _put_unless_left(self, producer: Producer, left: asyncio.Event, id: str, payload: bytes) -> None:
        put = asyncio.ensure_future(producer.put(id, payload))
        if not put.done():
            gone = asyncio.ensure_future(left.wait())
            await asyncio.wait({put, gone}, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
        if put.done():
            await put
        else:
            put.cancel()
            await asyncio.gather(put, return_exceptions=True)
