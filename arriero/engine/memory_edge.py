"""What an edge is in memory: messages, what each group still has to acknowledge, who waits for what."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from arriero.engine.broker import DeadLetter, EdgeDecl, EdgeEnded
from arriero.schemas.messages import EndOfStream

_REMEMBERED = 1 << 16


class MemoryMessage:
    """One message in one group."""

    def __init__(self, id: str, payload: bytes, earlier: int) -> None:
        self.id, self.payload = id, payload
        self.deliveries = earlier
        self.lease: MemoryLease | None = None


class MemoryLease:
    """One message, held by one replica until acknowledged. `until` is prolonged by the pulse's thread."""

    def __init__(self, group: MemoryGroup, message: MemoryMessage, holder: Holder) -> None:
        self._group, self.message, self.holder = group, message, holder
        self.deliveries = message.deliveries
        self.until = 0.0
        self.timer: asyncio.TimerHandle | None = None  # holds the lease, and so its payload

    @property
    def id(self) -> str:
        return self.message.id

    @property
    def payload(self) -> bytes:
        return self.message.payload

    @property
    def valid(self) -> bool:
        return self.message.lease is self

    def prolong(self) -> None:
        self.until = time.monotonic() + self._group.edge.decl.lease_s

    async def ack(self) -> None:
        self._group.settle(self.message)

    async def nack(self, error: str = "") -> None:
        if self.valid:
            self._group.take_back(self, error, last=self.deliveries >= self._group.edge.decl.max_deliveries)

    async def extend(self) -> None:
        if self.valid:
            self.prolong()

    def give_back(self) -> None:
        """Its holder is gone."""
        if self.valid:
            self._group.take_back(self)


class Holder(Protocol):
    """A consumer as its leases see it; `held` is the connection's, for its pulse."""

    @property
    def held(self) -> set[MemoryLease]: ...


@dataclass
class MemoryCall:
    """A `lease` call that waits."""

    consumer: Holder
    answer: asyncio.Future[MemoryLease]


class MemoryGroup:
    """What one group still has to acknowledge: `waiting` in order, `leased` by id."""

    def __init__(self, name: str, edge: MemoryEdge) -> None:
        self.name, self.edge = name, edge
        self.waiting: deque[MemoryMessage] = deque()
        self.leased: dict[str, MemoryMessage] = {}
        self.calls: deque[MemoryCall] = deque()

    def add(self, message: MemoryMessage) -> None:
        self.waiting.append(message)
        self.serve()

    def serve(self) -> None:
        """Give what waits to the calls that wait; end the calls for which nothing can come any more."""
        while self.waiting and self.calls:
            call = self.calls.popleft()
            if not call.answer.done() and (lease := self.take(call.consumer)):
                call.answer.set_result(lease)
        if not self.waiting and self.edge.ended:
            for call in self.calls:
                if not call.answer.done() and not self.others_hold(call.consumer):
                    call.answer.set_exception(EdgeEnded(self.edge.decl.name))

    def others_hold(self, consumer: Holder) -> bool:
        return any(m.lease is not None and m.lease.holder is not consumer for m in self.leased.values())

    def take(self, consumer: Holder) -> MemoryLease | None:
        """The first waiting message; those delivered too often go to the dead letters instead."""
        while self.waiting:
            message = self.waiting.popleft()
            if message.deliveries >= self.edge.decl.max_deliveries:
                self.bury(message, f"its lease ran out; delivered {message.deliveries} times")
                continue
            message.deliveries += 1
            lease = message.lease = MemoryLease(self, message, consumer)
            lease.prolong()
            self.leased[message.id] = message
            consumer.held.add(lease)
            self._wake_at(lease)
            return lease
        return None

    def _wake_at(self, lease: MemoryLease) -> None:
        left_s = max(lease.until - time.monotonic(), 0.0)
        lease.timer = asyncio.get_running_loop().call_later(left_s, self._look, lease)

    def _look(self, lease: MemoryLease) -> None:
        if lease.valid and time.monotonic() < lease.until:
            self._wake_at(lease)
        elif lease.valid:
            self.take_back(lease)

    def take_back(self, lease: MemoryLease, error: str = "", *, last: bool = False) -> None:
        message = self._release(lease)
        if last:
            self.bury(message, error)
        else:
            self.waiting.appendleft(message)
        self.serve()

    def never_given(self, lease: MemoryLease) -> None:
        """The call it was meant for is gone: that was no delivery."""
        if lease.valid:
            self._release(lease).deliveries -= 1
            self.waiting.appendleft(lease.message)
            self.serve()

    def _release(self, lease: MemoryLease) -> MemoryMessage:
        message = self.leased.pop(lease.id)
        message.lease = None
        lease.holder.held.discard(lease)
        if lease.timer is not None:
            lease.timer.cancel()
        return message

    def settle(self, message: MemoryMessage) -> None:
        """Off this group, by whoever holds or held it."""
        if message.lease is not None:
            self._release(message.lease)
        elif message in self.waiting:
            self.waiting.remove(message)
        else:
            return
        self.edge.settled(message)
        self.serve()

    def bury(self, message: MemoryMessage, error: str) -> None:
        self.edge.dead.append(
            DeadLetter(
                edge=self.edge.decl.name,
                group=self.name,
                id=message.id,
                error=error,
                deliveries=message.deliveries,
                payload=message.payload,
            )
        )
        self.edge.settled(message)


