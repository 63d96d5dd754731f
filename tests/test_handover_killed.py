"""Replicas that are killed while they hold continuations, and what they put back."""

from __future__ import annotations

import asyncio
import multiprocessing
import multiprocessing.process
import random
from pathlib import Path

import pytest

from arriero.engine.nats import NatsBroker
from arriero.engine.nats_access import credential
from arriero.engine.nats_server import start_server
from arriero.engine.runtime import run_role
from arriero.launchers.hub import access
from arriero.schemas.graph import GraphSpec
from arriero.schemas.run import RunOptions
from tests.brokers import Engine
from tests.runtime_runs import (
    Noting,
    declare,
    options,
    read,
)
from tests.segments import Segmented, graph


def process(spec: str, opts: str, role: str, number: int, url: str, token: str) -> None:
    """One replica, in a process of its own."""
    graph, run_options = GraphSpec.model_validate_json(spec), RunOptions.model_validate_json(opts)

    async def run() -> None:
        broker = await NatsBroker.connect(url, token, run=run_options.run_id)
        try:
            await run_role(graph, run_options, role=role, replica=number, run_dir=Path(), broker=broker)
        finally:
            await broker.close()

    asyncio.run(run())


@pytest.mark.slow
async def test_generators_killed_with_continuations_in_flight_lose_and_double_nothing(
    folder: Path, run_name: str
) -> None:
    generator = Segmented(most=6, seconds=0.01, drop_every=9, replicas=3)
    spec = graph(generator, groups=8, trainer=Noting(steps=10))
    opts = options(run_name, max_deliveries=9, wait_bound_s=60.0, lease_s=20.0)
    server = start_server(folder, access=access(spec, opts))  # every role with what it may do, no more
    engine = Engine("nats", run_name, server)
    owner = await declare(spec, opts, engine)
    spawn = multiprocessing.get_context("spawn")
    texts = spec.model_dump_json(), opts.model_dump_json()

    def begin(role: str, number: int = 0) -> multiprocessing.process.BaseProcess:
        args = (*texts, role, number, server.url, credential(server.token, role))
        started = spawn.Process(target=process, args=args, daemon=True)
        started.start()
        return started

    running = {(role, k): begin(role, k) for role, n in spec.roles.items() for k in range(n[0].replicas)}
    kills, chance = 0, random.Random(4)
    try:
        async with asyncio.timeout(90):
            while any(p.is_alive() for p in running.values()):
                await asyncio.sleep(chance.uniform(0.05, 0.4))
                key = ("generator", chance.randrange(3))
                busy = (await owner.depth("generator-backlog")).leased["generator-backlog"]
                if busy and kills < 5 and running[key].is_alive():
                    running[key].kill()
                    await asyncio.to_thread(running[key].join)
                    await owner.evict(f"generator-{key[1]}-0")
                    running[key] = begin(*key)
                    kills += 1
    finally:
        for p in running.values():
            p.kill()
    assert {key: p.exitcode for key, p in running.items()} == dict.fromkeys(running, 0)
    assert kills >= 3
    played = await read(owner)
    ledger = played.ledger  # raises for a prompt that is trained or dropped twice
    assert ledger.admitted == ledger.trained + ledger.dropped.total()
    assert ledger.trained == 10 * 8
    assert ledger.staleness_max <= 1
    assert set(ledger.dropped) <= {"invalid", "stale"}
    assert played.dead == []
    await engine.assert_empty()
    await engine.close()
    server.stop()
