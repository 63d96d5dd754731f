"""The contract of `arriero.engine.broker`: the end of an edge, and calls that are cancelled."""

import asyncio
import contextlib
import random
import time
from collections import Counter
from dataclasses import replace
from itertools import chain
from typing import cast

import pytest

from arriero.engine.broker import EdgeEnded
from tests.brokers import PROMPT_S, Engine, cancelled, edge, take, take_all

# --- the end ----------------------------------------------------------------------------------------------


async def test_everything_arrives_before_the_end_with_several_of_each(engine: Engine) -> None:
    broker = await engine.declare(edge(producers=3, groups=("reward", "record"), messages=7))
    readers = [(await engine.connect()).consumer("rollouts", "reward") for _ in range(3)]
    taking = [asyncio.ensure_future(take_all(reader)) for reader in readers]
    recording = asyncio.ensure_future(take_all(broker.consumer("rollouts", "record")))

    async def produce(replica: int) -> None:
        producer = (await engine.connect()).producer("rollouts", replica)
        for i in range(20):
            await producer.put(f"{replica}/{i}", b"x")
        await producer.end()
        await producer.end()

    await asyncio.gather(*(produce(replica) for replica in range(3)))
    async with asyncio.timeout(5):
        shares = await asyncio.gather(*taking)
        recorded = await recording
    expected = sorted(f"{replica}/{i}" for replica in range(3) for i in range(20))
    assert sorted(chain.from_iterable(shares)) == expected == sorted(recorded)


async def test_waiting_consumers_learn_of_the_end_at_once(engine: Engine) -> None:
    broker = await engine.declare(edge(producers=2))
    consumers = [(await engine.connect()).consumer("rollouts", "reward") for _ in range(3)]
    waiting = [asyncio.ensure_future(consumer.lease(wait_s=20)) for consumer in consumers]
    await broker.producer("rollouts", 0).end()
    await asyncio.sleep(0.1)
    assert not any(call.done() for call in waiting)
    await broker.producer("rollouts", 1).end()
    began = time.monotonic()
    outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 2)
    assert all(isinstance(outcome, EdgeEnded) for outcome in outcomes)
    assert time.monotonic() - began < PROMPT_S


async def test_an_open_edge_ends_with_the_producers_it_was_sealed_with(engine: Engine) -> None:
    broker = await engine.declare(replace(edge(), open=True))
    reader, late = (await engine.connect()).consumer("rollouts", "reward"), await engine.connect()
    waiting = asyncio.ensure_future(reader.lease(wait_s=20))
    await broker.producer("rollouts", 0).end()
    await broker.producer("rollouts", 7).put("a", b"x")  # joined
    lease = await waiting
    assert lease is not None
    await lease.ack()
    waiting = asyncio.ensure_future(reader.lease(wait_s=20))
    await broker.producer("rollouts", 7).end()
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await broker.seal("rollouts", 3)
    await broker.seal("rollouts", 3)
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await broker.producer("rollouts", 8).end()
    with pytest.raises(EdgeEnded):
        await asyncio.wait_for(waiting, 5)
    with pytest.raises(EdgeEnded):  # who comes later asks the store
        await late.consumer("rollouts", "reward").lease(wait_s=0)


async def test_the_end_waits_for_what_others_hold_and_comes_with_their_acknowledgement(
    engine: Engine,
) -> None:
    broker = await engine.declare(edge())
    holder, waiter = await engine.connect(), await engine.connect()
    await broker.producer("rollouts", 0).put("a", b"x")
    held = await take(holder.consumer("rollouts", "reward"))
    await broker.producer("rollouts", 0).end()
    waiting = asyncio.ensure_future(waiter.consumer("rollouts", "reward").lease(wait_s=20))
    await asyncio.sleep(1.4)  # long enough for a consumer that looks now and then to look rarely
    assert not waiting.done()
    await held.ack()
    began = time.monotonic()
    with pytest.raises(EdgeEnded):
        await asyncio.wait_for(waiting, 3)
    assert time.monotonic() - began < PROMPT_S


async def test_what_is_given_back_after_the_end_goes_to_another_replica(engine: Engine) -> None:
    broker = await engine.declare(edge())
    holder, waiter = await engine.connect(), await engine.connect()
    await broker.producer("rollouts", 0).put("a", b"x")
    held = await take(holder.consumer("rollouts", "reward"))
    await broker.producer("rollouts", 0).end()
    waiting = asyncio.ensure_future(waiter.consumer("rollouts", "reward").lease(wait_s=20))
    await asyncio.sleep(0.1)
    await held.nack("broken")
    lease = await asyncio.wait_for(waiting, PROMPT_S)
    assert lease is not None
    assert lease.deliveries == 2
    await lease.ack()


async def test_what_a_replica_holds_itself_does_not_delay_its_end(engine: Engine) -> None:
    broker = await engine.declare(edge(groups=("batch",)))
    for i in range(3):
        await broker.producer("rollouts", 0).put(f"m{i}", b"x")
    await broker.producer("rollouts", 0).end()
    consumer = broker.consumer("rollouts", "batch")
    held = [await take(consumer) for _ in range(3)]
    for wait_s in (0.0, 5.0):
        with pytest.raises(EdgeEnded):
            await consumer.lease(wait_s=wait_s)
    await held.pop().nack("once more")
    held.append(await take(consumer, wait_s=PROMPT_S))
    with pytest.raises(EdgeEnded):
        await consumer.lease(wait_s=5)
    for lease in held:
        await lease.ack()


