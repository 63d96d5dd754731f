"""The runtime when something fails, blocks, is stopped or comes twice."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass

from arriero.engine.broker import Broker, BrokerError
from arriero.engine.codec import encode
from arriero.engine.graph import Graph, PerRecord
from arriero.engine.memory import MemoryBroker
from arriero.engine.nats import NatsBroker
from arriero.engine.nats_server import NatsServer
from arriero.engine.runtime import WaitTimeout, node, run_role
from arriero.engine.runtime.journal import Progress, announce, follow_control
from arriero.engine.runtime.role import Stopped
from arriero.engine.stream import Stream
from arriero.schemas.graph import Capacity, GraphSpec
from arriero.schemas.ledger import LEDGER_LOG, Control, Ended, Stop
from arriero.schemas.messages import Dropped, Prompt, RolloutGroup, Weights
from arriero.schemas.run import RoleStatus
from tests.brokers import Engine, take
from tests.runtime_runs import (
    ATTEMPTS,
    Noting,
    Prompts,
    Shaky,
    check_books,
    declare,
    graph,
    options,
    play,
    read,
    replica,
    start,
)

Fault = Literal["raise", "exit", "swallow", "block", "linger"]


@dataclass(frozen=True, kw_only=True)
class Broken:
    """Drops every prompt, but from the third on does what `fault` says."""

    fault: Fault
    seconds: NonNegativeFloat = 0.0

    async def run(self, prompts: Stream[Prompt]) -> AsyncIterator[Prompt | Dropped]:
        try:
            taken = 0
            async for prompt in prompts:
                taken += 1
                if taken < 3:
                    yield Dropped(parent=prompt.id, reason="filtered")
                elif self.fault == "raise":
                    raise ZeroDivisionError("the third prompt")
                elif self.fault == "exit":
                    sys.exit(0)
                elif self.fault == "block":
                    time.sleep(self.seconds)  # noqa: ASYNC251  # the fault that is tested
                    return
                elif self.fault == "linger":
                    await asyncio.sleep(60)
        finally:
            if self.fault == "linger":
                await asyncio.to_thread(time.sleep, self.seconds)


@dataclass(frozen=True, kw_only=True)
class Few:
    """Takes five prompts and leaves."""

    async def run(self, prompts: Stream[Prompt]) -> AsyncIterator[Prompt | Dropped]:
        for _ in range(5):
            if (prompt := await prompts.next()) is not None:
                yield Dropped(parent=prompt.id, reason="filtered")


@dataclass(frozen=True, kw_only=True)
class Cancelling(PerRecord[Prompt, Prompt]):
    """Waits for something that is cancelled, the first time for row 2."""

    async def apply(self, record: Prompt) -> Prompt | Dropped:
        tries = ATTEMPTS["cancelling"]
        tries[record.row] += 1
        if record.row == 2 and tries[2] == 1:
            cancelled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            cancelled.cancel()
            await cancelled
        return Dropped(parent=record.id, reason="filtered")


def line(component: Broken | Few | Cancelling, *, count: int = 10, places: int = 16) -> GraphSpec:
    """prompts -> sink"""
    g = Graph("line")
    prompts = g.add(Prompts(count=count), name="prompts", capacity=Capacity(messages=places))()
    add: Any = g.add  # their ports have different names
    add(component, name="sink")(prompts)
    return g.check()


@pytest.fixture
def memory() -> Engine:
    return Engine("memory", "run")


async def test_an_error_in_a_component_ends_its_role_at_once_with_the_original_traceback(
    memory: Engine,
) -> None:
    """SkyRL #1691: an error inside a task was swallowed."""
    spec, opts = line(Broken(fault="raise")), options("run")
    owner = await declare(spec, opts, memory)
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="the third prompt") as caught:
        await asyncio.gather(*start(spec, opts, memory).values())
    assert time.monotonic() - began < 8
    assert "run" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    said = [m async for m in _first(owner, 1)]
    failed = next(m for m in said if isinstance(m, Ended) and m.error)
    assert failed.error == "ZeroDivisionError: the third prompt"
    assert 'raise ZeroDivisionError("the third prompt")' in failed.traceback
    await asyncio.sleep(0.05)
    assert (await owner.depth("prompts")).leased == {"sink-prompts": 0}


async def _first(broker: Broker, errors: int) -> AsyncIterator[Control]:
    async for message in follow_control(broker):
        yield message
        errors -= isinstance(message, Ended) and bool(message.error)
        if not errors:
            return


async def test_sys_exit_in_a_component_is_an_error(memory: Engine) -> None:
    with pytest.raises(RuntimeError, match=r"sink called sys\.exit\(0\)"):
        await play(line(Broken(fault="exit")), memory)


