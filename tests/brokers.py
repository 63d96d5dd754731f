"""Both brokers behind one name, and what tests ask of them."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from arriero.engine.broker import Broker, Consumer, EdgeDecl, EdgeEnded, Lease
from arriero.engine.claim_stores import ClaimStore
from arriero.engine.claims import ClaimChecked
from arriero.engine.memory import MemoryBroker
from arriero.engine.nats import NatsBroker
from arriero.engine.nats_server import NatsServer
from arriero.schemas.graph import Capacity

LEASE_S = 0.8
PROMPT_S = 2.0  # "at once" on a busy machine; milliseconds on an idle one


@dataclass
class Engine:
    """One store and connections to it; edges made through it are checked to be empty when the test ends."""

    kind: str
    run: str
    server: NatsServer | None = None
    leftovers: bool = False  # a test that leaves messages behind on purpose says so
    edges: list[str] = field(default_factory=list[str])
    store: ClaimStore | None = None  # if given, every payload goes there
    connections: list[Broker] = field(default_factory=list[Broker])
    _memory: MemoryBroker = field(default_factory=MemoryBroker)

    async def connect(self) -> Broker:
        broker: Broker = self._memory.connect()
        if self.server is not None:
            broker = await NatsBroker.connect(self.server.url, self.server.token, run=self.run, timeout_s=10)
        if self.store is not None:
            broker = ClaimChecked(broker, self.store, above_bytes=0)
        self.connections.append(broker)
        return broker

    async def declare(self, *edges: EdgeDecl, logs: tuple[str, ...] = ()) -> Broker:
        """A connection that has declared `edges` and `logs`."""
        broker = await self.connect()
        await broker.declare(edges, logs)
        self.edges += [edge.name for edge in edges]
        return broker

    async def assert_empty(self) -> None:
        broker = await self.connect()
        for name in self.edges:
            await assert_depth(broker, name, 0)
            if isinstance(broker, ClaimChecked):
                await broker.bury_dead(name)
                assert broker.store.held(name) == 0

    async def close(self) -> None:
        for broker in self.connections:
            await broker.close()
        if self.server is not None:
            owner = await NatsBroker.connect(self.server.url, self.server.token, run=self.run)
            await owner.destroy()
            await owner.close()


async def eventually(check: Callable[[], Awaitable[bool]], *, within_s: float) -> bool:
    """Whether `check` becomes true in time."""
    until = time.monotonic() + within_s
    # What is waited for happens in another process, so there is no event to wait for.
    while not (true := await check()) and time.monotonic() < until:  # noqa: ASYNC110
        await asyncio.sleep(0.003)
    return true


async def assert_depth(broker: Broker, edge: str, messages: int) -> None:
    """The edge holds `messages`, at the latest after a second."""

    async def reached() -> bool:
        return (await broker.depth(edge)).messages == messages

    await eventually(reached, within_s=1.0)
    depth = await broker.depth(edge)
    assert depth.messages == messages, depth
    assert depth.bytes > 0 or messages == 0, depth


def edge(
    name: str = "rollouts", *, groups: tuple[str, ...] = ("reward",), messages: int = 100, **more: float
) -> EdgeDecl:
    return EdgeDecl(
        name=name,
        groups=groups,
        capacity=Capacity(messages=messages, bytes=int(more.pop("bytes", 1 << 20))),
        producers=int(more.pop("producers", 1)),
        lease_s=more.pop("lease_s", 30.0),
        max_deliveries=int(more.pop("max_deliveries", 3)),
    )


async def take(consumer: Consumer, *, wait_s: float = 5.0) -> Lease:
    lease = await consumer.lease(wait_s=wait_s)
    assert lease is not None, "nothing came"
    return lease


async def take_all(consumer: Consumer) -> list[str]:
    """Lease and acknowledge until the end; the ids in order."""
    ids: list[str] = []
    with contextlib.suppress(EdgeEnded):
        while True:
            if (lease := await consumer.lease(wait_s=5)) is not None:
                await lease.ack()
                ids.append(lease.id)
    return ids


async def cancelled(awaitable: asyncio.Future[object]) -> None:
    awaitable.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await awaitable