async def test_a_consumer_that_comes_after_the_end_gets_what_is_left_and_then_the_end(engine: Engine) -> None:
    broker = await engine.declare(edge())
    await broker.producer("rollouts", 0).put("a", b"x")
    await broker.producer("rollouts", 0).end()
    late = await engine.connect()
    assert await take_all(late.consumer("rollouts", "reward")) == ["a"]
    restarted = await engine.connect()
    began = time.monotonic()
    assert await take_all(restarted.consumer("rollouts", "reward")) == []
    assert time.monotonic() - began < PROMPT_S


async def test_the_end_comes_after_puts_under_way(engine: Engine) -> None:
    broker = await engine.declare(edge(messages=1))
    producer = broker.producer("rollouts", 0)
    puts = [asyncio.ensure_future(producer.put(f"m{i}", b"x")) for i in range(3)]
    await asyncio.sleep(0.05)
    ending = asyncio.ensure_future(producer.end())
    assert await take_all(broker.consumer("rollouts", "reward")) == ["m0", "m1", "m2"]
    await asyncio.gather(*puts)
    await ending


# --- cancellation -----------------------------------------------------------------------------------------


async def test_a_cancelled_lease_takes_no_message(engine: Engine) -> None:
    broker = await engine.declare(edge())
    consumer = broker.consumer("rollouts", "reward")
    calls = [asyncio.ensure_future(consumer.lease(wait_s=10)) for _ in range(4)]
    await asyncio.sleep(0.05)
    for call in calls[:3]:
        await cancelled(cast("asyncio.Future[object]", call))
    await broker.producer("rollouts", 0).put("a", b"x")
    first = await asyncio.wait_for(calls[3], PROMPT_S)
    assert first is not None
    assert first.deliveries == 1
    await first.ack()
    await broker.producer("rollouts", 0).put("b", b"x")
    second = await take(broker.consumer("rollouts", "reward"), wait_s=PROMPT_S)
    assert second.deliveries == 1
    await second.ack()


async def test_leases_cancelled_at_any_moment_lose_nothing(engine: Engine) -> None:
    broker = await engine.declare(edge(max_deliveries=1000))
    consumer = broker.consumer("rollouts", "reward")
    producer = broker.producer("rollouts", 0)
    chance = random.Random(7)
    putting = asyncio.ensure_future(asyncio.gather(*(producer.put(f"m{i}", b"x") for i in range(80))))
    seen: Counter[str] = Counter()
    while sum(seen.values()) < 60:
        call = asyncio.ensure_future(consumer.lease(wait_s=10))
        await asyncio.sleep(chance.choice([0, 0, 0.0002, 0.0005, 0.001, 0.005]))
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            if (lease := await call) is not None:
                await lease.ack()
                seen[lease.id] += 1
    await putting
    await producer.end()
    seen.update(await take_all(broker.consumer("rollouts", "reward")))
    assert seen == Counter(f"m{i}" for i in range(80))


async def test_a_lease_cancelled_at_each_of_its_steps_gives_its_message_back(engine: Engine) -> None:
    broker = await engine.declare(edge(max_deliveries=1000))
    consumer = broker.consumer("rollouts", "reward")
    for i in range(60):
        await broker.producer("rollouts", 0).put(f"m{i}", b"x")
    for num_steps in range(40):
        call = asyncio.ensure_future(consumer.lease(wait_s=10))
        for _ in range(num_steps):
            await asyncio.sleep(0)
            time.sleep(0.0002)  # noqa: ASYNC251  # what is under way arrives, but nobody has looked at it
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            if (lease := await call) is not None:
                await lease.ack()
    await broker.producer("rollouts", 0).end()
    other = broker.consumer("rollouts", "reward")
    await asyncio.wait_for(take_all(other), 4)  # no end while one is lost with its cancelled call


async def test_a_lease_cancelled_as_its_message_comes_gives_it_to_the_next(engine: Engine) -> None:
    broker = await engine.declare(edge())
    call = asyncio.ensure_future(broker.consumer("rollouts", "reward").lease(wait_s=10))
    await asyncio.sleep(0.05)
    await broker.producer("rollouts", 0).put("a", b"x")
    await cancelled(cast("asyncio.Future[object]", call))
    lease = await take(broker.consumer("rollouts", "reward"), wait_s=PROMPT_S)
    assert engine.kind != "memory" or lease.deliveries == 1
    await lease.ack()


async def test_a_cancelled_put_gives_up_its_place_in_the_line(engine: Engine) -> None:
    broker = await engine.declare(edge(messages=1))
    producer, consumer = broker.producer("rollouts", 0), broker.consumer("rollouts", "reward")
    await producer.put("a", b"x")
    puts = [asyncio.ensure_future(producer.put(key, b"x")) for key in ("b", "c")]
    await asyncio.sleep(0.05)
    await cancelled(cast("asyncio.Future[object]", puts[0]))
    engine.leftovers = engine.kind == "claims"  # its payload stays in the store until the run ends
    await (await take(consumer)).ack()
    lease = await take(consumer)
    assert lease.id == "c"
    await lease.ack()
    assert await asyncio.wait_for(producer.put("b", b"x"), PROMPT_S)
    await (await take(consumer)).ack()
