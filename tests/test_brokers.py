"""The contract of `arriero.engine.broker`, kept by every broker. Each test runs on all of them."""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator
from itertools import chain
from typing import cast

import pytest

from arriero.engine.broker import Broker, BrokerError, EdgeEnded, Producer
from tests.brokers import Engine, assert_depth, edge, eventually, take, take_all

LEASE_S = 0.4
PROMPT_S = 0.3  # "at once" on a busy machine; milliseconds on an idle one

# --- messages ---------------------------------------------------------------------------------------------


async def test_a_message_arrives_as_it_was_sent_and_leaves_the_edge_when_acknowledged(engine: Engine) -> None:
    broker = await engine.declare(edge())
    payload = bytes(range(256)) * 200
    assert await broker.producer("rollouts", 0).put("gsm8k/0/17#1", payload)
    lease = await take(broker.consumer("rollouts", "reward"))
    assert (lease.id, lease.payload, lease.deliveries) == ("gsm8k/0/17#1", payload, 1)
    depth = await broker.depth("rollouts")
    assert (depth.messages, depth.waiting, depth.leased) == (1, {"reward": 0}, {"reward": 1})
    assert depth.bytes >= len(payload)
    await lease.ack()
    await lease.ack()
    await assert_depth(broker, "rollouts", 0)


async def test_messages_of_one_producer_arrive_in_order(engine: Engine) -> None:
    broker = await engine.declare(edge())
    producer = broker.producer("rollouts", 0)
    for i in range(50):
        await producer.put(f"m{i}", b"%d" % i)
    await producer.end()
    assert await take_all(broker.consumer("rollouts", "reward")) == [f"m{i}" for i in range(50)]


async def test_every_group_gets_every_message(engine: Engine) -> None:
    broker = await engine.declare(edge(groups=("trainer", "record")))
    producer = broker.producer("rollouts", 0)
    for i in range(20):
        await producer.put(f"m{i}", b"x")
    await producer.end()
    assert len(await take_all(broker.consumer("rollouts", "trainer"))) == 20
    depth = await broker.depth("rollouts")
    assert (depth.messages, depth.waiting["record"], depth.waiting["trainer"]) == (20, 20, 0)
    assert len(await take_all(broker.consumer("rollouts", "record"))) == 20


async def test_three_replicas_share_the_messages_of_their_group(engine: Engine) -> None:
    broker = await engine.declare(edge())
    replicas = [(await engine.connect()).consumer("rollouts", "reward") for _ in range(3)]
    taking = [asyncio.ensure_future(take_all(replica)) for replica in replicas]
    producer = broker.producer("rollouts", 0)
    await asyncio.gather(*(producer.put(f"m{i}", b"x") for i in range(60)))
    await producer.end()
    shares = await asyncio.gather(*taking)
    assert sorted(chain.from_iterable(shares)) == sorted(f"m{i}" for i in range(60))
    assert all(len(share) >= 5 for share in shares), shares


async def test_a_replica_takes_no_more_than_it_asked_for(engine: Engine) -> None:
    broker = await engine.declare(edge())
    for i in range(5):
        await broker.producer("rollouts", 0).put(f"m{i}", b"x")
    first, second = broker.consumer("rollouts", "reward"), broker.consumer("rollouts", "reward")
    leases = [await take(first)] + [await take(second, wait_s=1) for _ in range(4)]
    assert [lease.deliveries for lease in leases] == [1] * 5
    for lease in leases:
        await lease.ack()


async def test_a_known_id_is_put_once(engine: Engine) -> None:
    broker = await engine.declare(edge(messages=2))
    first, second = broker.producer("rollouts", 0), broker.producer("rollouts", 1)
    assert await first.put("a", b"x")
    assert not await second.put("a", b"x")
    assert await second.put("b", b"x")
    assert not await second.put("a", b"x"), "known ids need no place on a full edge"
    await first.end()
    assert await take_all(broker.consumer("rollouts", "reward")) == ["a", "b"]
    assert not await first.put("a", b"x"), "nor are they taken again once consumed"


