"""Named, bounded, measured waits: what a node waits for, since when, and how long it has worked so far."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable
from typing import TypeVar

from arriero.schemas.run import NodeStatus

T = TypeVar("T")


class WaitTimeout(RuntimeError):
    """A wait outlasted its bound: nothing moves where something should."""


class NodeClock:
    """Busy and idle time of one node, and its current wait. Read from the heartbeat's thread."""

    def __init__(self, node: str, *, bound_s: float) -> None:
        self.node, self._bound_s = node, bound_s
        self._started: float | None = None
        self._stopped: float | None = None
        self._waits: dict[int, tuple[str, float]] = {}
        self._idle_s = 0.0
        self.taken = self.given = self.tokens = 0
        self.counts: Counter[str] = Counter()

    def start(self) -> None:
        """The first record has come: busy and idle time count from here."""
        if self._started is None:
            self._started = time.monotonic()
            self._waits = {k: (what, self._started) for k, (what, _) in self._waits.items()}

    def stop(self) -> None:
        self._stopped = time.monotonic()

    def count(self, name: str, number: int) -> None:
        self.counts[name] += number

    async def wait(self, awaitable: Awaitable[T], what: str) -> T:
        """The result of `awaitable`; the node is idle meanwhile. Raises WaitTimeout after the bound."""
        key = id(awaitable)
        began = time.monotonic()
        self._waits[key] = (what, began)
        try:
            async with asyncio.timeout(self._bound_s):
                return await awaitable
        except TimeoutError:
            raise WaitTimeout(f"{self.node} waited {self._bound_s:.0f} s for {what}") from None
        finally:
            since = self._waits.pop(key)[1]
            if self._started is not None and not self._waits:
                self._idle_s += time.monotonic() - max(since, self._started)

    def status(self) -> NodeStatus:
        now = self._stopped or time.monotonic()
        what, since = next(iter(list(self._waits.values())), ("", now))
        open_s = now - max(since, self._started or now) if what else 0.0
        idle_s = self._idle_s + max(open_s, 0.0)
        return NodeStatus(
            node=self.node, waits_for=what, waits_s=max(now - since, 0.0),
            busy_s=max(now - self._started - idle_s, 0.0) if self._started is not None else 0.0, idle_s=idle_s,
            taken=self.taken, given=self.given, tokens=self.tokens, ended=self._stopped is not None,
            counts=dict(self.counts),
        )  # fmt: skip
