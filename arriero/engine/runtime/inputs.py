"""What stands behind a `Stream` of an edge while a component runs.

It leases a few records ahead (`want`) and decodes them. At the moment a component takes one, `accept` may
refuse it (stale, held out) and answer for it itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Generic, TypeVar

from arriero.engine.broker import BrokerError, Consumer, EdgeEnded, Lease
from arriero.engine.codec import CodecError, decode
from arriero.engine.runtime.waits import NodeClock
from arriero.schemas.messages import Record

R = TypeVar("R", bound=Record)
_log = logging.getLogger(__name__)
_LEASE_WAIT_S = 5.0
_MOST_AT_ONCE = 8
_REMEMBERED = 1 << 16

Accept = Callable[[Lease, R], R | None]
Poisoned = Callable[[Lease, str], Awaitable[None]]
Again = Callable[[Lease], None]
Settled = Callable[[Lease, R], Awaitable[bool]]


class EdgeSource(Generic[R]):
    """Records of one edge, leased ahead of the component.

    | state    | moved by                                                               |
    |----------|------------------------------------------------------------------------|
    | leased   | `_fetch`: at most `want` leases nobody has taken                        |
    | taken    | the component, through `next` or `poll`                                 |
    | answered | the node (`answer`); it acks when the output is durable                 |
    | returned | the node (`forget`, then nack and `came_back`), or `stop`: leased again |

    A record that is delivered once more while it is taken or answered is not shown to the component again.
    Nor is one that a lost holder left behind, if `settled` finds its answer or sees to it. Leasing begins
    with `start`, or when the component first asks; `on_demand`: it goes on only while the component asks.

    `key`: what a taken record is called; its id, unless several records are about the same thing.
    """

    def __init__(
        self,
        consumer: Consumer,
        kind: type[R],
        *,
        name: str,
        clock: NodeClock,
        accept: Accept[R],
        poisoned: Poisoned,
        again: Again,
        want: int,
        max_deliveries: int,
        settled: Settled[R] | None = None,
        key: Callable[[R], str] = lambda record: record.id,
        on_demand: bool = False,
    ) -> None:
        self._settled, self._key, self._on_demand = settled, key, on_demand
        self._asked = not on_demand
        self._consumer, self._kind, self.name, self._clock = consumer, kind, name, clock
        self._accept, self._poisoned, self._again = accept, poisoned, again
        self._want, self._max_deliveries = want, max_deliveries
        self._ready: deque[tuple[Lease, R]] = deque()
        self.taken: dict[str, tuple[Lease, R]] = {}
        self._moving: set[str] = set()  # keys that are being put elsewhere, and may come back meanwhile
        self._answered: dict[str, None] = {}  # in order, the last `_REMEMBERED`
        self._ahead = self._leasing = self._returns = 0
        self._over = False  # as far as the last lease call knows
        self._closed = False
        self._changed, self._room, self._reopened = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._emptier = asyncio.Event()
        self._error: BaseException | None = None
        self._fetchers: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to lease; `stop` and `close` end it. Idempotent."""
        if not self._fetchers and not self._over:
            number = min(self._want, _MOST_AT_ONCE)
            self._fetchers = [asyncio.create_task(self._fetch()) for _ in range(number)]

    async def close(self) -> None:
        """The component wants no more: what was leased ahead is given back, and the stream has ended."""
        for task in self._fetchers:
            task.cancel()
        await asyncio.gather(*self._fetchers, return_exceptions=True)
        ahead = [lease for lease, _ in self._ready]
        self._ready.clear()
        self._over = self._closed = True
        self._changed.set()
        self._emptier.set()
        await asyncio.gather(*(give_back(lease, self._max_deliveries) for lease in ahead))

    async def emptied(self) -> None:
        """Until nothing more comes and nothing taken is without an answer."""
        while not self.ended or self.taken:
            self._emptier.clear()
            await self._emptier.wait()

    async def stop(self) -> None:
        """Lease nothing more and give back what has no answer."""
        for task in self._fetchers:
            task.cancel()
        await asyncio.gather(*self._fetchers, return_exceptions=True)
        unanswered = [lease for lease, _ in (*self._ready, *self.taken.values())]
        self._ready.clear()
        self.taken.clear()
        await asyncio.gather(*(give_back(lease, self._max_deliveries) for lease in unanswered))

    @property
    def ended(self) -> bool:
        """Nothing more can come: the edge has ended, and no lease of ours is on its way to the component."""
        return self._over and not self._leasing and not self._ready

    async def next(self) -> R | None:
        if (record := self.poll()) is not None:
            return record
        # One wait, however often a lease comes back empty meanwhile: or it would never reach its bound.
        return None if self.ended else await self._clock.wait(self._arrival(), self.name, for_records=True)

    async def _arrival(self) -> R | None:
        while True:
            self._changed.clear()
            await self._changed.wait()
            if (record := self.poll()) is not None or self.ended:
                return record

    def poll(self) -> R | None:
        if (record := self.ready()) is None and not (self._on_demand and self._ahead):
            self.start()
            self._asked = True
            self._room.set()
        return record

    def ready(self) -> R | None:
        """A record that has been leased for the component already."""
        if self._error is not None:
            raise self._error
        for _ in range(len(self._ready)):
            if (record := self._take()) is not None:
                return record
        return None

    async def at(self, version: int) -> R:
        raise TypeError(f"{self.name} is no loop; only a loop has versions")

    def answer(self, key: str) -> None:
        """The taken record `key` has its answer."""
        if (held := self.taken.pop(key, None)) is not None:
            self._clock.answer(key, held[1].origins)
            self._answered[held[1].id] = None
            if len(self._answered) > _REMEMBERED:
                del self._answered[next(iter(self._answered))]
            self._emptier.set()

    @contextmanager
    def moving(self, key: str) -> Generator[None, None, None]:
        """What comes about `key` lies here until it is known whether we still hold it."""
        self._moving.add(key)
        try:
            yield
        finally:
            self._moving.discard(key)
            self._changed.set()

    def forget(self, key: str) -> Lease:
        """The lease of the taken record `key`, which is about to be given back."""
        self._clock.forget(key)
        return self.taken.pop(key)[0]

    def came_back(self) -> None:
        """A lease of ours was given back: ask again, even if the edge had ended. Once closed, others do."""
        if self._closed:
            return
        self._returns += 1
        self._over = False
        self._reopened.set()

    def _take(self) -> R | None:
        lease, arrived = self._ready.popleft()
        if self._key(arrived) in self._moving:
            self._ready.append((lease, arrived))
            return None
        self._ahead -= 1
        self._room.set()
        if (held := self.taken.get(self._key(arrived))) is not None:
            if held[1].id != arrived.id:  # somebody has put it further; our work on it counts as well
                self._again(held[0])
            self.taken[self._key(arrived)] = (lease, arrived)
            return None
        if arrived.id in self._answered:
            self._again(lease)
            return None
        if (record := self._accept(lease, arrived)) is None:
            return None
        self.taken[self._key(record)] = (lease, record)
        self._clock.take(self._key(record))
        return record

    async def _fetch(self) -> None:
        try:
            while True:
                while self._ahead >= self._want or not self._asked:
                    self._room.clear()
                    await self._room.wait()
                self._ahead += 1
                self._asked = not self._on_demand
                ready = await self._fetch_one()
                self._ahead -= not ready
                while self._over:
                    await self._reopened.wait()
        except Exception as error:  # noqa: BLE001  # carried to the component's coroutine, which raises it
            self._error = error
        finally:
            self._changed.set()
            self._emptier.set()

    async def _fetch_one(self) -> bool:
        """Whether a record is ready that wasn't."""
        returns = self._returns
        self._leasing += 1
        try:
            if (lease := await self._consumer.lease(wait_s=_LEASE_WAIT_S)) is None:
                return False
            try:
                arrived = decode(lease.payload, self._kind)
            except CodecError as error:
                await self._poisoned(lease, str(error))
                self.came_back()
                return False
            if await self._needs_nothing(lease, arrived):
                return False
            self._ready.append((lease, arrived))
        except EdgeEnded:
            if returns == self._returns:  # nothing was given back since we asked
                self._over = True
                self._reopened.clear()
            return False
        finally:
            self._leasing -= 1
            self._changed.set()
            self._emptier.set()
        return True

    async def _needs_nothing(self, lease: Lease, arrived: R) -> bool:
        """Whether a record of a lost holder has its answer by now."""
        if lease.deliveries == 1 or self._settled is None or arrived.id in self._answered:
            return False
        held = self.taken.get(self._key(arrived))
        return (held is None or held[1].id != arrived.id) and await self._settled(lease, arrived)


async def give_back(lease: Lease, max_deliveries: int) -> None:
    """Let somebody else have what we didn't work on: at once, or on its last delivery when we disconnect.

    Given back then it would count as failed and become a dead letter.
    """
    if lease.deliveries >= max_deliveries:
        return
    try:
        await lease.nack()
    except BrokerError as error:
        _log.warning("%s couldn't be given back: %s", lease.id, error)
