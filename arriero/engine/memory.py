"""The contract of `broker` inside one process: for tests, notebooks and runs without a server.

`MemoryBroker()` is a connection to a store of its own; `connect` gives further connections to it. All use one
event loop; only the pulse has a thread, which writes nothing but deadlines and heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from arriero.engine.broker import Beat, BrokerError, DeadLetter, Depth, EdgeDecl, check_fits
from arriero.engine.memory_edge import MemoryCall, MemoryEdge, MemoryLease
from arriero.schemas.messages import EndOfStream

_log = logging.getLogger(__name__)


class MemoryProducer:
    """One replica's way into an edge."""

    def __init__(self, edge: Callable[[], MemoryEdge], replica: int, *, durable: bool) -> None:
        self._edge, self._replica, self.durable = edge, replica, durable
        self._under_way: set[asyncio.Future[bool]] = set()

    async def put(self, id: str, payload: bytes, *, earlier: int = 0) -> bool:
        edge = self._edge()
        check_fits(edge.decl, id, payload)
        stored: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        edge.puts.append((id, payload, 0 if self.durable else earlier, stored))
        edge.admit()
        self._under_way.add(stored)
        try:
            return await stored
        finally:
            self._under_way.discard(stored)

    async def offer(self, id: str, payload: bytes) -> bool | None:
        edge = self._edge()
        check_fits(edge.decl, id, payload)
        return edge.offer(id, payload)

    async def knows(self, id: str) -> bool:
        return id in self._edge().known

    async def settled(self, id: str) -> None:
        await self._edge().left(id)

    async def end(self) -> None:
        edge = self._edge()
        if self._under_way:
            await asyncio.wait(self._under_way)
        edge.ends.add(EndOfStream(producer=edge.decl.name, replica=self._replica))
        edge.serve()


class MemoryConsumer:
    """One replica's way out of an edge, as a member of its group."""

    def __init__(self, edge: Callable[[], MemoryEdge], group: str, broker: MemoryBroker) -> None:
        self._edge, self._group, self.held = edge, group, broker.held

    async def lease(self, *, wait_s: float) -> MemoryLease | None:
        edge = self._edge()
        if self._group not in edge.groups:
            raise BrokerError(
                f"edge {edge.decl.name} has no group {self._group}; it has {', '.join(edge.decl.groups)}"
            )
        group = edge.groups[self._group]
        call = MemoryCall(self, asyncio.get_running_loop().create_future())
        group.calls.append(call)
        group.serve()
        try:
            await asyncio.wait((call.answer,), timeout=wait_s)
        except asyncio.CancelledError:
            if call.answer.done() and not call.answer.exception():
                group.never_given(call.answer.result())
            raise
        finally:
            if call in group.calls:
                group.calls.remove(call)
        return call.answer.result() if call.answer.done() else None


@dataclass
class _Log:
    ids: set[str] = field(default_factory=set[str])
    entries: list[bytes] = field(default_factory=list[bytes])
    grown: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class _Store:
    edges: dict[str, MemoryEdge] = field(default_factory=dict[str, MemoryEdge])
    logs: dict[str, _Log] = field(default_factory=dict[str, _Log])
    dead: list[DeadLetter] = field(default_factory=list[DeadLetter])
    beats: dict[str, tuple[bytes, float, MemoryBroker]] = field(
        default_factory=dict[str, "tuple[bytes, float, MemoryBroker]"]
    )
    watchers: set[asyncio.Queue[bytes]] = field(default_factory=set[asyncio.Queue[bytes]])


