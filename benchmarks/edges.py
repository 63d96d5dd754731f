"""What an edge costs: messages per second and round trips, on both brokers and on the bare NATS client.

`python -m benchmarks.edges [--seconds 2] [--json]` starts a server of its own. Per payload size and engine:

- rate: one producer with 16 puts under way, one consumer with 16 leases under way, each acknowledged with
  certainty (double acknowledgement): messages per second, and CPU time of the clients per message,
  which other work on the machine disturbs least;
- round trip: one message at a time, from `put` until its acknowledgement is certain, with a consumer waiting.

`raw` is nats-py's JetStream client doing the same: publish with acknowledgement, fetch(1), ack_sync.
`ours/raw` compares NATS with it: above 1 is faster for rates and slower for times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import uvloop
from nats.aio.client import Client
from nats.errors import TimeoutError as FetchTimeout
from nats.js.api import AckPolicy, ConsumerConfig, DiscardPolicy, RetentionPolicy, StreamConfig

from arriero.engine.broker import Broker, EdgeDecl
from arriero.engine.memory import MemoryBroker
from arriero.engine.nats import NatsBroker
from arriero.engine.nats_access import OWNER
from arriero.engine.nats_server import NatsServer, start_server
from arriero.schemas.graph import Capacity

SIZES = {"300 B": 300, "50 KB": 50_000, "1 MB": 1_000_000}
CONCURRENCY = 16
CAPACITY = Capacity(messages=256, bytes=512 << 20)


@dataclass(frozen=True)
class Pipe:
    """`put` returns when the message is durable, `take` when one was acknowledged for certain."""

    put: Callable[[str, bytes], Awaitable[object]]
    take: Callable[[], Awaitable[None]]
    close: Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Result:
    """`rate` in messages per second, `cpu_us` of the clients per message, round trips in milliseconds."""

    rate: float
    cpu_us: float
    p50_ms: float
    p99_ms: float


async def pipe_of(producing: Broker, consuming: Broker) -> Pipe:
    await producing.declare([EdgeDecl(name="edge", groups=("group",), capacity=CAPACITY)], [])
    producer, consumer = producing.producer("edge", 0), consuming.consumer("edge", "group")

    async def take() -> None:
        while (lease := await consumer.lease(wait_s=30)) is None:
            pass
        await lease.ack()

    async def close() -> None:
        await producing.close()
        await consuming.close()

    return Pipe(producer.put, take, close)


async def memory_pipe(server: NatsServer, name: str) -> Pipe:
    broker = MemoryBroker()
    return await pipe_of(broker, broker.connect())


async def nats_pipe(server: NatsServer, name: str) -> Pipe:
    return await pipe_of(*[await NatsBroker.connect(server.url, server.token, run=name) for _ in range(2)])


async def raw_pipe(server: NatsServer, name: str) -> Pipe:
    clients = [Client(), Client()]
    for client in clients:
        await client.connect(server.url, user=OWNER, password=server.token)  # pyright: ignore[reportUnknownMemberType]
    publishing, fetching = (client.jetstream() for client in clients)  # pyright: ignore[reportUnknownMemberType]
    config = StreamConfig(
        name=name,
        subjects=[name],
        retention=RetentionPolicy.INTEREST,
        discard=DiscardPolicy.NEW,
        max_msgs=CAPACITY.messages,
        max_bytes=CAPACITY.bytes,
        duplicate_window=3600,
    )
    await publishing.add_stream(config)  # pyright: ignore[reportUnknownMemberType]
    durable = ConsumerConfig(
        durable_name="group", ack_policy=AckPolicy.EXPLICIT, ack_wait=30, max_ack_pending=-1
    )
    # One subscription per fetch under way: concurrent fetches on one take each other's messages.
    idle = [
        await fetching.pull_subscribe(name, durable="group", stream=name, config=durable)  # pyright: ignore[reportUnknownMemberType]
        for _ in range(CONCURRENCY)
    ]

    async def put(key: str, payload: bytes) -> object:
        return await publishing.publish(name, payload, headers={"Nats-Msg-Id": key}, timeout=30)

    async def take() -> None:
        subscription = idle.pop()
        try:
            while True:
                try:
                    (msg,) = await subscription.fetch(1, timeout=30)
                    break
                except FetchTimeout:
                    pass
            await msg.ack_sync(timeout=30)
        finally:
            idle.append(subscription)

    async def close() -> None:
        for client in clients:
            await client.close()

    return Pipe(put, take, close)


ENGINES = {"memory": memory_pipe, "nats": nats_pipe, "raw": raw_pipe}


async def rate(pipe: Pipe, payload: bytes, seconds: float) -> tuple[float, float]:
    """Messages per second through the pipe in `seconds`, and our CPU time per message in microseconds."""
    until = time.perf_counter() + seconds
    counts = [0] * CONCURRENCY
    permits = asyncio.Semaphore(CAPACITY.messages // 2)  # the raw client can't wait for a place

    async def produce(lane: int) -> None:
        while time.perf_counter() < until:
            await permits.acquire()
            await pipe.put(f"r{lane}-{counts[lane]}", payload)
            counts[lane] += 1

    taken = 0

    async def consume() -> None:
        nonlocal taken
        while True:
            await pipe.take()
            taken += 1
            permits.release()

    began, cpu = time.perf_counter(), time.process_time()
    consuming = [asyncio.ensure_future(consume()) for _ in range(CONCURRENCY)]
    await asyncio.gather(*(produce(lane) for lane in range(CONCURRENCY)))
    while taken < sum(counts):  # noqa: ASYNC110  # a few milliseconds, at the end
        await asyncio.sleep(0.001)
    elapsed, cpu = time.perf_counter() - began, time.process_time() - cpu
    for task in consuming:
        task.cancel()
    await asyncio.gather(*consuming, return_exceptions=True)
    return taken / elapsed, 1e6 * cpu / taken


async def round_trips(pipe: Pipe, payload: bytes, seconds: float) -> list[float]:
    """Sorted times in milliseconds from put to certain acknowledgement, consumer waiting."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < 20:
        waiting = asyncio.ensure_future(pipe.take())
        await asyncio.sleep(0.0005)  # so that its pull is out
        began = time.perf_counter()
        await asyncio.gather(pipe.put(f"t{len(times)}", payload), waiting)
        times.append(1000 * (time.perf_counter() - began))
    return sorted(times)