async def test_a_component_that_forgets_its_inputs_is_named(memory: Engine) -> None:
    with pytest.raises(RuntimeError, match="sink ended without an answer to 8 inputs"):
        await play(line(Broken(fault="swallow")), memory)


async def test_a_record_dropped_on_the_floor_fails_the_run_within_the_bound_and_says_who_waits(
    memory: Engine,
) -> None:
    """SkyRL #1173: a run stood still for 29 hours with 125 of 128 groups."""
    spec = graph(generator=Shaky(slow_s=60, slow_every=100), staleness=0)
    began = time.monotonic()
    with pytest.raises(WaitTimeout, match=r"^\w+ waited 0\.4 s for (a record of \w+|admission of record 4 )"):
        await play(spec, memory, options("run", wait_bound_s=0.4))
    assert time.monotonic() - began < 8


async def test_the_garbage_collector_cannot_end_a_task(memory: Engine) -> None:
    """torchforge #601: a background task without a strong reference vanished."""

    async def collect() -> None:
        while True:
            gc.collect()
            await asyncio.sleep(0.002)

    collecting = asyncio.create_task(collect())
    played = await play(graph(generators=2), memory)
    collecting.cancel()
    assert check_books(played, "run", staleness=1, groups=4).trained == 32


async def test_everybody_leaves_on_a_stop_although_all_edges_are_full(engine: Engine) -> None:
    """verl #7587: control calls queued behind data and never ran."""
    engine.leftovers = True
    spec, opts = line(Broken(fault="linger"), count=100, places=4), options(engine.run)
    owner = await declare(spec, opts, engine)
    tasks = start(spec, opts, engine)
    await asyncio.sleep(0.3)
    assert (await owner.depth("prompts")).messages == 4
    began = time.monotonic()
    await announce(owner, Stop(reason="told to"))
    ends = await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert [type(end) for end in ends] == [Stopped, Stopped]
    assert time.monotonic() - began < 8
    left = [await take(owner.consumer("prompts", "sink-prompts"), wait_s=1.0) for _ in range(4)]
    assert len({lease.id for lease in left}) == 4  # all that was held has come back


async def test_a_component_that_doesnt_come_to_an_end_holds_up_nothing(
    memory: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "LEAVE_S", 0.1)
    memory.leftovers = True
    spec, opts = line(Broken(fault="linger", seconds=4.0)), options("run")
    owner = await declare(spec, opts, memory)
    tasks = start(spec, opts, memory)
    await asyncio.sleep(0.2)
    began = time.monotonic()
    await announce(owner, Stop(reason="told to"))
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert time.monotonic() - began < 3
    assert (await owner.depth("prompts")).leased == {"sink-prompts": 0}
    await asyncio.sleep(4.0)  # let the thread end before the loop does


async def test_a_source_stops_when_all_its_consumers_have_left(engine: Engine) -> None:
    engine.leftovers = True
    async with asyncio.timeout(8):
        await play(line(Few(), count=100_000, places=4), engine)


async def test_a_record_whose_work_is_cancelled_is_tried_again_alone(memory: Engine) -> None:
    """verl #7611: one cancelled sample killed the whole rollout worker."""
    played = await play(line(Cancelling(), count=6), memory)
    assert ATTEMPTS["cancelling"] == {0: 1, 1: 1, 2: 2, 3: 1, 4: 1, 5: 1}
    assert played.ledger.dropped == {"filtered": 6}


class Unwritable(MemoryBroker):
    """A connection on which the ledger can't be written after the first three entries."""

    _left = 3

    async def append(self, log: str, id: str, payload: bytes) -> bool:
        if log == LEDGER_LOG:
            self._left -= 1
            if self._left < 0:
                raise BrokerError("the disk is full")
        return await super().append(log, id, payload)


async def test_a_ledger_that_cant_be_written_fails_the_node_at_once(memory: Engine) -> None:
    spec, opts = line(Broken(fault="linger")), options("run")
    owner = await declare(spec, opts, memory)
    assert isinstance(owner, MemoryBroker)
    broker = Unwritable(owner._store)  # pyright: ignore[reportPrivateUsage]
    async with asyncio.timeout(2):
        with pytest.raises(BrokerError, match="the disk is full"):
            await run_role(spec, opts, role="prompts", replica=0, run_dir=Path(), broker=broker)
    await broker.close()


