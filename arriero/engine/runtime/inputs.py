"""The two things that stand behind a `Stream` while a component runs: an edge, and a loop.

An edge leases a few records ahead (`want`) and decodes them. At the moment a component takes one, `accept`
may refuse it (stale, held out) and answer for it itself. A loop keeps the newest version.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from arriero.engine.broker import Broker, BrokerError, Consumer, EdgeEnded, Lease
from arriero.engine.codec import CodecError, decode
from arriero.engine.runtime.waits import NodeClock
from arriero.schemas.messages import Record, Weights

R = TypeVar("R", bound=Record)
_log = logging.getLogger(__name__)
_LEASE_WAIT_S = 5.0
_MOST_AT_ONCE = 8
_REMEMBERED = 1 << 16

Accept = Callable[[Lease, R], R | None]
Poisoned = Callable[[Lease, str], Awaitable[None]]
Again = Callable[[Lease], None]


class EdgeSource(Generic[R]):
    """Records of one edge, leased ahead of the component.

    | state    | moved by                                                               |
    |----------|------------------------------------------------------------------------|
    | leased   | `_fetch`: at most `want` leases nobody has taken                        |
    | taken    | the component, through `next` or `poll`                                 |
    | answered | the node (`answer`); it acks when the output is durable                 |
    | returned | the node (`forget`, then nack and `came_back`), or `stop`: leased again |

    A record that is delivered once more while it is taken or answered is not shown to the component again.
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
    ) -> None:
        self._consumer, self._kind, self.name, self._clock = consumer, kind, name, clock
        self._accept, self._poisoned, self._again = accept, poisoned, again
        self._want, self._max_deliveries = want, max_deliveries
        self._ready: deque[tuple[Lease, R]] = deque()
        self.taken: dict[str, tuple[Lease, R]] = {}
        self._answered: dict[str, None] = {}  # in order, the last `_REMEMBERED`
        self._ahead = self._leasing = self._returns = 0
        self._over = False  # as far as the last lease call knows
        self._changed, self._room, self._reopened = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._error: BaseException | None = None
        self._fetchers: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to lease; `stop` ends it."""
        self._fetchers = [asyncio.create_task(self._fetch()) for _ in range(min(self._want, _MOST_AT_ONCE))]

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
        return None if self.ended else await self._clock.wait(self._arrival(), self.name)

    async def _arrival(self) -> R | None:
        while True:
            self._changed.clear()
            await self._changed.wait()
            if (record := self.poll()) is not None or self.ended:
                return record

    def poll(self) -> R | None:
        if self._error is not None:
            raise self._error
        while self._ready:
            if (record := self._take()) is not None:
                return record
        return None

    async def at(self, version: int) -> R:
        raise TypeError(f"{self.name} is no loop; only a loop has versions")

    def answer(self, key: str) -> None:
        """The taken record `key` has its answer."""
        if self.taken.pop(key, None) is not None:
            self._answered[key] = None
            if len(self._answered) > _REMEMBERED:
                del self._answered[next(iter(self._answered))]

    def forget(self, key: str) -> Lease:
        """The lease of the taken record `key`, which is about to be given back."""
        return self.taken.pop(key)[0]

    def came_back(self) -> None:
        """A lease of ours was given back: ask again, even if the edge had ended."""
        self._returns += 1
        self._over = False
        self._reopened.set()

    def _take(self) -> R | None:
        lease, arrived = self._ready.popleft()
        self._ahead -= 1
        self._room.set()
        if (held := self.taken.get(arrived.id)) is not None:
            self.taken[arrived.id] = (lease, held[1])
            return None
        if arrived.id in self._answered:
            self._again(lease)
            return None
        if (record := self._accept(lease, arrived)) is None:
            return None
        self.taken[record.id] = (lease, record)
        self._clock.start()
        self._clock.taken += 1
        return record

    async def _fetch(self) -> None:
        try:
            while True:
                while self._ahead >= self._want:
                    self._room.clear()
                    await self._room.wait()
                self._ahead += 1
                ready = await self._fetch_one()
                self._ahead -= not ready
                while self._over:
                    await self._reopened.wait()
        except Exception as error:  # noqa: BLE001  # carried to the component's coroutine, which raises it
            self._error = error
        finally:
            self._changed.set()

    async def _fetch_one(self) -> bool:
        """Whether a record is ready that wasn't."""
        returns = self._returns
        self._leasing += 1
        try:
            if (lease := await self._consumer.lease(wait_s=_LEASE_WAIT_S)) is None:
                return False
            try:
                self._ready.append((lease, decode(lease.payload, self._kind)))
            except CodecError as error:
                await self._poisoned(lease, str(error))
                self.came_back()
                return False
        except EdgeEnded:
            if returns == self._returns:  # nothing was given back since we asked
                self._over = True
                self._reopened.clear()
            return False
        finally:
            self._leasing -= 1
            self._changed.set()
        return True


class LoopSource:
    """Versions of a loop: the newest, and the few before it that the weight plane still holds."""

    def __init__(
        self, broker: Broker, log: str, kind: type[Weights], *, name: str, clock: NodeClock, keep: int
    ) -> None:
        self._broker, self._log, self._kind, self.name, self._clock = broker, log, kind, name, clock
        self._kept: dict[int, Weights] = {}
        self._keep = keep
        self._newest = self._taken = -1
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._error: BaseException | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def next(self) -> Weights:
        while (record := self.poll()) is None:
            await self._wait(f"a version of {self.name} after {self._taken}")
        return record

    def poll(self) -> Weights | None:
        if self._error is not None:
            raise self._error
        if self._newest <= self._taken:
            return None
        self._taken = self._newest
        return self._kept[self._newest]

    async def at(self, version: int) -> Weights:
        while self._newest < version:
            await self._wait(f"version {version} of {self.name}")
        self._taken = max(self._taken, version)
        if version not in self._kept:
            raise LookupError(
                f"version {version} of {self.name} is no longer kept; the newest is {self._newest}"
            )
        return self._kept[version]

    async def _wait(self, what: str) -> None:
        """Until something has changed since the caller looked: between its look and the wait nothing runs."""
        if self._error is not None:
            raise self._error
        self._changed.clear()
        await self._clock.wait(self._changed.wait(), what)

    async def _follow(self) -> None:
        try:
            async for payload in self._broker.follow(self._log, newest_only=self._keep == 1):
                record = decode(payload, self._kind)
                self._kept[record.version] = record
                self._newest = max(self._newest, record.version)
                for version in [v for v in self._kept if v <= self._newest - self._keep]:
                    del self._kept[version]
                self._changed.set()
        except Exception as error:  # noqa: BLE001  # carried to the component's coroutine, which raises it
            self._error = error
            self._changed.set()


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
