"""Claim check: large payloads go to a store, the edge carries where they lie, their length and their hash.

`ClaimChecked` keeps the contract of `broker` around any broker. A payload is in the store before its message
is on the edge, and leaves the store after the last group has acknowledged the message. What a killed producer
or a cancelled put left in the store stays there until `destroy`.

| who waits | for what                             | unblocked by                          |
|-----------|--------------------------------------|---------------------------------------|
| `put`     | room in the store, if it is bounded  | the slowest group's acknowledgement   |
| all       | a store that isn't in memory         | its answer; `patience_s`              |
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, TypeVar

import msgspec
import xxhash

from arriero.engine.broker import (
    ENVELOPE_BYTES,
    Beat,
    Broker,
    BrokerError,
    Consumer,
    DeadLetter,
    Depth,
    EdgeDecl,
    Lease,
    Producer,
)
from arriero.engine.claim_stores import ClaimStore
from arriero.engine.patience import Patience

T = TypeVar("T")
S = TypeVar("S", bound=bool | None)

ABOVE_BYTES = 256 << 10
PATIENCE_S = 120.0
_MAGIC = b"\x00arriero claim\x00"
_THREAD_BYTES = 1 << 20  # reading and writing less takes less time than handing it to a thread
_PAUSE_S = (0.001, 0.05)
_LOOK_FOR_DEAD_S = 1.0


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """What the edge carries for a payload; `name` is relative to the store, `hash` XXH3 of 128 bits."""

    name: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]  # it becomes a part of a path
    size: Annotated[int, msgspec.Meta(ge=0)]
    hash: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


def _encode(claim: Claim) -> bytes:
    return _MAGIC + msgspec.msgpack.encode(claim)


def _decode(payload: bytes) -> Claim | None:
    """None for a payload itself; also for a claim that no producer makes, which its reader can't decode."""
    if not payload.startswith(_MAGIC):
        return None
    try:
        return msgspec.msgpack.decode(payload[len(_MAGIC) :], type=Claim)
    except msgspec.MsgspecError:
        return None


