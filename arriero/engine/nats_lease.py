"""A lease on NATS: a subject that takes verbs. Each is sent as a request, so that its effect is certain.

| state   | set by                                          |
|---------|-------------------------------------------------|
| valid   | delivery; prolonged by `extend` and the pulse   |
| run out | the server, `lease_s` after the last extension  |
| settled | `ack`, `nack`, dead letter                      |
"""

from __future__ import annotations

import logging
import time
from typing import Protocol

import msgspec
from nats.aio.msg import Msg

from arriero.engine.broker import DeadLetter
from arriero.engine.nats_edge import NatsEdge
from arriero.engine.nats_link import Forgotten

_log = logging.getLogger(__name__)
_MARGIN = 0.1
_ERROR_CHARS = 1500  # of a dead letter; with its payload it must fit the server's largest message


class Holder(Protocol):
    """A consumer as its leases see it."""

    @property
    def edge(self) -> NatsEdge: ...
    @property
    def group(self) -> str: ...
    def forget(self, lease: NatsLease) -> None: ...


class NatsLease:
    """One message, held by one replica until acknowledged."""

    def __init__(self, msg: Msg, holder: Holder, lease_s: float) -> None:
        self.reply = msg.reply
        self._payload = msg.data
        self._id = (msg.headers or {}).get("Nats-Msg-Id", "")
        self._deliveries = int(msg.reply.split(".")[-5])  # ....<deliveries>.<seq>.<seq>.<time>.<left>
        self.lease_s = lease_s
        self.settled = False
        self.settling = False
        self._until = time.monotonic() + lease_s
        self._holder = holder
        self._edge = holder.edge
        self._born = holder.edge.link.returns

    @property
    def id(self) -> str:
        return self._id

    @property
    def payload(self) -> bytes:
        return self._payload

    @property
    def deliveries(self) -> int:
        return self._deliveries

    def left_s(self, now: float) -> float:
        """Seconds until the lease runs out, as far as this process knows."""
        return self._until - now

    def extended(self, now: float) -> None:
        """The server was told at time `now` (monotonic)."""
        self._until = now + self.lease_s

    @property
    def valid(self) -> bool:
        """False a little before the server, which counts from when it sent the message, lets it run out."""
        return not self.settled and time.monotonic() < self._until - _MARGIN * self.lease_s

    async def ack(self) -> None:
        if not self.settled:
            await self._tell(b"+ACK")

    async def nack(self, error: str = "") -> None:
        if self.settled:
            return
        if not self.valid:
            await self._settle()  # somebody else may hold it by now
        elif self.deliveries >= (await self._edge.decl()).max_deliveries:
            await self.bury(error)
        else:
            await self._tell(b"-NAK")

    async def extend(self) -> None:
        now = time.monotonic()
        if not self.settled and now < self._until and await self._request(b"+WPI"):
            self.extended(now)

    async def bury(self, error: str) -> None:
        """To the dead letters, then off the edge: a crash in between repeats both."""
        edge, group = self._edge.name, self._holder.group
        dead = DeadLetter(
            edge=edge,
            group=group,
            id=self.id,
            error=error[:_ERROR_CHARS],
            deliveries=self.deliveries,
            payload=self.payload,
        )
        await self._edge.bury(dead, msgspec.msgpack.encode(dead))
        await self._tell(b"+TERM")

    async def _tell(self, verb: bytes) -> None:
        """Send a verb that settles the lease; returns when the server has taken it."""
        self.settling = True
        try:
            await self._request(verb)
        finally:
            self.settling = False
        await self._settle()

    async def _request(self, verb: bytes) -> bool:
        """False if the server was killed before it wrote the delivery down; it will deliver again."""
        what = f"{verb[1:].decode()} of {self.id} on edge {self._edge.name}"
        try:
            await self._edge.link.request(self.reply, verb, what=what, known_since=self._born)
        except Forgotten:
            _log.info("%s: the restarted server doesn't know the lease and will deliver again", what)
            return False
        return True

    async def _settle(self) -> None:
        self.settled = True
        self._holder.forget(self)
        await self._edge.settled(self._holder.group)
