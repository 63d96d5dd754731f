"""The contract of `arriero.engine.broker`, kept by every broker: messages, capacity, logs.

Each test runs on all of them; leases and ends have files of their own.
"""

import asyncio
from collections.abc import AsyncGenerator
from itertools import chain
from typing import cast

import pytest

from arriero.engine.broker import Broker, BrokerError, EdgeEnded, Producer
from tests.brokers import PROMPT_S, Engine, assert_depth, cancelled, edge, eventually, take, take_all

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
    assert [await producer.knows(name) for name in "abc"] == [True, True, False]
    await (await take(consumer)).ack()
    assert await eventually(lambda: _offered(producer), within_s=1.0)
    assert [(await take(consumer)).id for _ in range(2)] == ["b", "c"]
    engine.leftovers = True


async def test_an_offer_stays_within_the_bytes_of_the_edge_wherever_they_lie(engine: Engine) -> None:
    broker = await engine.declare(edge(bytes=20_000))
    producer, consumer = broker.producer("rollouts", 0), broker.consumer("rollouts", "reward")
    assert [await producer.offer(name, bytes(9_000)) for name in "ab"] == [True, True]
    assert await producer.offer("c", bytes(9_000)) is None
    assert await producer.offer("b", bytes(9_000)) is False
    assert (await broker.depth("rollouts")).bytes <= 20_000
    assert [await producer.knows(name) for name in "abc"] == [True, True, False]
    for name in "ab":
        lease = await take(consumer)
        assert lease.id == name
        await lease.ack()
    assert await producer.offer("c", bytes(9_000))
    await (await take(consumer)).ack()


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


# --- the view ---------------------------------------------------------------------------------------------


async def test_who_watches_sees_the_newest_of_what_is_shown_and_nothing_is_kept(engine: Engine) -> None:
    broker, other = await engine.connect(), await engine.connect()
    await broker.show(b"to nobody")
    watching = cast("AsyncGenerator[bytes, None]", other.watch())
    first = asyncio.ensure_future(anext(watching))
    while not first.done():
        await broker.show(b"first")
        await asyncio.sleep(0.005)
    assert first.result() == b"first"
    await broker.show(b"last")  # of what came while nobody asked, the newest
    async with asyncio.timeout(5):
        while await anext(watching) != b"last":
            pass
    await watching.aclose()