async def test_the_declaration_is_known_to_connections_that_did_not_make_it(engine: Engine) -> None:
    decl = edge(groups=("trainer", "record"), producers=3, lease_s=7.5)
    await engine.declare(decl)
    other = await engine.connect()
    assert await other.edge("rollouts") == decl
    await other.declare([decl], [])
    with pytest.raises(BrokerError, match="rollouts is declared already"):
        await other.declare([edge()], [])


async def test_what_is_not_declared_is_an_error_that_names_it(engine: Engine) -> None:
    broker = await engine.declare(edge(), logs=("ledger",))
    for attempt in (
        broker.producer("rollout", 0).put("a", b"x"),
        broker.producer("rollout", 0).end(),
        broker.consumer("rollout", "reward").lease(wait_s=1),
        broker.edge("rollout"),
        broker.depth("rollout"),
    ):
        with pytest.raises(BrokerError, match=r"edge rollout .*isn't declared"):
            await attempt
    with pytest.raises(BrokerError, match=r"no group rewards; it has reward"):
        await broker.consumer("rollouts", "rewards").lease(wait_s=1)


@pytest.mark.parametrize("id", ["", " a", "a\n", "é", "x" * 257])
async def test_an_id_that_cannot_travel_is_refused(engine: Engine, id: str) -> None:
    broker = await engine.declare(edge())
    with pytest.raises(BrokerError, match="printable ASCII"):
        await broker.producer("rollouts", 0).put(id, b"x")


async def test_edges_of_any_name_do_not_meet(engine: Engine) -> None:
    names = ["a", "a.b", "a-b", "log-a", "Ä b"]
    broker = await engine.declare(*(edge(name) for name in names), logs=("a",))
    for name in names:
        await broker.producer(name, 0).put("id", name.encode())
    for name in names:
        lease = await take(broker.consumer(name, "reward"))
        assert lease.payload == name.encode()
        await lease.ack()


# --- capacity ---------------------------------------------------------------------------------------------


async def test_puts_on_a_full_edge_wait_and_are_released_in_order(engine: Engine) -> None:
    broker = await engine.declare(edge(messages=2))
    producer, consumer = broker.producer("rollouts", 0), broker.consumer("rollouts", "reward")
    done: list[int] = []

    async def put(i: int) -> None:
        await producer.put(f"m{i}", b"x")
        done.append(i)

    puts = [asyncio.ensure_future(put(i)) for i in range(6)]
    await asyncio.sleep(0.1)
    assert done == [0, 1]
    for expected in range(6):
        lease = await take(consumer)
        assert lease.id == f"m{expected}"
        assert (await broker.depth("rollouts")).messages <= 2
        await lease.ack()
        admitted = min(expected + 3, 6)

        async def caught_up(admitted: int = admitted) -> bool:
            return len(done) == admitted

        assert await eventually(caught_up, within_s=PROMPT_S)
    await asyncio.gather(*puts)
    assert done == list(range(6))


async def test_an_offer_is_refused_where_a_put_would_wait_and_leaves_no_trace(engine: Engine) -> None:
    broker = await engine.declare(edge(messages=2))
    producer, consumer = broker.producer("rollouts", 0), broker.consumer("rollouts", "reward")
    assert [await producer.offer(name, b"x") for name in "aab"] == [True, False, True]
    assert await producer.offer("c", b"x") is None
    assert await producer.offer("a", b"x") is False  # known, and that counts before the lack of room
    await (await take(consumer)).ack()
    assert await eventually(lambda: _offered(producer), within_s=1.0)
    assert [(await take(consumer)).id for _ in range(2)] == ["b", "c"]
    engine.leftovers = True


async def _offered(producer: Producer) -> bool:
    return bool(await producer.offer("c", b"x"))


