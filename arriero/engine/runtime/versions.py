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
    were announced before we came; whether the plane has them shows when they are received.
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
    ) -> None:
        self._broker, self._log, self._kind, self.name, self._clock = broker, log, kind, name, clock
        self._kept: dict[int, Weights] = {}
        self._keep, self._every = keep, keep_every
        self._first: int | None = None  # the version that we came in with
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
        if (found := self._kept.get(version)) is not None:
            return found
        if self._first is not None and version < self._first:
            found = await self._clock.wait(self._announced(version), f"version {version} of {self.name}")
        if found is None:
            raise LookupError(
                f"version {version} of {self.name} is no longer kept; the newest is {self._newest}"
            )
        return found

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
                record = decode(payload, self._kind)
                self._first = record.version if self._first is None else self._first
                self._kept[record.version] = record
                self._newest = max(self._newest, record.version)
                due = [v for v in sorted(self._kept) if self._every and v % self._every == 0][-2:]
                for version in [v for v in self._kept if v <= self._newest - self._keep and v not in due]:
                    del self._kept[version]
                self._changed.set()
        except Exception as error:  # noqa: BLE001  # carried to the component's coroutine, which raises it
            self._error = error
            self._changed.set()