async def test_nothing_is_acknowledged_before_its_output_is_durable(memory: Engine) -> None:
    g = Graph("full")
    weights = g.loop(Weights, staleness=3)
    asked = g.add(Prompts(count=8), name="prompts")()
    rollouts = g.add(Shaky(most_s=0), name="generator", capacity=Capacity(messages=8))(asked, weights)
    weights.close(g.add(Stuck(), name="trainer")(rollouts))
    spec, opts = g.check(), options("run")
    owner = await declare(spec, opts, memory)
    memory.leftovers = True
    await owner.append("loop-weights", "trainer-0", encode(Weights(version=0)))
    filler = owner.producer("generator", 1)
    for k in range(6):
        await filler.put(f"filler{k}", b"")
    tasks = [asyncio.create_task(replica(spec, opts, memory, role)) for role in ("prompts", "generator")]
    await asyncio.sleep(0.3)
    assert (await owner.depth("generator")).messages == 8
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    depth = await owner.depth("prompts")
    stored = (await owner.depth("generator")).messages - 6
    assert depth.leased == {"generator-prompts": 0}
    assert (
        depth.messages == depth.waiting["generator-prompts"] >= (await read(owner)).ledger.admitted - stored
    )
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)


@dataclass(frozen=True, kw_only=True)
class Stuck:
    """A trainer that never takes anything; its role isn't even started."""

    async def run(self, rollouts: Stream[RolloutGroup]) -> AsyncIterator[Weights]:
        async for _ in rollouts:
            yield Weights(version=1)


async def test_a_source_that_starts_again_admits_nothing_twice(engine: Engine) -> None:
    spec = graph(staleness=1, generators=2, trainer=Noting(steps=20, seconds=0.005))
    opts = options(engine.run)
    owner = await declare(spec, opts, engine)
    tasks = start(spec, opts, engine)
    await asyncio.sleep(0.1)
    tasks["prompts", 0].cancel()
    await asyncio.gather(tasks["prompts", 0], return_exceptions=True)
    tasks["prompts", 0] = asyncio.create_task(replica(spec, opts, engine, "prompts"))
    await asyncio.gather(*tasks.values())
    assert check_books(await read(owner), engine.run, staleness=1, groups=4).trained == 80


async def test_a_blocked_event_loop_keeps_its_heartbeat_and_shows_its_lag(
    nats_server: NatsServer, run_name: str
) -> None:
    """prime-rl #1713: 700 s of lag, and nobody knew."""
    engine = Engine("nats", run_name, nats_server)
    spec, opts = line(Broken(fault="block", seconds=2.5), count=3), options(run_name, lease_s=1.0)
    owner = await declare(spec, opts, engine)

    async def blocked() -> None:
        broker = await NatsBroker.connect(nats_server.url, nats_server.token, run=run_name)
        await run_role(spec, opts, role="sink", replica=0, run_dir=Path(), broker=broker)
        await broker.close()

    prompts = asyncio.create_task(replica(spec, opts, engine, "prompts"))
    thread = threading.Thread(target=lambda: asyncio.run(blocked()))
    thread.start()
    lags: list[float] = []
    ages: list[float] = []
    while thread.is_alive():
        await asyncio.sleep(0.1)
        if beat := (await owner.beats()).get("sink-0-0"):
            lags.append(RoleStatus.model_validate_json(beat.payload).lag_s)
            ages.append(beat.age_s)
    await prompts
    assert 1.5 < max(lags) < 2.5
    assert max(ages) < 1.0
    await engine.close()


async def test_a_run_sees_nothing_of_another_on_the_same_server(
    nats_server: NatsServer, run_name: str
) -> None:
    """prime-rl #2304: a fresh run trained on rollouts of an old one."""
    first, second = Engine("nats", run_name, nats_server), Engine("nats", f"{run_name}b", nats_server)
    for engine in (first, second):
        played = await play(graph(trainer=Noting(steps=2)), engine)
        assert check_books(played, engine.run, staleness=1, groups=4).trained == 8
    await first.close()
    await second.close()


async def test_a_node_that_failed_and_was_started_again_has_ended_only_when_it_ends_well() -> None:
    broker = MemoryBroker()
    spec = line(Few())
    await broker.declare([], ["control"])
    progress = Progress(spec, broker, "sink", 0)
    following = asyncio.create_task(progress.follow())
    await announce(broker, Ended(node="sink", replica=0, error="ZeroDivisionError: the third prompt"))
    await asyncio.sleep(0.01)
    assert not progress.sinks_ended.is_set()
    for _ in range(2):
        await announce(broker, Ended(node="sink", replica=0))
    await asyncio.sleep(0.01)
    assert progress.sinks_ended.is_set()
    assert progress.consumers_left["prompts"].is_set()
    following.cancel()