class ClaimChecked:
    """`broker` with payloads of more than `above_bytes` in `store`.

    Each call of a store that isn't in memory may take `patience_s`.
    """

    def __init__(
        self,
        broker: Broker,
        store: ClaimStore,
        *,
        above_bytes: int = ABOVE_BYTES,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.broker, self.store, self.above_bytes = broker, store, above_bytes
        self._patience = Patience("the store of large payloads", patience_s)

    async def declare(self, edges: Sequence[EdgeDecl], logs: Sequence[str]) -> None:
        await self.broker.declare(edges, logs)

    async def edge(self, name: str) -> EdgeDecl:
        return await self.broker.edge(name)

    def producer(self, edge: str, replica: int) -> Producer:
        return _Producer(self, edge, self.broker.producer(edge, replica))

    def consumer(self, edge: str, group: str) -> Consumer:
        return _Consumer(self, edge, group, self.broker.consumer(edge, group))

    async def seal(self, edge: str, producers: int) -> None:
        await self.broker.seal(edge, producers)

    async def depth(self, edge: str) -> Depth:
        """Its bytes include those in the store, if the store is bounded."""
        depth = await self.broker.depth(edge)
        return replace(depth, bytes=depth.bytes + self.store.held(edge)) if self.store.bounded else depth

    async def servers(self) -> dict[str, str]:
        return await self.broker.servers()

    async def append(self, log: str, id: str, payload: bytes) -> bool:
        return await self.broker.append(log, id, payload)

    async def appended(self, log: str, id: str) -> bool:
        return await self.broker.appended(log, id)

    def follow(self, log: str, *, newest_only: bool = False) -> AsyncIterator[bytes]:
        return self.broker.follow(log, newest_only=newest_only)

    def start_pulse(self, key: str, state: Callable[[], bytes], *, interval_s: float) -> None:
        self.broker.start_pulse(key, state, interval_s=interval_s)

    async def beats(self) -> dict[str, Beat]:
        return await self.broker.beats()

    async def show(self, payload: bytes) -> None:
        await self.broker.show(payload)

    def watch(self) -> AsyncIterator[bytes]:
        return self.broker.watch()

    async def evict(self, key: str) -> None:
        await self.broker.evict(key)

    async def dead_letters(self) -> list[DeadLetter]:
        """With the payloads themselves. Raises BrokerError if one is missing or damaged."""
        letters = await self.broker.dead_letters()
        return [replace(dead, payload=await self._resolved(dead)) for dead in letters]

    async def _resolved(self, dead: DeadLetter) -> bytes:
        if (claim := _decode(dead.payload)) is None:
            return dead.payload
        return await self.read(claim, dead.edge, dead.group, dead.id)

    async def read(self, claim: Claim, edge: str, group: str, id: str) -> bytes:
        """The payload of message `id`. Raises BrokerError if it is missing or not what was put."""
        where = f"edge {edge}: payload of message {id} in {self.store.url(edge, claim.name)}"
        try:
            read = partial(self.store.read, edge, claim.name, group)
            payload = await self.run(claim.size, read, f"give {claim.name}")
        except OSError as error:
            raise BrokerError(f"{where} can't be read: {error}") from None
        if len(payload) != claim.size:
            raise BrokerError(f"{where} is damaged: it has {len(payload)} bytes, {claim.size} were put")
        if xxhash.xxh3_128_digest(payload) != claim.hash:
            raise BrokerError(
                f"{where} is damaged: its hash isn't that of the {claim.size} bytes that were put"
            )
        return payload

    async def run(self, num_bytes: int, call: Callable[[], T], what: str) -> T:
        """A call of the store that moves `num_bytes`: here if it is a short one, else in a thread.

        Raises TimeoutError, which says `what` it was to do, if a store that isn't in memory doesn't answer.
        """
        if not self.store.bounded:
            return await self._patience.answer(what, call)
        return call() if num_bytes < _THREAD_BYTES else await asyncio.to_thread(call)

    async def release(self, edge: str, name: str, group: str, groups: tuple[str, ...]) -> None:
        """A group needs a payload no more. Raises BrokerError."""
        try:
            await self.run(0, partial(self.store.release, edge, name, group, groups), f"let go of {name}")
        except TimeoutError as error:
            where = self.store.url(edge, name)
            raise BrokerError(f"edge {edge}: {where} can't be let go of: {error}") from None

    async def bury_dead(self, edge: str) -> None:
        """Dead letters give their place on the edge back; the store keeps them apart."""
        for dead in await self.broker.dead_letters():
            if dead.edge == edge and (claim := _decode(dead.payload)) is not None:
                self.store.bury(edge, claim.name, dead.group)

    async def close(self) -> None:
        await self.broker.close()

    async def destroy(self) -> None:
        """Remove everything that the run has in the store. For the owner of the run, when all have left."""
        await asyncio.to_thread(self.store.destroy)


class _Producer:
    def __init__(self, broker: ClaimChecked, edge: str, inner: Producer) -> None:
        self._broker, self._edge, self._inner = broker, edge, inner
        self._store = broker.store
        self._line = asyncio.Lock()  # held by the put that waits for room in the store; fair
        self._under_way: set[asyncio.Event] = set()
        self._held_bytes, self._looked = 0, -1.0

    async def put(self, id: str, payload: bytes, *, earlier: int = 0) -> bool:
        small = len(payload) <= self._broker.above_bytes and not payload.startswith(_MAGIC)
        if small and not self._line.locked():
            return await self._inner.put(id, payload)
        done = asyncio.Event()
        self._under_way.add(done)
        try:
            if small:
                async with self._line:
                    pass
                return await self._inner.put(id, payload)
            return await self._put_claim(id, payload)
        finally:
            self._under_way.discard(done)
            done.set()

    async def offer(self, id: str, payload: bytes) -> bool | None:
        if len(payload) <= self._broker.above_bytes and not payload.startswith(_MAGIC):
            return await self._inner.offer(id, payload)
        decl = await self._broker.edge(self._edge)
        claim = self._claim(payload, decl, id)
        if self._store.bounded:
            if self._line.locked() or not self._fits(len(payload), decl):
                return False if await self._inner.knows(id) else None
            async with self._line:
                await self._write(claim, payload, decl)
        else:
            await self._write(claim, payload, decl)
        return await self._kept_if_stored(self._inner.offer(id, _encode(claim)), claim, decl)

    async def knows(self, id: str) -> bool:
        return await self._inner.knows(id)

    def _claim(self, payload: bytes, decl: EdgeDecl, id: str) -> Claim:
        limit = decl.capacity.bytes - ENVELOPE_BYTES
        if len(payload) > limit:
            raise BrokerError(
                f"edge {decl.name}: message {id} has {len(payload)} bytes, the edge holds at most {limit}; "
                "raise the capacity of its node (bytes)"
            )
        digest = xxhash.xxh3_128_digest(payload)  # tens of GB/s: not worth a thread
        return Claim(uuid.uuid4().hex, len(payload), digest)

    async def _put_claim(self, id: str, payload: bytes) -> bool:
        decl = await self._broker.edge(self._edge)
        claim = self._claim(payload, decl, id)
        if self._store.bounded:
            async with self._line:
                await self._room_for(len(payload), decl)
                await self._write(claim, payload, decl)
        else:
            await self._write(claim, payload, decl)
        return await self._kept_if_stored(self._inner.put(id, _encode(claim)), claim, decl)

    async def _kept_if_stored(self, sent: Awaitable[S], claim: Claim, decl: EdgeDecl) -> S:
        try:
            stored = await sent
        except BrokerError:
            await self._discard(claim, decl)
            raise
        if not stored:
            await self._discard(claim, decl)
        return stored

    async def _write(self, claim: Claim, payload: bytes, decl: EdgeDecl) -> None:
        try:
            write = partial(self._store.write, decl.name, claim.name, decl.groups, payload)
            await self._broker.run(claim.size, write, f"take {claim.name}")
        except OSError as error:
            where = self._store.url(decl.name, claim.name)
            raise BrokerError(
                f"edge {decl.name}: can't write {claim.size} bytes to {where}: {error}"
            ) from None
        self._held_bytes += claim.size

    async def _discard(self, claim: Claim, decl: EdgeDecl) -> None:
        for group in decl.groups:
            await self._broker.release(decl.name, claim.name, group, decl.groups)

    async def _room_for(self, num_bytes: int, decl: EdgeDecl) -> None:
        """Waits for `num_bytes`. Producers that look at the same time can each go beyond by one message."""
        pause_s, longest_s = _PAUSE_S
        next_look = time.monotonic() + _LOOK_FOR_DEAD_S
        while not self._fits(num_bytes, decl):
            if (now := time.monotonic()) > next_look:
                await self._broker.bury_dead(decl.name)
                next_look = now + _LOOK_FOR_DEAD_S
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(pause_s * 1.5, longest_s)

    def _fits(self, num_bytes: int, decl: EdgeDecl) -> bool:
        now = time.monotonic()
        if now - self._looked > _PAUSE_S[1] or self._held_bytes + num_bytes > decl.capacity.bytes // 2:
            self._held_bytes, self._looked = self._store.held(decl.name), now
        return self._held_bytes + num_bytes <= decl.capacity.bytes

    @property
    def durable(self) -> bool:
        return self._inner.durable

    async def settled(self, id: str) -> None:
        await self._inner.settled(id)

    async def end(self) -> None:
        for done in tuple(self._under_way):
            await done.wait()
        await self._inner.end()


class ClaimedLease:
    """A lease whose payload came from the store."""

    def __init__(self, inner: Lease, payload: bytes, claim: Claim, consumer: _Consumer) -> None:
        self._inner, self._payload, self._claim, self._consumer = inner, payload, claim, consumer

    @property
    def id(self) -> str:
        return self._inner.id

    @property
    def payload(self) -> bytes:
        return self._payload

    @property
    def deliveries(self) -> int:
        return self._inner.deliveries

    async def ack(self) -> None:
        await self._inner.ack()
        await self._consumer.release(self._claim)

    async def nack(self, error: str = "") -> None:
        await self._inner.nack(error)
        await self._consumer.given_back(self._inner.deliveries)

    async def extend(self) -> None:
        await self._inner.extend()


class _Consumer:
    def __init__(self, broker: ClaimChecked, edge: str, group: str, inner: Consumer) -> None:
        self._broker, self._edge, self._group, self._inner = broker, edge, group, inner

    async def lease(self, *, wait_s: float) -> Lease | None:
        """As `Consumer.lease`; also raises BrokerError when the payload is missing or damaged.

        The message is then given back with that error. A redelivered one whose payload is missing may have
        been acknowledged by an earlier holder just now, so it raises nothing; else it ends as a dead letter.
        """
        deadline = time.monotonic() + wait_s
        while True:
            lease = await self._inner.lease(wait_s=max(deadline - time.monotonic(), 0.0))
            if lease is None or (claim := _decode(lease.payload)) is None:
                return lease
            try:
                payload = await self._broker.read(claim, self._edge, self._group, lease.id)
                return ClaimedLease(lease, payload, claim, self)
            except BrokerError as error:
                await lease.nack(str(error))
                if lease.deliveries == 1:
                    raise
            except asyncio.CancelledError:
                # On its last delivery it would become a dead letter; then it goes back when we disconnect.
                if lease.deliveries < (await self._broker.edge(self._edge)).max_deliveries:
                    await lease.nack("cancelled")
                raise

    async def release(self, claim: Claim) -> None:
        groups = (await self._broker.edge(self._edge)).groups
        await self._broker.release(self._edge, claim.name, self._group, groups)

    async def given_back(self, deliveries: int) -> None:
        if deliveries >= (await self._broker.edge(self._edge)).max_deliveries:
            await self._broker.bury_dead(self._edge)
