"""What only NATS can suffer: processes and servers that are killed. The contract itself is in test_brokers.

A consumer process is started from this same file: `python tests/test_nats.py URL RUN COUNT`, token in the
environment. It leases COUNT messages, says so, and holds them.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from arriero.engine.broker import BrokerError, Consumer, EdgeEnded
from arriero.engine.nats import NatsBroker
from arriero.engine.nats_lease import NatsLease
from arriero.engine.nats_link import Link
from arriero.engine.nats_server import NatsServer, start_server
from tests.brokers import assert_depth, edge, eventually, take, take_all

ROOT = Path(__file__).parents[1]


@pytest.fixture
def own_server(folder: Path) -> Iterator[list[NatsServer]]:
    """A server that the test may kill; the last one of the list is stopped at the end."""
    servers = [start_server(folder)]
    yield servers
    servers[-1].stop()


def restart(servers: list[NatsServer], folder: Path) -> None:
    """kill -9, then a new server with the same store, port and token."""
    dead = servers[-1]
    dead.process.kill()
    dead.process.wait()
    servers.append(start_server(folder, port=dead.port, token=dead.token))


async def connect(server: NatsServer, *, timeout_s: float = 10.0) -> NatsBroker:
    return await NatsBroker.connect(server.url, server.token, run="run", timeout_s=timeout_s)


# --- a consumer is killed ---------------------------------------------------------------------------------


async def hold(url: str, run: str, count: int) -> None:
    """The body of the consumer process."""
    broker = await NatsBroker.connect(url, os.environ["TEST_TOKEN"], run=run)
    consumer = broker.consumer("rollouts", "reward")
    held = [await take(consumer) for _ in range(count)]
    broker.start_pulse("reward/0", lambda: b"%d" % len(held), interval_s=0.05)
    await asyncio.sleep(3600)


@contextmanager
def holding_process(server: NatsServer, run: str, count: int) -> Generator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, __file__, server.url, run, str(count)],
        env=os.environ | {"TEST_TOKEN": server.token, "PYTHONPATH": str(ROOT)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def test_what_a_killed_process_held_is_consumed_once_by_the_others_after_its_eviction(
    nats_server: NatsServer, run_name: str
) -> None:
    broker = await NatsBroker.connect(nats_server.url, nats_server.token, run=run_name)
    await broker.declare([edge(lease_s=60)], [])
    producer = broker.producer("rollouts", 0)
    for i in range(30):
        await producer.put(f"m{i}", b"x" * 1000)
    with holding_process(nats_server, run_name, 10) as process:

        async def holds_them() -> bool:
            beat = (await broker.beats()).get("reward/0")
            return beat is not None and beat.payload == b"10"

        assert await eventually(holds_them, within_s=20)
        others = [broker.consumer("rollouts", "reward") for _ in range(2)]
        taking = [asyncio.ensure_future(take_all(other)) for other in others]
        await producer.end()
        await asyncio.sleep(0.2)
        assert (await broker.depth("rollouts")).messages == 10
        process.send_signal(signal.SIGKILL)
        process.wait()
    began = time.monotonic()
    await broker.evict("reward/0")
    first, second = await asyncio.gather(*taking)
    assert time.monotonic() - began < 20  # of a lease of 60 s
    assert sorted(first + second) == sorted(f"m{i}" for i in range(30))
    await assert_depth(broker, "rollouts", 0)
    await broker.close()


async def test_a_blocked_event_loop_makes_no_request_fail_whose_answer_has_come(
    nats_server: NatsServer, run_name: str
) -> None:
    """Importing torch on a busy machine once held up a role for longer than a request may take."""
    broker = await NatsBroker.connect(nats_server.url, nats_server.token, run=run_name, timeout_s=0.5)
    await broker.declare([edge()], [])
    putting = asyncio.create_task(broker.producer("rollouts", 0).put("m", b"x"))
    await asyncio.sleep(0)
    time.sleep(2)  # noqa: ASYNC251  # the fault that is tested
    await putting
    await assert_depth(broker, "rollouts", 1)
    await broker.close()


# --- the server is killed ---------------------------------------------------------------------------------


async def consume(consumer: Consumer, seen: Counter[str]) -> None:
    with suppress(EdgeEnded):
        while True:
            if (lease := await consumer.lease(wait_s=5)) is not None:
                seen[lease.id] += 1
                await lease.ack()


async def test_a_server_that_is_killed_twice_and_comes_back_loses_nothing(
    own_server: list[NatsServer], folder: Path
) -> None:
    broker, worker = await connect(own_server[0]), await connect(own_server[0])
    await broker.declare([edge(groups=("reward", "record"), messages=50, lease_s=1.0)], [])
    producer = broker.producer("rollouts", 0)
    seen: Counter[str] = Counter()
    recorded: Counter[str] = Counter()
    consuming = [
        asyncio.ensure_future(consume(worker.consumer("rollouts", "reward"), seen)) for _ in range(2)
    ]
    consuming.append(asyncio.ensure_future(consume(worker.consumer("rollouts", "record"), recorded)))

    async def produce() -> None:
        for i in range(1500):
            await producer.put(f"m{i}", b"x" * 2000)
        await producer.end()

    producing = asyncio.ensure_future(produce())
    for _ in range(2):
        await asyncio.sleep(0.3)
        await asyncio.to_thread(restart, own_server, folder)
    async with asyncio.timeout(30):
        await asyncio.gather(producing, *consuming)
    assert set(seen) == set(recorded) == {f"m{i}" for i in range(1500)}
    # Delivered again: what was acknowledged but not yet written by the server when it was killed.
    assert sum(seen.values()) - 1500 < 300
    await assert_depth(broker, "rollouts", 0)
    for connection in (broker, worker):
        await connection.close()


async def test_a_waiting_lease_and_a_follower_outlive_a_restart(
    own_server: list[NatsServer], folder: Path
) -> None:
    broker, worker = await connect(own_server[0]), await connect(own_server[0])
    await broker.declare([edge()], ["ledger"])
    await broker.append("ledger", "e0", b"0")
    entries = worker.follow("ledger")
    assert await anext(entries) == b"0"
    waiting = asyncio.ensure_future(worker.consumer("rollouts", "reward").lease(wait_s=20))
    following = asyncio.ensure_future(anext(entries))
    await asyncio.sleep(0.1)
    await asyncio.to_thread(restart, own_server, folder)
    assert await broker.append("ledger", "e1", b"1")
    assert not await broker.append("ledger", "e0", b"0")
    assert await broker.producer("rollouts", 0).put("a", b"x")
    lease = await asyncio.wait_for(waiting, 3)
    assert lease is not None
    await lease.ack()
    assert await asyncio.wait_for(following, 3) == b"1"
    ending = asyncio.ensure_future(worker.consumer("rollouts", "reward").lease(wait_s=20))
    await asyncio.to_thread(restart, own_server, folder)
    await broker.producer("rollouts", 0).end()
    with pytest.raises(EdgeEnded):
        await asyncio.wait_for(ending, 3)
    for connection in (broker, worker):
        await connection.close()


async def test_the_pulse_goes_on_after_a_restart(own_server: list[NatsServer], folder: Path) -> None:
    broker, worker = await connect(own_server[0]), await connect(own_server[0])
    await broker.declare([edge(lease_s=3.0)], [])
    await broker.producer("rollouts", 0).put("a", b"x")
    worker.start_pulse("reward/0", bytes, interval_s=0.1)
    lease = await take(worker.consumer("rollouts", "reward"))
    await broker.beats()
    await asyncio.sleep(0.5)  # or the lease would be unknown; its age is written in whole seconds
    await asyncio.to_thread(restart, own_server, folder)
    assert await broker.consumer("rollouts", "reward").lease(wait_s=3.5) is None
    assert (await broker.beats())["reward/0"].age_s < 0.5
    await lease.ack()
    for connection in (broker, worker):
        await connection.close()


async def test_a_lease_that_the_pulse_cannot_extend_runs_out_for_its_holder_too(
    own_server: list[NatsServer],
) -> None:
    worker = await connect(own_server[0], timeout_s=1.0)
    await worker.declare([edge(lease_s=1.0)], [])
    await worker.producer("rollouts", 0).put("a", b"x")
    lease = await take(worker.consumer("rollouts", "reward"))
    assert isinstance(lease, NatsLease)
    worker.start_pulse("reward/0", bytes, interval_s=0.1)
    await asyncio.sleep(1.5)
    valid = [lease.valid]
    own_server[0].process.kill()
    await asyncio.sleep(1.5)
    assert [*valid, lease.valid] == [True, False]  # somebody else may have it by now
    await worker.close()


async def test_a_server_that_stays_away_is_an_error_that_names_it_within_the_bound(
    own_server: list[NatsServer],
) -> None:
    broker = await connect(own_server[0], timeout_s=1.0)
    await broker.declare([edge()], ["ledger"])
    producer, consumer = broker.producer("rollouts", 0), broker.consumer("rollouts", "reward")
    await producer.put("a", b"x")
    lease = await take(consumer)
    waiting = asyncio.ensure_future(consumer.lease(wait_s=600))
    await broker.append("ledger", "e0", b"")
    entries = broker.follow("ledger")
    await anext(entries)
    following = asyncio.ensure_future(anext(entries))
    own_server[0].process.kill()
    began = time.monotonic()
    attempts = [
        producer.put("b", b"x"),
        lease.ack(),
        broker.depth("rollouts"),
        broker.append("ledger", "e1", b""),
    ]
    outcomes = await asyncio.gather(*attempts, waiting, following, producer.end(), return_exceptions=True)
    assert time.monotonic() - began < 15
    for outcome, what in zip(
        outcomes, ("put b", "ACK of a", "edge", "e1", "lease", "follow", "end"), strict=True
    ):
        assert isinstance(outcome, BrokerError), (what, outcome)
        assert f"nats server 127.0.0.1:{own_server[0].port} didn't answer for 1 s" in str(outcome)
        assert what in str(outcome)
    await broker.close()


async def test_a_server_that_answers_nothing_is_an_error_within_the_bound(
    own_server: list[NatsServer],
) -> None:
    broker = await connect(own_server[0], timeout_s=1.0)
    await broker.declare([edge()], [])
    os.kill(own_server[0].process.pid, signal.SIGSTOP)
    await asyncio.sleep(0.05)
    began = time.monotonic()
    try:
        with pytest.raises(BrokerError, match="put a on edge rollouts: nats server"):
            await broker.producer("rollouts", 0).put("a", b"x")
        assert time.monotonic() - began < 15
    finally:
        os.kill(own_server[0].process.pid, signal.SIGCONT)
    await broker.close()


# --- connecting -------------------------------------------------------------------------------------------


async def test_a_wrong_token_is_refused_at_once(nats_server: NatsServer) -> None:
    began = time.monotonic()
    with pytest.raises(BrokerError, match=r"127.0.0.1:\d+ refused the token") as caught:
        await NatsBroker.connect(nats_server.url, "not-the-token", run="run")
    assert time.monotonic() - began < 15
    assert "not-the-token" not in str(caught.value)


async def test_nobody_listening_is_an_error_within_the_bound(unused_tcp_port: int) -> None:
    began = time.monotonic()
    with pytest.raises(
        BrokerError, match=rf"127.0.0.1:{unused_tcp_port} doesn't answer within 0.5 s \(.*\); is it"
    ):
        await NatsBroker.connect(f"nats://127.0.0.1:{unused_tcp_port}", "x", run="run", timeout_s=0.5)
    assert time.monotonic() - began < 15


async def test_a_run_name_that_is_no_subject_is_refused(nats_server: NatsServer) -> None:
    with pytest.raises(BrokerError, match=r"run name 'a\.b'"):
        await NatsBroker.connect(nats_server.url, nats_server.token, run="a.b")


async def test_a_message_larger_than_the_server_takes_names_the_remedy(
    nats_server: NatsServer, run_name: str
) -> None:
    broker = await NatsBroker.connect(nats_server.url, nats_server.token, run=run_name)
    await broker.declare([edge(bytes=64 << 20)], [])
    producer = broker.producer("rollouts", 0)
    largest = (8 << 20) - (8 << 10)
    with pytest.raises(
        BrokerError, match=rf"message b has {largest + 1} bytes, the server takes .* claim check"
    ):
        await producer.put("b", bytes(largest + 1))
    assert await producer.put("a", bytes(largest))
    lease = await take(broker.consumer("rollouts", "reward"))
    assert len(lease.payload) == largest
    await lease.nack("x" * 100_000)
    consumer = broker.consumer("rollouts", "reward")
    for _ in range(2):
        await (await take(consumer)).nack("x" * 100_000)
    assert len((await broker.dead_letters())[0].payload) == largest
    await broker.destroy()
    await broker.close()


async def test_an_edge_that_lost_a_durable_refuses_its_producers(
    nats_server: NatsServer, run_name: str
) -> None:
    """With INTEREST retention the server would take the message and throw it away."""
    broker = await NatsBroker.connect(nats_server.url, nats_server.token, run=run_name)
    await broker.declare([edge(groups=("reward", "record"))], [])
    link = await Link.open(nats_server.url, nats_server.token, name="saboteur", timeout_s=5)
    await link.ask(f"CONSUMER.DELETE.{run_name}-rollouts.record", what="sabotage")
    await link.close()
    late = await NatsBroker.connect(nats_server.url, nats_server.token, run=run_name)
    with pytest.raises(BrokerError, match="edge rollouts is declared only in part"):
        await late.producer("rollouts", 0).put("a", b"x")
    for connection in (broker, late):
        await connection.close()


if __name__ == "__main__":
    asyncio.run(hold(sys.argv[1], sys.argv[2], int(sys.argv[3])))
