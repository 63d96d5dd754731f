"""What three hubs cost beside one: appends to a log and messages through an edge, by turns in one process.

    python -m benchmarks.hubs [ROUNDS]

Each round puts so many messages one after the other, and then from many at once, on one server and on three
that replicate, in an order drawn anew; medians over the rounds, and their ratio. The servers and who puts
share the cores of this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from arriero.engine.broker import EdgeDecl, Producer
from arriero.engine.nats import NatsBroker
from arriero.engine.nats_access import Access
from arriero.engine.nats_server import start_server
from arriero.launchers.hubs import Site, meet
from arriero.schemas.graph import Capacity

ONE_BY_ONE, AT_ONCE, BYTES = 50, 200, 4096
TOKEN, RUN = "hubs-hubs-hubs", "hubs"
EDGE = EdgeDecl(
    name="rollouts", groups=("reward",), capacity=Capacity(messages=10**6, bytes=1 << 30), producers=1,
    lease_s=30.0, max_deliveries=3,
)  # fmt: skip


async def rates(broker: NatsBroker, producer: Producer, round_number: int) -> tuple[float, float, float]:
    """Seconds of an append to a log, and of a message put one by one; then messages a second put at once."""
    payload = bytes(BYTES)
    began = time.perf_counter()
    for k in range(ONE_BY_ONE):
        await broker.append("ledger", f"{round_number}:{k}", b"event")
    append_s = (time.perf_counter() - began) / ONE_BY_ONE
    began = time.perf_counter()
    for k in range(ONE_BY_ONE):
        await producer.put(f"one:{round_number}:{k}", payload)
    put_s = (time.perf_counter() - began) / ONE_BY_ONE
    began = time.perf_counter()
    await asyncio.gather(*(producer.put(f"all:{round_number}:{k}", payload) for k in range(AT_ONCE)))
    return append_s, put_s, AT_ONCE / (time.perf_counter() - began)


async def measured(urls: dict[int, str], rounds: int) -> dict[int, list[tuple[float, float, float]]]:
    """By number of hubs, in rounds whose order is drawn."""
    draw, found = random.Random(0), {count: list[tuple[float, float, float]]() for count in urls}
    brokers = {
        count: await NatsBroker.connect(url, TOKEN, run=RUN, replicas=count, timeout_s=60)
        for count, url in urls.items()
    }
    producers: dict[int, Producer] = {}
    for count, broker in brokers.items():
        await broker.declare([EDGE], ["ledger"])
        producers[count] = broker.producer(EDGE.name, 0)
        await rates(broker, producers[count], -1)  # nobody is warm the first time
    for number in range(rounds):
        for count in draw.sample(sorted(urls), len(urls)):
            found[count].append(await rates(brokers[count], producers[count], number))
    for broker in brokers.values():
        await broker.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=15)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        one = start_server(folder / "one", token=TOKEN)
        stack.callback(one.stop)
        urls = {1: one.url, 3: ""}
        for number, site in enumerate(_met(folder)):
            for held in site.held:
                stack.callback(held.close)
            server = site.start(Access(run=RUN, accounts=()), timeout_s=60)
            stack.callback(server.stop)
            urls[3] = site.url
            assert site.cluster.name == f"hub-{number}"
        found = asyncio.run(measured(urls, rounds))
    print(f"{'hubs':>5}  {'append, ms':>10}  {'put, ms':>8}  {'puts/s at once':>14}")
    medians = {
        count: [statistics.median(column) for column in zip(*rows, strict=True)]
        for count, rows in found.items()
    }
    for count, (append_s, put_s, per_s) in medians.items():
        print(f"{count:>5}  {append_s * 1e3:>10.2f}  {put_s * 1e3:>8.2f}  {per_s:>14.0f}")
    ratios = [three / single for single, three in zip(medians[1], medians[3], strict=True)]
    print(f"{'3 : 1':>5}  {ratios[0]:>10.2f}  {ratios[1]:>8.2f}  {ratios[2]:>14.2f}")


def _met(folder: Path) -> list[Site]:
    """The sites of three hubs, which find each other at the same time."""
    with ThreadPoolExecutor(3) as hubs:
        coming = [hubs.submit(meet, folder, k, 3, token=TOKEN, bound_s=30) for k in range(3)]
        return [site.result() for site in coming]


if __name__ == "__main__":
    main()