async def measure(engine: str, label: str, server: NatsServer, seconds: float, repeat: int) -> Result:
    """Rate and round trips of one engine and size, on an edge of its own."""
    payload = bytes(SIZES[label])
    name = f"bench-{engine}-{SIZES[label]}-{repeat}"
    pipe = await ENGINES[engine](server, name)
    try:
        times = await round_trips(pipe, payload, seconds / 2)
        found, cpu_us = await rate(pipe, payload, seconds)
    finally:
        await pipe.close()
    p50_ms, p99_ms = statistics.median(times), times[int(0.99 * (len(times) - 1))]
    return Result(rate=found, cpu_us=cpu_us, p50_ms=p50_ms, p99_ms=p99_ms)


def best(results: list[Result]) -> Result:
    """The machine's other work only ever makes numbers worse."""
    return Result(
        rate=max(r.rate for r in results),
        cpu_us=min(r.cpu_us for r in results),
        p50_ms=min(r.p50_ms for r in results),
        p99_ms=min(r.p99_ms for r in results),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="per engine, size and repetition")
    parser.add_argument("--repeats", type=int, default=4, help="in alternating order; the best counts")
    parser.add_argument("--json", action="store_true", help="the numbers as JSON in the last line")
    args = parser.parse_args()
    table: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(Path(folder))
        try:
            for label in SIZES:
                found: dict[str, list[Result]] = {engine: [] for engine in ENGINES}
                for repeat in range(args.repeats):
                    # Whoever follows a busy engine finds a warm server: each goes first in turn.
                    for engine in ENGINES if repeat % 2 else reversed(ENGINES):
                        run = measure(engine, label, server, args.seconds, repeat)
                        found[engine].append(uvloop.run(run))
                table[label] = flat({engine: best(results) for engine, results in found.items()})
        finally:
            server.stop()
    print_table(table)
    if args.json:
        print(json.dumps(table))


FIELDS = ("rate", "cpu_us", "p50_ms", "p99_ms")


def print_table(table: dict[str, dict[str, float]]) -> None:
    print(f"{'payload':8} {'engine':8} {'messages/s':>11} {'CPU us':>8} {'p50 ms':>8} {'p99 ms':>8}")
    for label, row in table.items():
        for engine in ENGINES:
            values = [row[f"{engine}_{field}"] for field in FIELDS]
            print(f"{label:8} {engine:8} {values[0]:11,.0f} " + " ".join(f"{v:8.3f}" for v in values[1:]))
        ratios = [row[f"ratio_{field}"] for field in FIELDS]
        print(f"{'':8} {'ours/raw':8} {ratios[0]:11.2f} " + " ".join(f"{ratio:8.2f}" for ratio in ratios[1:]))


def flat(engines: dict[str, Result]) -> dict[str, float]:
    """Each number of each engine, and the ratios ours/raw."""
    row = {f"{engine}_{field}": getattr(r, field) for engine, r in engines.items() for field in FIELDS}
    return row | {f"ratio_{field}": row[f"nats_{field}"] / row[f"raw_{field}"] for field in FIELDS}


if __name__ == "__main__":
    main()
