"""What a node reads, one by one: records of an edge, versions of a loop."""

from __future__ import annotations

import asyncio
import math

import pytest

from arriero.engine.broker import Broker, Lease
from arriero.engine.codec import encode
from arriero.engine.memory import MemoryBroker
from arriero.engine.runtime.inputs import EdgeSource
from arriero.engine.runtime.versions import LoopSource
from arriero.engine.runtime.waits import NodeClock
from arriero.schemas.messages import Prompt, Weights
from tests.brokers import edge


async def _edge_source(broker: Broker, *, lease_s: float) -> tuple[EdgeSource[Prompt], list[Lease]]:
    await broker.declare([edge("prompts", groups=("sink",), lease_s=lease_s, max_deliveries=9)], [])
    again: list[Lease] = []

    async def poisoned(lease: Lease, error: str) -> None:
        await lease.nack(error)

    source = EdgeSource(
        broker.consumer("prompts", "sink"),
        Prompt,
        name="a record of prompts",
        clock=NodeClock("sink", bound_s=5),
        accept=lambda lease, record: record,
        poisoned=poisoned,
        again=again.append,
        want=2,
        max_deliveries=9,
    )
    source.start()
    return source, again


async def test_a_record_delivered_twice_is_shown_to_the_component_once() -> None:
    broker = MemoryBroker()
    source, again = await _edge_source(broker, lease_s=0.05)
    await broker.producer("prompts", 0).put("p", encode(Prompt(id="p", text="?")))
    assert (first := await source.next()) is not None
    old_lease = source.taken["p"][0]
    await asyncio.sleep(0.1)  # the lease runs out, and it comes again
    assert source.poll() is None
    assert source.taken["p"] != (old_lease, first)
    source.answer("p")
    await asyncio.sleep(0.1)  # and again, although it has its answer
    assert source.poll() is None
    assert {lease.id for lease in again} == {"p"}
    await again[-1].ack()
    await source.stop()
    assert (await broker.depth("prompts")).messages == 0


async def test_a_record_leased_at_the_moment_of_the_end_still_arrives() -> None:
    for _ in range(50):
        broker = MemoryBroker()
        source, _ = await _edge_source(broker, lease_s=30)
        await asyncio.sleep(0)
        producer = broker.producer("prompts", 0)
        await producer.put("p", encode(Prompt(id="p", text="?")))
        await producer.end()
        assert await source.next() is not None
        assert await source.next() is None
        await source.stop()


async def _loop(keep: int) -> tuple[MemoryBroker, LoopSource]:
    broker = MemoryBroker()
    await broker.declare([], ["loop-weights"])
    clock = NodeClock("generator", bound_s=5)
    source = LoopSource(broker, "loop-weights", Weights, name="loop weights", clock=clock, keep=keep)
    source.start()
    await asyncio.sleep(0)
    return broker, source


async def _next_version(source: LoopSource) -> int:
    newest = await source.next()
    assert newest is not None, "the loop goes on"
    return newest.version


async def _announce(broker: Broker, *versions: int) -> None:
    for version in versions:
        await broker.append("loop-weights", f"v{version}", encode(Weights(version=version)))
    await asyncio.sleep(0.01)


async def test_a_loop_gives_the_newest_version_and_none_twice() -> None:
    broker, source = await _loop(keep=1)
    await _announce(broker, 0, 1, 2)
    assert await _next_version(source) == 2
    assert source.poll() is None
    waiting = asyncio.create_task(_next_version(source))
    await asyncio.sleep(0.01)
    await _announce(broker, 3)
    assert await waiting == 3
    await source.stop()


async def test_no_version_is_lost_between_a_look_and_a_wait() -> None:
    broker, source = await _loop(keep=1)
    seen: list[int] = []

    async def consume() -> None:
        while not seen or seen[-1] < 200:
            seen.append(await _next_version(source))

    consuming = asyncio.create_task(consume())
    for version in range(201):
        await broker.append("loop-weights", f"v{version}", encode(Weights(version=version)))
        await asyncio.sleep(0)
    await asyncio.wait_for(consuming, 5)
    assert seen == sorted(set(seen))
    await source.stop()


async def test_a_deterministic_generator_gets_exactly_the_version_it_asks_for_or_an_error() -> None:
    broker, source = await _loop(keep=3)
    await _announce(broker, 0, 1, 2, 3)
    assert (await source.at(1)).version == 1
    assert (await source.at(3)).version == 3
    with pytest.raises(LookupError, match="version 0 of loop weights is no longer kept; the newest is 3"):
        await source.at(0)
    waiting = asyncio.create_task(source.at(4))
    await asyncio.sleep(0.01)
    await _announce(broker, 4, 5)
    assert (await waiting).version == 4
    await source.stop()


async def test_a_replica_that_comes_later_finds_the_versions_from_before() -> None:
    broker, first = await _loop(keep=2)
    await _announce(broker, 0, 1, 2, 3)
    await first.stop()
    late = LoopSource(
        broker, "loop-weights", Weights, name="loop weights", clock=NodeClock("g", bound_s=5), keep=2
    )
    late.start()
    assert await _next_version(late) == 3
    assert (await late.at(1)).version == 1
    await _announce(broker, 4)
    assert await _next_version(late) == 4  # an older one in between has taken nothing away
    await late.stop()


async def test_an_older_version_is_found_beside_one_whose_metric_is_not_a_number() -> None:
    broker = MemoryBroker()
    await broker.declare([], ["loop-weights"])
    for version in range(3):
        announced = Weights(id=f"v{version}", version=version, metrics={"kl": math.nan})
        await broker.append("loop-weights", announced.id, encode(announced))
    clock = NodeClock("g", bound_s=5)
    late = LoopSource(broker, "loop-weights", Weights, name="loop weights", clock=clock, keep=1)
    late.start()
    assert (await asyncio.wait_for(late.at(0), 2)).version == 0
    await late.stop()


async def test_versions_to_be_kept_stay_until_the_second_one_after_them() -> None:
    broker, source = await _loop(keep=1)
    every = LoopSource(
        broker,
        "loop-weights",
        Weights,
        name="loop weights",
        clock=NodeClock("g", bound_s=5),
        keep=1,
        keep_every=3,
    )
    every.start()
    await asyncio.sleep(0)
    await _announce(broker, *range(8))
    assert [(await every.at(v)).version for v in (3, 6, 7)] == [3, 6, 7]
    for gone in (0, 4, 5):
        with pytest.raises(LookupError, match=f"version {gone} of loop weights is no longer kept"):
            await every.at(gone)
    await source.stop()
    await every.stop()
