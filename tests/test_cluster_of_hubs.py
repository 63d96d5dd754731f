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

from arriero.engine.broker import BrokerError, Consumer, EdgeEnded
from arriero.engine.nats import NatsBroker
from arriero.engine.nats_link import Link
from arriero.engine.nats_server import NatsServer, start_server
from tests.brokers import assert_depth, edge

RUN, TOKEN, COUNT = "run", "token-of-the-cluster", 1000
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Cluster:
    """Servers by the address at which they replicate, which is their name too."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.names = [f"127.0.0.1:{_free_port()}" for _ in range(3)]
        self.servers = {name: self._start(name) for name in self.names}

    def _start(self, name: str) -> NatsServer:
        others = [other for other in self.names if other != name]
        place = self._folder / name.rpartition(":")[2]
        return start_server(place, token=TOKEN, peers=[name, *others], timeout_s=30)

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
def cluster(folder: Path) -> Iterator[Cluster]:
    found = Cluster(folder)
    yield found
    for server in found.servers.values():
        server.stop()


async def declared(broker: NatsBroker) -> None:
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


async def test_killing_the_leader_of_an_edge_loses_nothing(cluster: Cluster) -> None:
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
