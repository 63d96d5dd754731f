"""Three servers that replicate every stream: one that is killed takes nothing with it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from arriero.engine.broker import Broker, BrokerError, Consumer, EdgeEnded
from arriero.engine.claim_stores import FolderStore
from arriero.engine.claims import ClaimChecked
from arriero.engine.nats import NatsBroker
from arriero.engine.nats_cluster import Cluster
from arriero.engine.nats_link import Link
from arriero.engine.nats_server import NatsServer, start_server
from tests.brokers import assert_depth, edge

RUN, TOKEN, COUNT = "run", "token-of-the-cluster", 1000
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Hubs:
    """Servers by the address at which they replicate, which is their name too."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.names = [f"127.0.0.1:{_free_port()}" for _ in range(3)]
        self.servers = {name: self._start(name) for name in self.names}

    def _start(self, name: str) -> NatsServer:
        others = [other for other in self.names if other != name]
        place = self._folder / name.rpartition(":")[2]
        cluster = Cluster(name=name, route=name, others=tuple(others))
        return start_server(place, token=TOKEN, cluster=cluster, timeout_s=30)

    def kill(self, name: str) -> None:
        self.servers[name].process.kill()
        self.servers[name].process.wait()

    def restart(self, name: str) -> None:
        self.servers[name] = self._start(name)

    async def connect(self, number: int) -> NatsBroker:
        server = self.servers[self.names[number]]
        return await NatsBroker.connect(server.url, TOKEN, run=RUN, replicas=3, timeout_s=60)

    async def leader(self, stream: str) -> str:
        """The server that leads a stream, or all of JetStream (empty)."""
        living = next(s for s in self.servers.values() if s.process.poll() is None)
        link = await Link.open(living.url, TOKEN, name="who leads?", timeout_s=30)
        try:
            info = await link.ask(f"STREAM.INFO.{RUN}-{stream}", what="leader")
            return str(info["cluster"]["leader"])
        finally:
            await link.close()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture
def cluster(folder: Path) -> Iterator[Hubs]:
    found = Hubs(folder)
    yield found
    for server in found.servers.values():
        server.stop()


async def declared(broker: Broker) -> None:
    """Servers that have just started are no cluster yet."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return await broker.declare(
                [edge(groups=("reward", "record"), lease_s=5, messages=200)], ["ledger"]
            )
        except BrokerError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.3)


async def consume(consumer: Consumer, seen: Counter[str]) -> None:
    with suppress(EdgeEnded):
        while True:
            if (lease := await consumer.lease(wait_s=5)) is not None:
                seen[lease.id] += 1
                await lease.ack()


async def more(seen: Counter[str], number: int) -> None:
    """Until so many more have come."""
    goal = len(seen) + number
    async with asyncio.timeout(60):
        while len(seen) < goal:  # noqa: ASYNC110  # other tasks' work
            await asyncio.sleep(0.02)


async def test_killing_the_leader_of_an_edge_loses_nothing(cluster: Hubs) -> None:
    brokers = [await cluster.connect(k) for k in range(3)]
    await declared(brokers[0])
    seen: dict[str, Counter[str]] = {"reward": Counter(), "record": Counter()}
    consuming = [
        asyncio.create_task(consume(brokers[k].consumer("rollouts", group), seen[group]))
        for k, group in ((1, "reward"), (2, "reward"), (2, "record"))
    ]
    producer = brokers[0].producer("rollouts", 0)

    async def produce() -> None:
        for k in range(COUNT):
            assert await producer.put(f"m{k}", b"x" * 500)
            await brokers[1].append("ledger", f"e{k}", b"%d" % k)
        await producer.end()

    producing = asyncio.create_task(produce())
    for stream in ("rollouts", "log-ledger"):
        await more(seen["record"], 100)
        leader = await cluster.leader(stream)
        cluster.kill(leader)
        await more(seen["record"], 100)  # the two others go on
        await asyncio.to_thread(cluster.restart, leader)
    async with asyncio.timeout(120):
        await asyncio.gather(producing, *consuming)
    everything = {f"m{k}" for k in range(COUNT)}
    assert set(seen["reward"]) == set(seen["record"]) == everything
    # Delivered again: what was acknowledged to a leader that hadn't told the others.
    assert sum(seen["reward"].values()) - COUNT < 50
    follower = brokers[0].follow("ledger")
    assert [await anext(follower) for _ in range(COUNT)] == [b"%d" % k for k in range(COUNT)]
    await assert_depth(brokers[0], "rollouts", 0)
    for broker in brokers:
        await broker.close()


async def test_asking_for_an_id_is_no_hindrance_to_it_whoever_leads(cluster: Hubs) -> None:
    brokers = [await cluster.connect(k) for k in range(3)]
    await declared(brokers[0])
    producers = [broker.producer("rollouts", 0) for broker in brokers]
    async with asyncio.timeout(100):
        for k, name in enumerate("abc"):
            assert [await p.knows(name) for p in producers] == [False] * 3
            # At the same time from everywhere: it is stored once.
            assert sorted(await asyncio.gather(*(p.put(name, b"x") for p in producers))) == [
                False,
                False,
                True,
            ]
            assert [await p.knows(name) for p in producers] == [True] * 3
            assert not await producers[k].knows(f"{name}, once more")
            leader = await cluster.leader("rollouts")
            cluster.kill(leader)
            assert [await p.knows(name) for p in producers] == [True] * 3
            assert not await producers[k].put(name, b"x")
            await asyncio.to_thread(cluster.restart, leader)
    await assert_depth(brokers[0], "rollouts", 3)
    for broker in brokers:
        await broker.close()


async def test_an_offer_that_finds_no_room_is_put_later(cluster: Hubs, folder: Path) -> None:
    """By claim check, which looks for its id then."""
    brokers = [
        ClaimChecked(await cluster.connect(k), FolderStore(folder / "claims"), above_bytes=0) for k in (0, 1)
    ]
    await declared(brokers[0])
    producer, consumer = brokers[0].producer("rollouts", 0), brokers[1].consumer("rollouts", "reward")
    record = brokers[1].consumer("rollouts", "record")
    large = bytes(900 << 10)  # of the 1 MiB that the edge takes
    async with asyncio.timeout(60):
        assert await producer.offer("first", large)
        assert await producer.offer("second", large) is None
        assert not await producer.offer("first", large)
        for group in (consumer, record):
            lease = await group.lease(wait_s=10)
            assert lease is not None
            await lease.ack()
        assert await producer.put("second", large)
        assert not await producer.offer("second", large)
    for broker in brokers:
        await broker.close()
