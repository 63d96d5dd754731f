"""Named, bounded, measured waits: what a node waits for, since when, and how long it has worked so far."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Generator
from contextlib import contextmanager
from typing import TypeVar

from arriero.schemas.run import NodeStatus

T = TypeVar("T")


class WaitTimeout(RuntimeError):
    """A wait outlasted its bound: nothing moves where something should."""


class NodeClock:
    """Busy and idle time of one node, and its current wait.

    The node is idle while at least one wait is open, however many overlap, and busy otherwise; both count
    from the first record on. How long the work on a record takes, from taking to answering it, is counted
    apart, for several may be under way at once; the last `remembered` are told. Written by the event loop
    and by compute threads, read by the heartbeat's thread.
    """

    def __init__(self, node: str, *, bound_s: float, remembered: int = 0) -> None:
        self.node, self._bound_s, self._remembered = node, bound_s, remembered
        self._lock = threading.Lock()
        self._started: float | None = None
        self._stopped: float | None = None
        self._waits: dict[object, tuple[str, float]] = {}
        self._held_up: dict[object, tuple[str, float]] = {}
        self._idle_since = 0.0
        self._idle_s = 0.0
        self.taken = self.given = self.tokens = 0
        self._counts: Counter[str] = Counter()
        self._held: dict[str, float] = {}  # records under way -> `_age` when they were taken
        self._took: OrderedDict[int, float] = OrderedDict()  # origin -> seconds of work on it
        self._at_once = 0
        self._halts = 0
        self._halted_since = self._halted_s = 0.0

    def start(self) -> None:
        """The first record has come: busy and idle time count from here. Idempotent."""
        with self._lock:
            self._started = self._started or time.monotonic()

    def take(self, key: str) -> None:
        """The component has begun to work on the record `key`."""
        self.start()
        self.taken += 1
        with self._lock:
            self._held[key] = self._age(time.monotonic())
            self._at_once = max(self._at_once, len(self._held))

    def answer(self, key: str, origins: tuple[int, ...]) -> None:
        """Its work on the record `key`, from these prompts, is done. One that wasn't taken is ignored."""
        with self._lock:
            if (since := self._held.pop(key, None)) is None:
                return
            for origin in origins:  # the parts of one that was put back and came again add up
                before = self._took.pop(origin, 0.0)
                self._took[origin] = before + self._age(time.monotonic()) - since
            while len(self._took) > self._remembered:
                self._took.popitem(last=False)

    def forget(self, key: str) -> None:
        """The record `key` was given back without an answer."""
        with self._lock:
            self._held.pop(key, None)

    def _age(self, now: float) -> float:
        """A clock that stands still while the component is held up: records under way don't age then."""
        return now - self._halted_s - (now - self._halted_since if self._halts else 0.0)

    def stop(self) -> None:
        """The node has ended: nothing counts any more. Idempotent."""
        with self._lock:
            self._stopped = self._stopped or time.monotonic()

    def count(self, name: str, number: int) -> None:
        """Add to a named counter; from any thread."""
        with self._lock:
            self._counts[name] += number

    async def wait(
        self, awaitable: Awaitable[T], what: str, *, bound_s: float | None = None, for_records: bool = False
    ) -> T:
        """The result of `awaitable`; the node is idle meanwhile. Raises WaitTimeout after the bound.

        `for_records`: for more to do; work on what was taken before goes on beside it.
        """
        bound_s = bound_s or self._bound_s
        wait = object()
        self._open(wait, what, halts=not for_records)
        scope = asyncio.timeout(bound_s)
        try:
            async with scope:
                return await awaitable
        except TimeoutError:
            if not scope.expired():  # the awaited thing's own
                raise
            raise WaitTimeout(f"{self.node} waited {bound_s:g} s for {what}") from None
        finally:
            self._close(wait, halts=not for_records)

    @contextmanager
    def held_up(self, what: str) -> Generator[None, None, None]:
        """Say what something beside the component takes so long for; neither busy nor idle counts by it."""
        wait = object()
        with self._lock:
            self._held_up[wait] = (what, time.monotonic())
        try:
            yield
        finally:
            with self._lock:
                del self._held_up[wait]

    def _open(self, wait: object, what: str, *, halts: bool) -> None:
        with self._lock:
            now = time.monotonic()
            if not self._waits:
                self._idle_since = now
            self._waits[wait] = (what, now)
            if halts and not self._halts:
                self._halted_since = now
            self._halts += halts

    def _close(self, wait: object, *, halts: bool) -> None:
        with self._lock:
            now = time.monotonic()
            del self._waits[wait]
            if not self._waits:
                self._idle_s += self._idle_until(now)
            self._halts -= halts
            if halts and not self._halts:
                self._halted_s += now - self._halted_since

    def _idle_until(self, now: float) -> float:
        """Seconds from the moment the node became idle, or began to count, to `now`."""
        if self._started is None:
            return 0.0
        return max(min(now, self._stopped or now) - max(self._idle_since, self._started), 0.0)

    def status(self) -> NodeStatus:
        """The node now; from any thread."""
        with self._lock:
            now = self._stopped or time.monotonic()
            what, since = next(iter((*self._held_up.values(), *self._waits.values())), ("", now))
            idle_s = self._idle_s + (self._idle_until(now) if self._waits else 0.0)
            busy_s = max(now - self._started - idle_s, 0.0) if self._started is not None else 0.0
            return NodeStatus(
                node=self.node,
                waits_for=what,
                waits_s=max(now - since, 0.0),
                busy_s=busy_s,
                idle_s=idle_s,
                taken=self.taken,
                given=self.given,
                tokens=self.tokens,
                ended=self._stopped is not None,
                at_once=self._at_once,
                took=tuple((origin, round(s, 5)) for origin, s in self._took.items()),
                counts=dict(self._counts),
            )


async def first_error(work: asyncio.Task[None], *others: asyncio.Future[None]) -> None:
    """Until `work` is done. Raises its error, or that of one of `others` before it is done."""
    waiting: set[asyncio.Future[None]] = {work, *others}
    while not work.done():
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for future in done - {work}:
            future.result()
    if work.cancelled():
        raise RuntimeError(f"{work.get_name()} was cancelled from inside: something it waited for was")
    work.result()
