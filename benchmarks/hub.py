"""Launching a thousand replicas: what schedulers are given, and the storm in which all arrive at the hub.

Each simulated replica is one connection with TLS, which registers as an agent does and then sends a heartbeat
a second; a real one has three, in two processes. One hub, and three that replicate.

    python benchmarks/hub.py [REPLICAS]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import psutil

from arriero.engine.broker import BrokerError
from arriero.engine.certificates import make_certificate
from arriero.engine.nats import NatsBroker
from arriero.engine.nats_cluster import Cluster
from arriero.engine.nats_link import Link
from arriero.engine.nats_log import append
from arriero.engine.nats_names import Names
from arriero.engine.nats_pulse import Heartbeat
from arriero.engine.nats_server import NatsServer, start_server
from arriero.launchers import jobs, profile
from arriero.launchers.cluster import plan
from arriero.launchers.crew import RemoteCrew
from arriero.launchers.hub import edges, logs
from arriero.schemas.crew import CREW_LOG, ORDERS_LOG, Arrived
from arriero.schemas.graph import GraphSpec
from arriero.schemas.run import RunOptions
from tests.toys import toy_graph

RUN = "storm"
PROCESSES = 4
BEATS_S = 10.0  # for how long heartbeats are counted
BOUND_S = 300.0


def rendered(spec: GraphSpec, on: profile.Cluster) -> tuple[float, int]:
    """Seconds to plan and render the launch on a scheduler, and the bytes of its script or manifest."""
    began = time.perf_counter()
    given = profile.Profile(on=on, gpus=1, image="registry.example/arriero", python="python3")
    made = plan(spec, given, run_id=RUN, run_dir="/runs/storm", description=Path("/tmp"), code="c0de", hubs=1)
    text = jobs.rendered(made)
    return time.perf_counter() - began, len(text)


async def replica(url: str, token: str, name: str) -> None:
    """Register, then a heartbeat a second until cancelled; all on one connection."""
    names, here = Names(RUN), Arrived(name=name, life=name, host=socket.gethostname())
    link = await Link.open(url, token, name=name, timeout_s=BOUND_S)
    await append(link, names, CREW_LOG, f"arrived:{name}", here.model_dump_json().encode())
    beat = msgspec.msgpack.encode(Heartbeat(b"alive", []))
    while True:
        await link.publish(names.beat_subject(f"{name}-0"), beat)
        await asyncio.sleep(1.0)


def replicas(urls: Sequence[str], token: str, names: Sequence[str]) -> None:
    """Many of them in one process."""

    async def all_of_them() -> None:
        await asyncio.gather(*(replica(urls[i % len(urls)], token, name) for i, name in enumerate(names)))

    asyncio.run(all_of_them())


async def storm(spec: GraphSpec, servers: Sequence[NatsServer]) -> list[str]:
    """Cells of a row: seconds until all are there, per second, CPU and memory of the hubs, heartbeats."""
    broker = await NatsBroker.connect(
        servers[0].url, servers[0].token, run=RUN, replicas=len(servers), storage="file"
    )  # fmt: skip
    await declared(broker, spec)
    crew = RemoteCrew(spec, broker, {}, "{}")
    following = asyncio.create_task(crew.follow())
    names = [member.name for member in crew.processes]
    hubs = [psutil.Process(s.process.pid) for s in servers]
    before = sum(h.cpu_times().user + h.cpu_times().system for h in hubs)
    context = multiprocessing.get_context("spawn")
    urls = [s.url for s in servers]
    crowd = [
        context.Process(target=replicas, args=(urls, servers[0].token, names[k::PROCESSES]), daemon=True)
        for k in range(PROCESSES)
    ]
    began = time.perf_counter()
    for process in crowd:
        process.start()
    try:
        await crew.all_arrived(BOUND_S)
        took = time.perf_counter() - began
        cpu = sum(h.cpu_times().user + h.cpu_times().system for h in hubs) - before
        memory = max(h.memory_info().rss for h in hubs) >> 20
        await broker.beats()
        await asyncio.sleep(BEATS_S)
        fresh = sum(beat.age_s < 2.0 for beat in (await broker.beats()).values())
    finally:
        for process in crowd:
            process.kill()
        following.cancel()
        await broker.close()
    return [f"{took:.1f}", f"{len(names) / took:.0f}", f"{cpu:.1f}", f"{memory}", f"{fresh} of {len(names)}"]


async def declared(broker: NatsBroker, spec: GraphSpec) -> None:
    """Servers that have just started are no cluster yet."""
    deadline = time.monotonic() + 30
    while True:
        try:
            everything = [*logs(spec), CREW_LOG, ORDERS_LOG]
            return await broker.declare(edges(spec, RunOptions(run_id=RUN)), everything)
        except BrokerError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.5)


def hubs(count: int, folder: Path) -> list[NatsServer]:
    """Servers that the replicas reach by name; several replicate."""
    if count == 1:
        return [start_server(folder, public="localhost")]
    ports = [free_port() for _ in range(count)]
    addresses = [f"localhost:{port}" for port in ports]
    token, certificate = "storm-storm-storm", make_certificate(folder)
    return [
        start_server(
            folder / str(k), public="localhost", token=token, certificate=certificate,
            cluster=Cluster(
                name=f"hub-{k}", route=addresses[k], others=tuple(a for a in addresses if a != addresses[k])
            ),
        )
        for k in range(count)
    ]  # fmt: skip


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("replicas", nargs="?", type=int, default=1000)
    count = parser.parse_args().replicas
    if count < 5:
        parser.error(f"replicas is {count}, but the graph has 5 roles; give 5 or more")
    many = toy_graph(generators=1024).check()
    for on in ("slurm", "kubernetes"):
        seconds, size = rendered(many, on)
        print(f"1024 replicas for {on}: rendered in {seconds:.2f} s, {size} bytes")
    spec = toy_graph(generators=count - 4).check()  # prompts, reward, collect and trainer are there too
    print(f"\n{'hubs':>4}  {'all there, s':>12}  {'per s':>6}  {'CPU, s':>7}  {'MB':>4}  heartbeats heard")
    for number in (1, 3):
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            servers = hubs(number, Path(folder))
            for server in servers:
                stack.callback(server.stop)
            took, rate, cpu, memory, beats = asyncio.run(storm(spec, servers))
            print(f"{number:>4}  {took:>12}  {rate:>6}  {cpu:>7}  {memory:>4}  {beats}")


if __name__ == "__main__":
    main()
