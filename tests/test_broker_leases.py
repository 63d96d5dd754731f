"""The contract of `arriero.engine.broker`: leases, and the liveness of those who hold them."""

import asyncio
import time

from tests.brokers import LEASE_S, PROMPT_S, Engine, assert_depth, edge, eventually, take

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