async def test_what_a_holder_puts_in_place_of_its_lease_after_the_end_still_arrives(engine: Engine) -> None:
    first, second = await engine.declare(edge()), await engine.connect()
    consumers = [broker.consumer("rollouts", "reward") for broker in (first, second)]
    producers = [broker.producer("rollouts", 0) for broker in (first, second)]
    await producers[0].put("a0", b"x")
    held = await take(consumers[0])
    await producers[0].end()
    for hop in range(1, 13):
        waiting = asyncio.create_task(take(consumers[hop % 2]))
        await asyncio.sleep(0.02 * (hop % 3))
        assert await producers[1 - hop % 2].offer(f"a{hop}", b"x")
        await held.ack()
        held = await waiting
        assert held.id == f"a{hop}"
    await held.ack()
    for consumer in consumers:
        with pytest.raises(EdgeEnded):
            await consumer.lease(wait_s=5)


async def test_a_log_says_whether_it_has_an_entry(engine: Engine) -> None:
    broker = await engine.declare(logs=("ledger",))
    assert not await broker.appended("ledger", "dropped:p")
    await broker.append("ledger", "dropped:p", b"x")
    assert await broker.appended("ledger", "dropped:p")
    assert not await broker.appended("ledger", "dropped:q")


async def test_the_slowest_group_holds_the_place(engine: Engine) -> None:
    broker = await engine.declare(edge(messages=1, groups=("fast", "slow")))
    producer = broker.producer("rollouts", 0)
    await producer.put("a", b"x")
    waiting = asyncio.ensure_future(producer.put("b", b"x"))
    await (await take(broker.consumer("rollouts", "fast"))).ack()
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await (await take(broker.consumer("rollouts", "slow"))).ack()
    assert await asyncio.wait_for(waiting, PROMPT_S)
    for group in ("fast", "slow"):
        await (await take(broker.consumer("rollouts", group))).ack()


@pytest.mark.parametrize("size", [4_000, 40_000])
async def test_capacity_in_bytes_holds_back_puts(engine: Engine, size: int) -> None:
    broker = await engine.declare(edge(bytes=3 * size + 2_000))
    producer, consumer = broker.producer("rollouts", 0), broker.consumer("rollouts", "reward")
    puts = [asyncio.ensure_future(producer.put(f"m{i}", bytes(size))) for i in range(5)]
    await asyncio.sleep(0.1)
    assert (await broker.depth("rollouts")).bytes <= 3 * size + 2_000
    assert [put.done() for put in puts] == [True, True, True, False, False]
    for _ in range(5):
        await (await take(consumer)).ack()
    await asyncio.wait_for(asyncio.gather(*puts), PROMPT_S)


async def test_a_message_larger_than_the_edge_is_an_error_that_names_both(engine: Engine) -> None:
    broker = await engine.declare(edge(bytes=10_000))
    with pytest.raises(BrokerError, match=r"message m7 has 20000 bytes, the edge holds at most 9488; raise"):
        await broker.producer("rollouts", 0).put("m7", bytes(20_000))


# --- leases -----------------------------------------------------------------------------------------------


async def test_a_lease_that_runs_out_is_delivered_again(engine: Engine) -> None:
    broker = await engine.declare(edge(lease_s=LEASE_S))
    await broker.producer("rollouts", 0).put("a", b"x")
    await take(broker.consumer("rollouts", "reward"))
    began = time.monotonic()
    again = await take(broker.consumer("rollouts", "reward"))
    assert 0.7 * LEASE_S < time.monotonic() - began < LEASE_S + PROMPT_S
    assert again.deliveries == 2
    await again.ack()


