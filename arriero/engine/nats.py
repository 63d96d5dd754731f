"""The contract of `broker` on NATS JetStream: one server or a cluster, on this machine or another.

A connection holds: one link for the event loop's thread, one for the pulse. What a replica has leased stands
in its heartbeat as the subjects that acknowledge it, so that anybody can give it back for a dead replica.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal

import msgspec
from nats.aio.msg import Msg

from arriero.engine.broker import Beat, BrokerError, DeadLetter, Depth, EdgeDecl
from arriero.engine.nats_cluster import replicas_of
from arriero.engine.nats_consumer import NatsConsumer
from arriero.engine.nats_edge import NatsEdge
from arriero.engine.nats_lease import NatsLease
from arriero.engine.nats_link import Forgotten, JetStreamError, Link
from arriero.engine.nats_log import Follower, append, declare_log
from arriero.engine.nats_names import Names
from arriero.engine.nats_producer import NatsProducer
from arriero.engine.nats_pulse import Pulse, read_beat
from arriero.schemas.ledger import LEDGER_LOG

_log = logging.getLogger(__name__)
_NO_MESSAGE = 10037
_STREAM_NOT_FOUND = 10059


class NatsBroker:
    """One process's connection; make it with `connect`."""

    def __init__(self, link: Link, names: Names, url: str, token: str, storage: str, replicas: int) -> None:
        self._link = link
        self._names = names
        self._url, self._token = url, token
        self._storage, self._replicas = storage, replicas
        self._edges: dict[str, NatsEdge] = {}
        self._consumers: list[NatsConsumer] = []
        self._held: dict[str, NatsLease] = {}
        self._logs: set[str] = set()  # known to exist: a put to a stream that doesn't isn't answered
        self._pulse: Pulse | None = None
        self._heard: dict[str, tuple[float, bytes]] | None = None  # key -> (monotonic time, heartbeat)

    @classmethod
    async def connect(
        cls,
        url: str,
        token: str,
        *,
        run: str,
        storage: Literal["file", "memory"] = "file",
        replicas: int = 1,
        timeout_s: float = 20.0,
    ) -> NatsBroker:
        """Connect to the server at `url` as a member of `run`; `token` opens an account (`nats_access`).

        `timeout_s` bounds every wait for a server that is away. `storage` and `replicas` (servers that `url`
        names) are those of the edges and logs that this connection declares or asks about.
        Raises BrokerError.
        """
        names = Names(run)
        link = await Link.open(url, token, name=f"arriero {run}", timeout_s=timeout_s)
        return cls(link, names, url, token, storage, replicas)

    # --- edges --------------------------------------------------------------------------------------------

    async def declare(self, edges: Sequence[EdgeDecl], logs: Sequence[str]) -> None:
        await self._declare_control()
        await asyncio.gather(
            *(self._edge(decl.name).declare(decl, self._storage, self._replicas) for decl in edges),
            *(declare_log(self._link, self._names, log, self._storage, self._replicas) for log in logs),
        )

    async def _declare_control(self) -> None:
        names = self._names
        newest_only = {"max_msgs_per_subject": 1}
        await self._make_stream(names.ends_stream, names.all_ends, newest_only)
        await self._make_stream(names.beats_stream, names.beat_subject(), newest_only | {"storage": "memory"})
        await self._make_stream(names.dead_stream, names.dead_subject, {})

    async def _make_stream(self, stream: str, subject: str, extra: dict[str, Any]) -> None:
        config: dict[str, Any] = {"name": stream, "subjects": [subject], "storage": self._storage}
        config |= {"num_replicas": self._replicas}
        body = config | extra
        try:
            await self._link.ask(f"STREAM.CREATE.{stream}", body, what=f"declare {stream}")
        except JetStreamError as error:
            raise BrokerError(f"declare {stream}: {error}") from None

    def _edge(self, name: str) -> NatsEdge:
        if name not in self._edges:
            self._edges[name] = NatsEdge(self._link, self._names, name)
        return self._edges[name]

    async def edge(self, name: str) -> EdgeDecl:
        return await self._edge(name).decl()

    def producer(self, edge: str, replica: int) -> NatsProducer:
        return NatsProducer(self._edge(edge), replica)

    def consumer(self, edge: str, group: str) -> NatsConsumer:
        consumer = NatsConsumer(self._edge(edge), group, self._held)
        self._consumers.append(consumer)
        return consumer

    async def seal(self, edge: str, producers: int) -> None:
        await self._edge(edge).seal(producers)

    async def depth(self, edge: str) -> Depth:
        return await self._edge(edge).depth()

    async def dead_letters(self) -> list[DeadLetter]:
        found: list[DeadLetter] = []
        wanted: dict[str, object] = {"seq": 1, "next_by_subj": self._names.dead_subject}
        while message := await self._get(self._names.dead_stream, wanted):
            found.append(msgspec.msgpack.decode(base64.b64decode(message["data"]), type=DeadLetter))
            wanted["seq"] = message["seq"] + 1
        return found

    async def _get(self, stream: str, wanted: dict[str, object]) -> dict[str, Any] | None:
        """One stored message as JSON, its data in base 64; None if there is none."""
        try:
            answer = await self._link.ask(f"STREAM.MSG.GET.{stream}", wanted, what=f"read {stream}")
        except JetStreamError as error:
            if error.code in (_NO_MESSAGE, _STREAM_NOT_FOUND):
                return None
            raise BrokerError(f"read {stream}: {error}") from None
        message: dict[str, Any] = answer["message"]
        return message

    # --- logs ---------------------------------------------------------------------------------------------

    async def append(self, log: str, id: str, payload: bytes) -> bool:
        if log not in self._logs:
            try:
                await self._link.ask(f"STREAM.INFO.{self._names.log_stream(log)}", what=f"log {log}")
            except JetStreamError:
                raise BrokerError(f"log {log} isn't declared") from None
            self._logs.add(log)
        return await append(self._link, self._names, log, id, payload)

    async def appended(self, log: str, id: str) -> bool:
        wanted: dict[str, object] = {"last_by_subj": self._names.log_subject(log, id)}
        return await self._get(self._names.log_stream(log), wanted) is not None

    def follow(self, log: str, *, newest_only: bool = False) -> AsyncIterator[bytes]:
        return Follower(self._link, self._names, log, newest_only=newest_only).entries()

    # --- liveness -----------------------------------------------------------------------------------------

    def start_pulse(self, key: str, state: Callable[[], bytes], *, interval_s: float) -> None:
        if self._pulse is not None:
            raise BrokerError("this connection has a pulse already; a replica is one connection")
        self._pulse = Pulse(
            self._url,
            self._token,
            subject=self._names.beat_subject(key),
            held=self._held,
            state=state,
            interval_s=interval_s,
            timeout_s=self._link.timeout_s,
        )

    async def beats(self) -> dict[str, Beat]:
        if self._heard is None:
            self._heard = {}
            await self._link.subscribe(self._names.beat_subject(), self._on_beat)
            await self._read_beats()
        now, found = time.monotonic(), dict[str, Beat]()
        for key, (at, data) in self._heard.items():
            try:
                found[key] = Beat(payload=read_beat(data).payload, age_s=now - at)
            except BrokerError as error:  # as if it hadn't come: its sender will be missed
                _log.warning("heartbeat of %s: %s", key, error)
        return found

    async def _on_beat(self, msg: Msg) -> None:
        assert self._heard is not None
        self._heard[self._names.beat_key(msg.subject)] = (time.monotonic(), msg.data)

    async def _read_beats(self) -> None:
        """Beats before our time count as heard now: nobody is called dead for a wait he didn't cause."""
        assert self._heard is not None
        stream = self._names.beats_stream
        try:
            wanted = {"subjects_filter": ">"}
            info = await self._link.ask(f"STREAM.INFO.{stream}", wanted, what="read heartbeats")
        except JetStreamError as error:
            raise BrokerError(f"read heartbeats of run {self._names.run}: {error}; is it declared?") from None
        subjects: dict[str, int] = info["state"].get("subjects") or {}
        for subject in subjects:
            if message := await self._get(stream, {"last_by_subj": subject}):
                beat = base64.b64decode(message["data"])
                self._heard.setdefault(self._names.beat_key(subject), (time.monotonic(), beat))

    async def servers(self) -> dict[str, str]:
        if self._replicas == 1:
            return {}
        stream = self._names.log_stream(LEDGER_LOG)
        try:
            info = await self._link.ask(f"STREAM.INFO.{stream}", what="who replicates")
        except JetStreamError as error:
            raise BrokerError(f"who replicates log {LEDGER_LOG}: {error}") from None
        return replicas_of(info.get("cluster") or {})

    async def show(self, payload: bytes) -> None:
        await self._link.publish(self._names.view_subject, payload)

    async def watch(self) -> AsyncIterator[bytes]:
        shown: asyncio.Queue[bytes] = asyncio.Queue(1)

        async def keep(msg: Msg) -> None:
            if shown.full():
                shown.get_nowait()
            shown.put_nowait(msg.data)

        subscription = await self._link.subscribe(self._names.view_subject, keep)
        try:
            while True:
                yield await shown.get()
        finally:
            if self._link.up:
                await subscription.unsubscribe()

    async def evict(self, key: str) -> None:
        stream, subject = self._names.beats_stream, self._names.beat_subject(key)
        message = await self._get(stream, {"last_by_subj": subject})
        if message is None:
            return
        beat = read_beat(base64.b64decode(message["data"]))
        give_back = (
            self._link.request(reply, b"-NAK", what=f"evict {key}", known_since=-1)
            for reply, _ in beat.leases
        )
        for outcome in await asyncio.gather(*give_back, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, Forgotten):
                raise outcome
        # Once: the server would take back what somebody else holds by now, for it doesn't ask who says so.
        upto = {"filter": subject, "seq": message["seq"] + 1}
        try:
            await self._link.ask(f"STREAM.PURGE.{stream}", upto, what=f"evict {key}")
        except JetStreamError as error:
            raise BrokerError(f"evict {key}: {error}") from None

    # --- end of life --------------------------------------------------------------------------------------

    async def close(self) -> None:
        if self._pulse is not None:
            pulse, self._pulse = self._pulse, None
            await asyncio.to_thread(pulse.stop)
        for consumer in self._consumers:
            await consumer.close()
        await self._link.flush()
        await self._link.close()

    async def destroy(self) -> None:
        """Delete everything that the run has on the server. For the owner of the run, when all have left."""
        offset, total = 0, 1
        names: list[str] = []
        while offset < total:
            page = await self._link.ask("STREAM.NAMES", {"offset": offset}, what="destroy")
            names += page["streams"] or []
            offset, total = len(names), page["total"]
        for name in names:
            if name.startswith(f"{self._names.run}-"):
                await self._link.ask(f"STREAM.DELETE.{name}", what=f"delete {name}")