class MemoryEdge:
    def __init__(self, decl: EdgeDecl, dead: list[DeadLetter]) -> None:
        self.decl, self.dead = decl, dead
        self.groups = {name: MemoryGroup(name, self) for name in decl.groups}
        self.known: dict[str, None] = {}  # in order; the last `_REMEMBERED`, and those that are open
        self.open: dict[str, int] = {}  # id -> groups that have yet to settle it
        self._leaving: dict[str, asyncio.Future[None]] = {}
        self.bytes = 0
        self.ends: set[EndOfStream] = set()
        self.sealed = None if decl.open else decl.producers  # how many producers there have been at the end
        self.puts: deque[tuple[str, bytes, int, asyncio.Future[bool]]] = deque()  # that wait for a place

    @property
    def ended(self) -> bool:
        return self.sealed is not None and len(self.ends) >= self.sealed

    def serve(self) -> None:
        """Look whether somebody waits for what has just become true."""
        for group in self.groups.values():
            group.serve()

    def admit(self) -> None:
        """Store waiting puts, in order, while they fit."""
        while self.puts:
            key, payload, earlier, stored = self.puts[0]
            if not stored.done() and key not in self.known and not self._fits(payload):
                return
            self.puts.popleft()
            if not stored.done():
                stored.set_result(self._store(key, payload, earlier))

    def offer(self, id: str, payload: bytes) -> bool | None:
        """Store it now, or give None if it had to wait."""
        if id not in self.known and (self.puts or not self._fits(payload)):
            return None
        return self._store(id, payload, 0)

    def _fits(self, payload: bytes) -> bool:
        capacity = self.decl.capacity
        return len(self.open) < capacity.messages and self.bytes + len(payload) <= capacity.bytes

    def _store(self, id: str, payload: bytes, earlier: int) -> bool:
        if id in self.known:
            return False
        self.known[id] = None
        while len(self.known) > _REMEMBERED and (oldest := next(iter(self.known))) not in self.open:
            del self.known[oldest]
        self.open[id] = len(self.groups)
        self.bytes += len(payload)
        for group in self.groups.values():
            group.add(MemoryMessage(id, payload, earlier))
        return True

    def settled(self, message: MemoryMessage) -> None:
        self.open[message.id] -= 1
        if not self.open[message.id]:
            del self.open[message.id]
            self.bytes -= len(message.payload)
            if (leaving := self._leaving.pop(message.id, None)) is not None:
                leaving.set_result(None)
            self.admit()

    async def left(self, id: str) -> None:
        """Until every group has settled message `id`."""
        if id in self.open:
            leaving = self._leaving.setdefault(id, asyncio.get_running_loop().create_future())
            await asyncio.shield(leaving)