async def test_an_extended_lease_is_not_delivered_again(engine: Engine) -> None:
    broker = await engine.declare(edge(lease_s=LEASE_S))
    await broker.producer("rollouts", 0).put("a", b"x")
    lease = await take(broker.consumer("rollouts", "reward"))
    other = asyncio.ensure_future(broker.consumer("rollouts", "reward").lease(wait_s=2.5 * LEASE_S))
    for _ in range(5):
        await asyncio.sleep(0.4 * LEASE_S)
        await lease.extend()
    assert await other is None
    await lease.ack()


async def test_what_is_given_back_is_delivered_again_at_once(engine: Engine) -> None:
    broker = await engine.declare(edge())
    for key in ("a", "b"):
        await broker.producer("rollouts", 0).put(key, b"x")
    consumer = broker.consumer("rollouts", "reward")
    lease = await take(consumer)
    await lease.nack("not now")
    await lease.nack("not now")
    again = await take(consumer, wait_s=PROMPT_S)
    assert (again.id, again.deliveries) == ("a", 2)
    await again.ack()
    await again.nack("too late")
    await (await take(consumer)).ack()


async def test_a_lease_that_ran_out_can_be_acknowledged_but_not_taken_from_its_new_holder(
    engine: Engine,
) -> None:
    broker = await engine.declare(edge(lease_s=LEASE_S, max_deliveries=9))
    await broker.producer("rollouts", 0).put("a", b"x")
    slow = await take(broker.consumer("rollouts", "reward"))
    await take(broker.consumer("rollouts", "reward"))
    await slow.nack("gone")
    await slow.extend()
    third = broker.consumer("rollouts", "reward")
    assert await third.lease(wait_s=0.3 * LEASE_S) is None
    lease = await take(third)
    assert lease.deliveries == 3
    other = await take(broker.consumer("rollouts", "reward"))
    await lease.ack()
    await other.ack()
    await assert_depth(broker, "rollouts", 0)
    assert await third.lease(wait_s=1.5 * LEASE_S) is None


async def test_a_late_acknowledgement_takes_back_a_message_that_waits_again(engine: Engine) -> None:
    broker = await engine.declare(edge(lease_s=0.2))
    await broker.producer("rollouts", 0).put("a", b"x")
    late = await take(broker.consumer("rollouts", "reward"))
    await asyncio.sleep(0.4)
    await late.ack()
    await assert_depth(broker, "rollouts", 0)
    assert await broker.consumer("rollouts", "reward").lease(wait_s=0.3) is None


async def test_closing_a_connection_gives_back_what_it_holds(engine: Engine) -> None:
    broker = await engine.declare(edge())
    leaving = await engine.connect()
    await broker.producer("rollouts", 0).put("a", b"x")
    await take(leaving.consumer("rollouts", "reward"))
    await leaving.close()
    await (await take(broker.consumer("rollouts", "reward"), wait_s=PROMPT_S)).ack()


async def test_a_message_that_keeps_failing_becomes_a_dead_letter_and_frees_its_place(engine: Engine) -> None:
    broker = await engine.declare(edge(messages=1, max_deliveries=3, groups=("reward", "record")))
    producer, consumer = broker.producer("rollouts", 0), broker.consumer("rollouts", "reward")
    await producer.put("poison", b"payload")
    for attempt in range(3):
        await (await take(consumer)).nack(f"ValueError: attempt {attempt}")
    assert await consumer.lease(wait_s=0.05) is None
    await (await take(broker.consumer("rollouts", "record"))).ack()
    await assert_depth(broker, "rollouts", 0)
    (dead,) = await broker.dead_letters()
    assert (dead.edge, dead.group, dead.id, dead.payload) == ("rollouts", "reward", "poison", b"payload")
    assert (dead.error, dead.deliveries) == ("ValueError: attempt 2", 3)
    assert await asyncio.wait_for(producer.put("next", b"x"), PROMPT_S)
    for group in ("reward", "record"):
        await (await take(broker.consumer("rollouts", group))).ack()


