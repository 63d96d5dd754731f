"""The way into an edge on NATS. A full edge refuses instead of blocking, so the waiting is done here."""

from __future__ import annotations

import asyncio
import random

from arriero.engine.broker import BrokerError, check_fits
from arriero.engine.nats_edge import NatsEdge
from arriero.engine.nats_link import JetStreamError

_STORE_FAILED = 10077  # "maximum messages exceeded" or "maximum bytes exceeded"
_PAUSE_S = (0.001, 0.05)
_ROOM_BYTES = 8 << 10  # left for headers, and for the error if it ends as a dead letter
_CHEAP_BYTES = 16 << 10  # larger ones look for room before they are sent once more


class NatsProducer:
    """One replica's way into an edge."""

    def __init__(self, edge: NatsEdge, replica: int) -> None:
        self._edge = edge
        self._replica = replica
        self._subject = edge.names.edge_subject(edge.name)
        self._line = asyncio.Lock()  # held by the put at the head of those that wait; fair
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def put(self, id: str, payload: bytes, *, earlier: int = 0) -> bool:
        await self._check(id, payload)
        self._under_way += 1
        self._idle.clear()
        try:
            if not self._line.locked():
                stored = await self._send(id, payload)
                if stored is not None:
                    return stored
            async with self._line:
                return await self._send_when_possible(id, payload)
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def offer(self, id: str, payload: bytes) -> bool | None:
        await self._check(id, payload)
        return await self._send(id, payload)

    async def knows(self, id: str) -> bool:
        what = f"ask for {id} on edge {self._edge.name}"
        try:
            stream = await self._edge.ask(f"STREAM.INFO.{self._edge.stream}")
            replicated = stream["config"]["num_replicas"] > 1
            return await self._edge.link.known(self._subject, id, replicated=replicated, what=what)
        except JetStreamError as error:
            raise BrokerError(f"{what}: {error}") from None

    durable = True

    async def settled(self, id: str) -> None:
        raise BrokerError(f"edge {self._edge.name} is durable; what it holds needs no answer")

    async def _check(self, id: str, payload: bytes) -> None:
        decl = await self._edge.decl()
        check_fits(decl, id, payload)
        limit = self._edge.link.max_payload - _ROOM_BYTES
        if len(payload) > limit:
            raise BrokerError(
                f"edge {decl.name}: message {id} has {len(payload)} bytes, the server takes at most {limit}; "
                "send it by claim check or raise the server's max_payload"
            )

    async def _send(self, id: str, payload: bytes) -> bool | None:
        """True if stored, False if known, None if the edge is full."""
        try:
            what = f"put {id} on edge {self._edge.name}"
            return await self._edge.link.store(self._subject, payload, id, what=what)
        except JetStreamError as error:
            if error.code == _STORE_FAILED and "maximum" in error.description:
                return None
            raise BrokerError(f"put {id} on edge {self._edge.name}: {error}") from None

    async def _send_when_possible(self, id: str, payload: bytes) -> bool:
        pause_s, longest_s = _PAUSE_S
        while True:
            if len(payload) < _CHEAP_BYTES or await self._edge.has_room(len(payload)):
                stored = await self._send(id, payload)
                if stored is not None:
                    return stored
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(pause_s * 1.5, longest_s)

    async def end(self) -> None:
        await self._idle.wait()
        await self._edge.end(self._replica)
