"""Append-only logs on NATS, and the order in which a follower reads them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator

from nats.aio.msg import Msg

from arriero.engine.broker import BrokerError
from arriero.engine.nats_edge import NS
from arriero.engine.nats_link import JetStreamError, Link, ServerAway
from arriero.engine.nats_names import Names

_KNOWN = "maximum messages per subject exceeded"
_BATCH = 64
_PULL_S = 10.0
_SILENCE_S = 3.0  # the server speaks every second; a follower that hears nothing for so long starts over
_NOT_FOUND = 10059


async def declare_log(link: Link, names: Names, log: str, storage: str, replicas: int) -> None:
    """A stream with one subject per id, each taking one message: ids are known for ever, across restarts."""
    stream = names.log_stream(log)
    config = {
        "name": stream,
        "subjects": [names.log_subjects(log)],
        "retention": "limits",
        "discard": "new",
        "discard_new_per_subject": True,
        "max_msgs_per_subject": 1,
        "storage": storage,
        "num_replicas": replicas,
    }
    try:
        await link.ask(f"STREAM.CREATE.{stream}", config, what=f"declare log {log}")
    except JetStreamError as error:
        raise BrokerError(f"declare log {log}: {error}") from None


async def append(link: Link, names: Names, log: str, id: str, payload: bytes) -> bool:
    """True when the entry is durable, False if its id was known. Raises BrokerError."""
    what = f"append {id} to log {log}"
    if len(payload) > link.max_payload - 1024:
        raise BrokerError(f"{what}: {len(payload)} bytes, the server takes at most {link.max_payload - 1024}")
    try:
        return await link.store(names.log_subject(log, id), payload, "", what=what)
    except JetStreamError as error:
        if _KNOWN in error.description:
            return False
        raise BrokerError(f"{what}: {error}") from None


class Follower:
    """Reads a log in order through a consumer that the server forgets when nobody asks.

    Entries are numbered by the consumer; after a gap, a broken connection or a silence the consumer is made
    anew from the entry after the last one that was handed out.
    """

    def __init__(self, link: Link, names: Names, log: str, *, newest_only: bool) -> None:
        self._link = link
        self._log = log
        self._stream = names.log_stream(log)
        self._newest_only = newest_only
        self._last = 0  # sequence in the log of the last entry handed out
        self._arrived: asyncio.Queue[Msg | None] = asyncio.Queue()  # None: the connection broke
        self._what = f"follow log {log}"

    async def entries(self) -> AsyncGenerator[bytes]:
        inbox = self._link.new_inbox()
        subscription = await self._link.subscribe(inbox, self._arrived.put)
        consumer = ""
        self._link.on_loss.add(self._on_loss)
        try:
            while True:
                await self._link.connected(self._what)
                try:
                    consumer = await self._make_consumer()
                    async for payload in self._read(consumer, inbox):
                        yield payload
                except ServerAway:
                    pass
                await subscription.unsubscribe()
                inbox = self._link.new_inbox()
                self._arrived = asyncio.Queue()
                subscription = await self._link.subscribe(inbox, self._arrived.put)
        finally:
            self._link.on_loss.discard(self._on_loss)
            if self._link.up:
                await subscription.unsubscribe()
                if consumer:
                    await self._link.publish(f"$JS.API.CONSUMER.DELETE.{self._stream}.{consumer}")

    def _on_loss(self) -> None:
        self._arrived.put_nowait(None)

    async def _make_consumer(self) -> str:
        if self._last:
            start: dict[str, object] = {
                "deliver_policy": "by_start_sequence",
                "opt_start_seq": self._last + 1,
            }
        else:
            start = {"deliver_policy": "last" if self._newest_only else "all"}
        config = {"ack_policy": "none", "inactive_threshold": 60 * NS, "mem_storage": True, "num_replicas": 1}
        body = {"stream_name": self._stream, "config": start | config}
        try:
            info = await self._link.ask(f"CONSUMER.CREATE.{self._stream}", body, what=self._what)
        except JetStreamError as error:
            if error.code == _NOT_FOUND:
                raise BrokerError(f"log {self._log} isn't declared") from None
            raise BrokerError(f"{self._what}: {error}") from None
        return str(info["name"])

    async def _read(self, consumer: str, inbox: str) -> AsyncGenerator[bytes]:
        """Entries in order; ends when the consumer must be made anew."""
        pull = {"batch": _BATCH, "expires": int(_PULL_S * NS), "idle_heartbeat": NS}
        expected = 1
        while await self._link.publish(
            f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{consumer}", json.dumps(pull).encode(), inbox
        ):
            left = _BATCH
            while left:
                try:
                    async with asyncio.timeout(_SILENCE_S):
                        msg = await self._arrived.get()
                except TimeoutError:
                    return
                if msg is None:
                    return
                status = msg.headers.get("Status") if msg.headers else None
                if status == "100":
                    continue
                if status == "408":
                    break
                if status is not None:
                    return
                entry, number = (int(part) for part in msg.reply.split(".")[-4:-2])
                if number != expected:
                    return
                expected += 1
                left -= 1
                self._last = entry
                yield msg.data