async def test_a_message_that_kills_its_holders_becomes_a_dead_letter(engine: Engine) -> None:
    broker = await engine.declare(edge(lease_s=0.1, max_deliveries=2))
    await broker.producer("rollouts", 0).put("poison", b"x")
    for _ in range(2):
        await take(broker.consumer("rollouts", "reward"))
    assert await broker.consumer("rollouts", "reward").lease(wait_s=0.5) is None
    (dead,) = await broker.dead_letters()
    assert (dead.id, "lease ran out" in dead.error) == ("poison", True)


# --- liveness ---------------------------------------------------------------------------------------------


PULSED_S = 2.0  # long enough for a pulse that gets no core at once


async def test_the_pulse_extends_leases_while_the_event_loop_is_blocked(engine: Engine) -> None:
    broker = await engine.declare(edge(lease_s=PULSED_S))
    worker = await engine.connect()
    worker.start_pulse("trainer", lambda: b"busy", interval_s=PULSED_S / 10)
    await broker.producer("rollouts", 0).put("a", b"x")
    lease = await take(worker.consumer("rollouts", "reward"))
    time.sleep(1.5 * PULSED_S)  # noqa: ASYNC251  # the point: a step that computes and doesn't await
    assert await broker.consumer("rollouts", "reward").lease(wait_s=0.2 * PULSED_S) is None
    await lease.ack()


async def test_without_a_pulse_a_blocked_loop_loses_its_lease(engine: Engine) -> None:
    broker = await engine.declare(edge(lease_s=LEASE_S))
    worker = await engine.connect()
    await broker.producer("rollouts", 0).put("a", b"x")
    await take(worker.consumer("rollouts", "reward"))
    time.sleep(1.5 * LEASE_S)  # noqa: ASYNC251
    again = await take(broker.consumer("rollouts", "reward"), wait_s=PROMPT_S)
    assert again.deliveries == 2
    await again.ack()


async def test_heartbeats_carry_the_newest_state_and_their_age(engine: Engine) -> None:
    broker = await engine.declare(edge())
    count = iter(range(10_000))
    worker, early = await engine.connect(), await engine.connect()
    early.start_pulse("role/1.x", lambda: b"early", interval_s=0.05)
    await asyncio.sleep(0.15)
    worker.start_pulse("role/0", lambda: b"%d" % next(count), interval_s=0.05)
    await broker.beats()
    await asyncio.sleep(0.3)
    beats = await broker.beats()
    assert set(beats) == {"role/0", "role/1.x"}
    assert int(beats["role/0"].payload) >= 2
    assert beats["role/0"].age_s < 0.2
    await worker.close()
    await asyncio.sleep(0.3)
    beats = await broker.beats()
    assert 0.25 < beats["role/0"].age_s < 1.0
    assert beats["role/1.x"].age_s < 0.2


async def test_a_state_that_raises_leaves_out_the_beat_and_nothing_else(engine: Engine) -> None:
    broker = await engine.declare(edge(lease_s=LEASE_S))
    failures = iter([True, False])

    def state() -> bytes:
        if next(failures, False):
            raise RuntimeError("not ready")
        return b"ready"

    broker.start_pulse("role", state, interval_s=0.02)

    async def beaten() -> bool:
        return "role" in await broker.beats()

    assert await eventually(beaten, within_s=2)
    assert (await broker.beats())["role"].payload == b"ready"


async def test_evicting_a_replica_gives_back_what_it_held(engine: Engine) -> None:
    broker = await engine.declare(edge())
    dead = await engine.connect()
    for i in range(3):
        await broker.producer("rollouts", 0).put(f"m{i}", b"x")
    consumer = dead.consumer("rollouts", "reward")
    acked, *_ = [await take(consumer) for _ in range(3)]
    await acked.ack()
    dead.start_pulse("role/0", bytes, interval_s=0.02)
    await asyncio.sleep(0.2)
    await broker.evict("role/unknown")
    await broker.evict("role/0")
    mine = broker.consumer("rollouts", "reward")
    leases = [await take(mine, wait_s=PROMPT_S) for _ in range(2)]
    assert {(lease.id, lease.deliveries) for lease in leases} == {("m1", 2), ("m2", 2)}
    for lease in leases:
        await lease.ack()
    assert await mine.lease(wait_s=0.05) is None


