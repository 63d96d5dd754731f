"""What an edge is on NATS: its declaration, who of its producers has ended, how much it holds.

The stream keeps a message until every group's durable has acknowledged it (INTEREST retention: a work queue
keeps acknowledged messages after a crash, which then take up capacity for ever). With INTEREST a message
that no durable waits for is thrown away, so the durables are made before any producer may put.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any, cast

from nats.aio.msg import Msg
from pydantic import TypeAdapter

from arriero.engine.broker import ENVELOPE_BYTES, BrokerError, DeadLetter, Depth, EdgeDecl
from arriero.engine.codec import encode
from arriero.engine.nats_link import JetStreamError, Link, Subscription
from arriero.engine.nats_names import Names, token
from arriero.schemas.messages import EndOfStream

NS = 1_000_000_000
_REFRESH_S = 5.0
DEDUP_S = 3600  # a known id is recognised for this long after its put
_STREAM_NOT_FOUND = 10059
_STREAM_DIFFERS = 10058
_OF = "of"  # of so many producers
_EdgeDecl = TypeAdapter(EdgeDecl)


class NatsEdge:
    """An edge as one connection sees it; shared by the producers and consumers of that connection."""

    def __init__(self, link: Link, names: Names, name: str) -> None:
        self.name = name
        self.link = link
        self.names = names
        self.stream = names.edge_stream(name)
        self.listeners: list[Callable[[], None]] = []  # told of an end, or a lease settled after the end
        self.refreshed = -math.inf  # when the ends were read (monotonic)
        self._decl: EdgeDecl | None = None
        self._ends: set[str] = set()
        self._sealed: int | None = None  # producers that there have been, once an open edge is sealed
        self._subscriptions: list[Subscription] = []
        self._watching: asyncio.Task[None] | None = None

    async def declare(self, decl: EdgeDecl, storage: str, replicas: int) -> None:
        """Make the stream and its durables. Raises BrokerError if it exists with another declaration."""
        what = f"declare edge {decl.name}"
        try:
            await self.link.ask(
                f"STREAM.CREATE.{self.stream}",
                {
                    "name": self.stream,
                    "subjects": [self.names.edge_subject(decl.name)],
                    "retention": "interest",
                    "discard": "new",
                    "max_msgs": decl.capacity.messages,
                    "max_bytes": decl.capacity.bytes,
                    "storage": storage,
                    "num_replicas": replicas,
                    "duplicate_window": DEDUP_S * NS,
                    "metadata": {"arriero": _EdgeDecl.dump_json(decl).decode()},
                },
                what=what,
            )
        except JetStreamError as error:
            if error.code != _STREAM_DIFFERS:
                raise BrokerError(f"{what}: {error}") from None
            known = await self.decl()
            if known != decl:
                raise BrokerError(
                    f"edge {decl.name} is declared already, as {known}, not as {decl}"
                ) from None
        for group in decl.groups:
            await self._make_durable(decl, group)
        self._decl = decl

    async def _make_durable(self, decl: EdgeDecl, group: str) -> None:
        config = {
            "durable_name": token(group),
            "name": token(group),
            "deliver_policy": "all",
            "ack_policy": "explicit",
            "ack_wait": int(decl.lease_s * NS),
            "max_deliver": -1,  # dead letters are ours: a message given up by the server would stay for ever
            "max_ack_pending": -1,
            "max_waiting": 16384,
        }
        body = {"stream_name": self.stream, "config": config}
        await self.ask(f"CONSUMER.CREATE.{self.stream}.{token(group)}", body)

    async def decl(self) -> EdgeDecl:
        """The declaration, from the server the first time. Raises BrokerError if the edge is undeclared."""
        if self._decl is None:
            info = await self.ask(f"STREAM.INFO.{self.stream}")
            decl = _EdgeDecl.validate_json(info["config"]["metadata"]["arriero"])
            if info["state"]["consumer_count"] < len(decl.groups):
                raise BrokerError(f"edge {self.name} is declared only in part; declare it again")
            self._decl = decl
        return self._decl

    async def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        what = f"edge {self.name}"
        try:
            return await self.link.ask(path, body, what=what)
        except JetStreamError as error:
            if error.code == _STREAM_NOT_FOUND:
                raise BrokerError(f"edge {self.name} of run {self.names.run} isn't declared") from None
            raise BrokerError(f"{what}: {error}") from None

    async def depth(self) -> Depth:
        decl = await self.decl()
        state = (await self.ask(f"STREAM.INFO.{self.stream}"))["state"]
        infos = {g: await self.ask(f"CONSUMER.INFO.{self.stream}.{token(g)}") for g in decl.groups}
        return Depth(
            messages=state["messages"],
            bytes=state["bytes"],
            waiting={g: i["num_pending"] for g, i in infos.items()},
            leased={g: i["num_ack_pending"] for g, i in infos.items()},
        )

    async def has_room(self, num_bytes: int) -> bool:
        """Whether a message of `num_bytes` would fit now."""
        info = await self.ask(f"STREAM.INFO.{self.stream}")
        state, config = info["state"], info["config"]
        fits: bool = state["messages"] < config["max_msgs"]
        return fits and bool(state["bytes"] + num_bytes + ENVELOPE_BYTES <= config["max_bytes"])

    async def drained(self, group: str, own: int) -> bool:
        """Whether `group` has nothing waiting and at most `own` messages leased.

        The count of waiting messages can lag behind the stream for a moment, so the last message of the
        stream must have been delivered as well. The stream is asked second: what a holder puts in place of
        its lease between both answers then shows as a message that hasn't been delivered.
        """
        info = await self.ask(f"CONSUMER.INFO.{self.stream}.{token(group)}")
        state = (await self.ask(f"STREAM.INFO.{self.stream}"))["state"]
        seen: bool = state["messages"] == 0 or info["delivered"]["stream_seq"] >= state["last_seq"]
        return seen and bool(info["num_pending"] == 0 and info["num_ack_pending"] <= own)

    async def bury(self, dead: DeadLetter, encoded: bytes) -> None:
        """Returns when the dead letter is durable."""
        what = f"dead letter {dead.id} of edge {self.name}"
        try:
            await self.link.store(
                self.names.dead_subject, encoded, f"{self.name}/{dead.group}/{dead.id}", what=what
            )
        except JetStreamError as error:
            raise BrokerError(f"{what}: {error}") from None

    # --- ends ---------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """All producers have ended, as far as this connection knows."""
        if self._decl is None:
            return False
        producers = self._sealed if self._decl.open else self._decl.producers
        return producers is not None and len(self._ends) >= producers

    async def watch(self) -> None:
        """From now on know of the ends of producers. Idempotent; a cancelled caller doesn't undo it."""
        if self._watching is None or (self._watching.done() and self._watching.exception() is not None):
            self._watching = asyncio.ensure_future(self._watch())
        if not self._watching.done() or self._watching.exception() is not None:
            await asyncio.shield(self._watching)

    async def _watch(self) -> None:
        decl = await self.decl()
        subjects = [self.names.end_subject(self.name), self.names.ended_subject(self.name)]
        subjects += [self.names.settled_subject(self.name, g) for g in decl.groups]
        for subject in subjects:
            self._subscriptions.append(await self.link.subscribe(subject, self._on_news))
        await self.refresh()
        self.link.on_return.append(self.refresh)

    async def refresh(self) -> None:
        """Read from the server who has ended: at the start, and after notices may have been missed."""
        self.refreshed = time.monotonic()
        subject = self.names.end_subject(self.name)
        info = await self.ask(f"STREAM.INFO.{self.names.ends_stream}", {"subjects_filter": subject})
        found = cast(dict[str, int], info["state"].get("subjects") or {})
        for end in found:
            self._hear(end)
        await self._tell()

    async def _on_news(self, msg: Msg) -> None:
        if not msg.subject.startswith(f"{self.names.run}.settled."):
            self._hear(msg.subject)
            await self._tell()
        self._notify()

    def _hear(self, subject: str) -> None:
        what = subject.rpartition(".")[2]
        if what.startswith(_OF):
            self._sealed = int(what.removeprefix(_OF))
        else:
            self._ends.add(what)

    async def refresh_if_old(self) -> None:
        """A producer that is killed between its end and the notice of it would leave us waiting."""
        if not self.ended and time.monotonic() - self.refreshed > _REFRESH_S:
            await self.refresh()

    async def end(self, replica: int) -> None:
        """Returns when the end of a producer is durable."""
        end = EndOfStream(producer=self.name, replica=replica)
        await self._say(str(replica), encode(end), f"end of replica {replica} on edge {self.name}")

    async def seal(self, producers: int) -> None:
        """Returns when it is durable that so many producers have been all there are."""
        await self._say(f"{_OF}{producers}", b"", f"seal edge {self.name} with {producers} producers")

    async def _say(self, what: str, payload: bytes, told: str) -> None:
        """Something about the end, to who listens now and who asks later.

        The server tells subscribers before it stores: who subscribes in between and then reads the stream
        would miss it, so it is told once more afterwards.
        """
        await self.decl()
        try:
            await self.link.store(self.names.end_subject(self.name, what), payload, "", what=told)
        except JetStreamError as error:
            raise BrokerError(f"{told}: {error}") from None
        await self.link.publish(self.names.ended_subject(self.name, what))

    async def _tell(self) -> None:
        """Whoever learned of the end earlier may have seen a lease of ours that is settled by now."""
        if self.ended:
            self._notify()
            for group in (await self.decl()).groups:
                await self.settled(group)

    def _notify(self) -> None:
        for listener in self.listeners:
            listener()

    async def settled(self, group: str) -> None:
        """Tell the others of `group`, who wait for the end, that a lease is no longer held."""
        if self.ended:
            await self.link.publish(self.names.settled_subject(self.name, group))