class MemoryBroker:
    """A connection; a new store unless it comes from `connect`. `durable`: all roles of the run use it."""

    def __init__(self, _store: _Store | None = None, *, durable: bool = True) -> None:
        self._store, self._durable = _store or _Store(), durable
        self.held: set[MemoryLease] = set()
        self._stop = threading.Event()
        self._pulse: threading.Thread | None = None

    def connect(self) -> MemoryBroker:
        """One more connection to the same store."""
        return MemoryBroker(self._store)

    async def declare(self, edges: Sequence[EdgeDecl], logs: Sequence[str]) -> None:
        for decl in edges:
            known = self._store.edges.setdefault(decl.name, MemoryEdge(decl, self._store.dead)).decl
            if known != decl:
                raise BrokerError(f"edge {decl.name} is declared already, as {known}, not as {decl}")
        for log in logs:
            self._store.logs.setdefault(log, _Log())

    def _edge(self, name: str) -> MemoryEdge:
        if name not in self._store.edges:
            raise BrokerError(f"edge {name} isn't declared")
        return self._store.edges[name]

    def _log(self, name: str) -> _Log:
        if name not in self._store.logs:
            raise BrokerError(f"log {name} isn't declared")
        return self._store.logs[name]

    async def edge(self, name: str) -> EdgeDecl:
        return self._edge(name).decl

    def producer(self, edge: str, replica: int) -> MemoryProducer:
        return MemoryProducer(lambda: self._edge(edge), replica, durable=self._durable)

    def consumer(self, edge: str, group: str) -> MemoryConsumer:
        return MemoryConsumer(lambda: self._edge(edge), group, self)

    async def seal(self, edge: str, producers: int) -> None:
        found = self._edge(edge)
        found.sealed = producers
        found.serve()

    async def servers(self) -> dict[str, str]:
        return {}

    async def depth(self, edge: str) -> Depth:
        found = self._edge(edge)
        return Depth(
            messages=len(found.open),
            bytes=found.bytes,
            waiting={name: len(group.waiting) for name, group in found.groups.items()},
            leased={name: len(group.leased) for name, group in found.groups.items()},
        )

    async def append(self, log: str, id: str, payload: bytes) -> bool:
        found = self._log(log)
        if id in found.ids:
            return False
        found.ids.add(id)
        found.entries.append(payload)
        found.grown.set()
        found.grown = asyncio.Event()
        return True

    async def appended(self, log: str, id: str) -> bool:
        return id in self._log(log).ids

    async def follow(self, log: str, *, newest_only: bool = False) -> AsyncIterator[bytes]:
        found = self._log(log)
        position = max(len(found.entries) - 1, 0) if newest_only else 0
        while True:
            grown = found.grown
            while position < len(found.entries):
                position += 1
                yield found.entries[position - 1]
            if grown is found.grown:
                await grown.wait()

    def start_pulse(self, key: str, state: Callable[[], bytes], *, interval_s: float) -> None:
        if self._pulse is not None:
            raise BrokerError("this connection has a pulse already; a replica is one connection")

        def beat() -> None:
            while True:
                for lease in self.held.copy():
                    lease.prolong()
                try:
                    self._store.beats[key] = (state(), time.monotonic(), self)
                except Exception:  # noqa: BLE001  # the caller's function; a beat is missed, which is seen
                    _log.exception("no state for the heartbeat of %s", key)
                if self._stop.wait(interval_s):
                    return

        self._pulse = threading.Thread(target=beat, name=f"pulse {key}", daemon=True)
        self._pulse.start()

    async def beats(self) -> dict[str, Beat]:
        now = time.monotonic()
        beats = self._store.beats.copy()
        return {key: Beat(payload=payload, age_s=now - at) for key, (payload, at, _) in beats.items()}

    async def show(self, payload: bytes) -> None:
        for shown in self._store.watchers:
            if shown.full():
                shown.get_nowait()
            shown.put_nowait(payload)

    async def watch(self) -> AsyncIterator[bytes]:
        shown: asyncio.Queue[bytes] = asyncio.Queue(1)
        self._store.watchers.add(shown)
        try:
            while True:
                yield await shown.get()
        finally:
            self._store.watchers.discard(shown)

    async def evict(self, key: str) -> None:
        if key in self._store.beats:
            self._store.beats[key][2].give_back()

    def give_back(self) -> None:
        """All that this connection has leased."""
        for lease in tuple(self.held):
            lease.give_back()

    async def dead_letters(self) -> list[DeadLetter]:
        return list(self._store.dead)

    async def close(self) -> None:
        self._stop.set()
        if self._pulse is not None:
            await asyncio.to_thread(self._pulse.join)
        self.give_back()