async def test_evicting_a_replica_twice_leaves_alone_who_has_taken_its_work(engine: Engine) -> None:
    broker = await engine.declare(edge())
    dead = await engine.connect()
    await broker.producer("rollouts", 0).put("m0", b"x")
    await take(dead.consumer("rollouts", "reward"))
    dead.start_pulse("role/0", bytes, interval_s=0.02)
    await asyncio.sleep(0.2)
    await dead.close()
    await broker.evict("role/0")
    heir = await take((await engine.connect()).consumer("rollouts", "reward"), wait_s=PROMPT_S)
    await broker.evict("role/0")  # its next process died before its first heartbeat
    assert await broker.consumer("rollouts", "reward").lease(wait_s=0.3) is None
    await heir.ack()


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


async def cancelled(awaitable: asyncio.Future[object]) -> None:
    awaitable.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await awaitable


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


# --- logs -------------------------------------------------------------------------------------------------


async def read(broker: Broker, log: str, count: int, *, newest_only: bool = False) -> list[bytes]:
    entries = cast("AsyncGenerator[bytes]", broker.follow(log, newest_only=newest_only))
    async with asyncio.timeout(5):
        found = [await anext(entries) for _ in range(count)]
    await entries.aclose()
    return found


async def test_a_log_is_followed_from_its_start_and_as_it_grows(engine: Engine) -> None:
    broker = await engine.declare(logs=("ledger",))
    following = [asyncio.ensure_future(read(broker, "ledger", 300)) for _ in range(2)]
    for i in range(300):
        assert await broker.append("ledger", f"e{i}", b"%d" % i)
        if i == 150:
            following.append(asyncio.ensure_future(read(await engine.connect(), "ledger", 300)))
    for follower in following:
        assert await follower == [b"%d" % i for i in range(300)]


async def test_an_entry_with_a_known_id_is_appended_once(engine: Engine) -> None:
    broker = await engine.declare(logs=("ledger",))
    other = await engine.connect()
    assert await broker.append("ledger", "a", b"1")
    assert not await other.append("ledger", "a", b"2")
    assert await other.append("ledger", "b", b"3")
    assert await read(broker, "ledger", 2) == [b"1", b"3"]


async def test_following_the_newest_starts_at_the_last_entry(engine: Engine) -> None:
    broker = await engine.declare(logs=("weights",))
    early = asyncio.ensure_future(read(broker, "weights", 3, newest_only=True))
    await asyncio.sleep(0.05)
    for i in range(3):
        await broker.append("weights", f"v{i}", b"%d" % i)
    assert await early == [b"0", b"1", b"2"]
    assert await read(broker, "weights", 1, newest_only=True) == [b"2"]


async def test_a_cancelled_follower_does_not_disturb_the_next(engine: Engine) -> None:
    broker = await engine.declare(logs=("ledger",))
    await cancelled(cast("asyncio.Future[object]", asyncio.ensure_future(read(broker, "ledger", 1))))
    call = asyncio.ensure_future(read(broker, "ledger", 1))
    await asyncio.sleep(0.05)
    await cancelled(cast("asyncio.Future[object]", call))
    await broker.append("ledger", "a", b"1")
    assert await read(broker, "ledger", 1) == [b"1"]


async def test_a_log_that_is_not_declared_is_an_error(engine: Engine) -> None:
    broker = await engine.declare(logs=("ledger",))
    with pytest.raises(BrokerError, match="log ledgers isn't declared"):
        await broker.append("ledgers", "a", b"1")
    with pytest.raises(BrokerError, match="log ledgers isn't declared"):
        await read(broker, "ledgers", 1)
