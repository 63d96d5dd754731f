"""What stands behind a `Stream` of a loop while a component runs: its newest versions."""

from __future__ import annotations

import asyncio

from arriero.engine.broker import Broker
from arriero.engine.codec import decode
from arriero.engine.runtime.waits import NodeClock
from arriero.schemas.messages import Weights


class LoopSource:
    """Versions of a loop: the newest, and those before it that the weight plane still holds.

    These are the last `keep`, and the last two of every `keep_every`-th. `at` finds older ones, too, if they
    were announced before we came; whether the plane has them shows when they are received. `over` is set when
    the loop's producer has ended well; then nobody waits for a version that it hasn't announced.
    """

    def __init__(
        self,
        broker: Broker,
        log: str,
        kind: type[Weights],
        *,
        name: str,
        clock: NodeClock,
        keep: int,
        keep_every: int = 0,
        over: asyncio.Event | None = None,
    ) -> None:
        self._over, self._ended = over, False
        self._broker, self._log, self._kind, self.name, self._clock = broker, log, kind, name, clock
        self._kept: dict[int, Weights] = {}
        self._keep, self._every = keep, keep_every
        self._first: int | None = None  # the version that we came in with
        self._newest = self._taken = -1
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._error: BaseException | None = None

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._follow())]
        if self._over is not None:
            self._tasks.append(asyncio.create_task(self._end(self._over)))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def next(self) -> Weights | None:
        while (record := self.poll()) is None and not self._ended:
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
        while self._newest < version and not self._ended:
            await self._wait(f"version {version} of {self.name}")
        if (found := self._kept.get(version)) is not None:
            return found
        if self._first is not None and version < self._first:
            found = await self._clock.wait(self._announced(version), f"version {version} of {self.name}")
        if found is None:
            why = "is no longer kept" if version <= self._newest else "was never made"
            raise LookupError(f"version {version} of {self.name} {why}; the newest is {self._newest}")
        return found

    async def instead(self, version: int, announced: str, *, exactly: bool = False) -> Weights | None:
        while True:
            again, newest = self._kept.get(version), self._kept.get(self._newest)
            if again is not None and again.id != announced:
                return again
            if newest is not None and newest.version > version and not exactly:
                self._taken = newest.version
                return newest
            if self._ended:
                return None
            new = "" if exactly else ", or a newer one"
            await self._wait(f"version {version} of {self.name} to be announced anew{new}")

    async def _announced(self, version: int) -> Weights | None:
        """What the log says of a version from before our time; the last that it says, after a crash."""
        found, newest = None, self._kept[self._newest]
        async for payload in self._broker.follow(self._log):
            record = decode(payload, self._kind)
            found = record if record.version == version else found
            if (record.id, record.version) == (newest.id, newest.version):  # a metric may be NaN
                break
        return found

    async def _wait(self, what: str) -> None:
        """Until something has changed since the caller looked: between its look and the wait nothing runs."""
        if self._error is not None:
            raise self._error
        self._changed.clear()
        await self._clock.wait(self._changed.wait(), what)

    async def _follow(self) -> None:
        try:
            async for payload in self._broker.follow(self._log, newest_only=True):
                self._heard(decode(payload, self._kind))
        except Exception as error:  # noqa: BLE001  # carried to the component's coroutine, which raises it
            self._error = error
            self._changed.set()

    def _heard(self, record: Weights) -> None:
        self._first = record.version if self._first is None else self._first
        self._kept[record.version] = record
        self._newest = max(self._newest, record.version)
        due = [v for v in sorted(self._kept) if self._every and v % self._every == 0][-2:]
        for version in [v for v in self._kept if v <= self._newest - self._keep and v not in due]:
            del self._kept[version]
        self._changed.set()

    async def _end(self, over: asyncio.Event) -> None:
        """Nothing more comes, once the last version that the loop was given is here."""
        try:
            await over.wait()
            # The news of the end may have overtaken the last version, which is on a log of its own.
            async for payload in self._broker.follow(self._log, newest_only=True):
                self._heard(decode(payload, self._kind))
                break
        except Exception as error:  # noqa: BLE001  # as above
            self._error = error
        self._ended = True
        self._changed.set()
