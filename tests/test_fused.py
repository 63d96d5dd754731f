"""Edges between nodes of one role stay in its process; what enters it is answered for at its exit."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref

import pytest

from arriero.engine import memory_edge
from arriero.engine.codec import decode, encode
from arriero.engine.errors import GraphError
from arriero.engine.fused import fused, fused_edges
from arriero.engine.graph import Graph
from arriero.engine.memory import MemoryBroker
from arriero.engine.picture import table
from arriero.engine.rates import fusible
from arriero.engine.runtime.journal import record
from arriero.launchers.hub import edges
from arriero.schemas.graph import Capacity, GraphSpec
from arriero.schemas.ledger import DroppedEvent
from arriero.schemas.messages import Batch, Outcome, Prompt, RolloutGroup, Score, ScoredGroup, Weights
from tests.brokers import Engine, assert_depth, edge, take
from tests.runtime_runs import (
    SEEN,
    Moody,
    Noting,
    Placed,
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
from tests.toys import ToyCollect, rollout


@pytest.mark.parametrize(
    ("placed", "inside"),
    [
        ("apart", set[str]()),
        ("scoring", {"reward"}),
        ("sampling", {"generator"}),
        ("training", {"collect"}),
        ("after", {"reward", "collect"}),
    ],
)
def test_an_edge_stays_in_the_process_when_all_its_readers_are_there(
    placed: Placed, inside: set[str]
) -> None:
    spec, opts = graph(placed=placed), options("run")
    assert fused_edges(spec, opts) == inside
    assert {e.name for e in edges(spec, opts)} == {"prompts", "generator", "reward", "collect"} - inside


def test_the_table_says_which_edges_stay_in_their_process() -> None:
    waits = {row[0]: row[3] for row in table(graph(placed="scoring"))}
    assert waits["reward"] == "1 of generator; room on its edge (16 records, in its process)"
    assert waits["collect"] == "4 of reward; room on its edge (16 records)"


def test_what_a_source_gives_and_what_the_record_takes_is_durable_wherever_its_readers_are() -> None:
    g = Graph("together")
    weights = g.loop(Weights, staleness=1)
    rollouts = g.add(Shaky(), name="generator", role="all")(
        g.add(Prompts(), name="prompts", role="all")(), weights
    )
    scored = g.add(Moody(), name="reward", role="all")(rollouts)
    weights.close(
        g.add(Noting(), name="trainer", role="all")(g.add(ToyCollect(), name="collect", role="all")(scored))
    )
    spec = g.check()
    assert fusible(spec) == {"generator", "reward", "collect"}
    assert fused_edges(spec, options("run").model_copy(update={"record": True})) == {"generator"}


@pytest.mark.parametrize("placed", ["scoring", "sampling", "training", "after"])
async def test_what_never_filled_a_batch_is_answered_for_at_the_end(engine: Engine, placed: Placed) -> None:
    """10 prompts, batches of 4: the last 2 wait for the end of the stream, which waits for none of them."""
    spec = graph(prompts=Prompts(count=10), trainer=Noting(steps=5), placed=placed, rest=True)
    async with asyncio.timeout(20):
        played = await play(spec, engine)
    assert played.ledger.trained == 10
    assert [len(origins) for _, _, origins in SEEN[engine.run]] == [4, 4, 2]


@pytest.mark.parametrize("placed", ["apart", "scoring"])
async def test_what_was_dropped_before_its_process_died_goes_no_further(
    engine: Engine, placed: Placed
) -> None:
    """The ledger has the drop, the broker not yet its acknowledgement: the record comes again, made anew."""
    spec, opts = graph(placed=placed), options(engine.run)
    owner = await declare(spec, opts, engine)
    scored = ScoredGroup(group=sampled_group(0), scores=(Score(value=1.0, outcome=Outcome.OK),) * 2)
    scored = scored.stamped(id="p0>generator>reward", parents=("p0>generator",), origins=(0,))
    await record(owner, DroppedEvent(node="collect", parent=scored.id, origins=(0,), reason="stale"))
    for edge_name, group, lost in (
        ("generator", "reward-records", sampled_group(0)), ("reward", "collect-scored", scored)
    ):  # fmt: skip
        if (edge_name == "generator") == (placed == "scoring"):
            await owner.producer(edge_name, 0).put(lost.id, encode(lost))
            dead = await engine.connect()
            await (await take(dead.consumer(edge_name, group))).nack()
            await dead.close()
    roles = ("scoring",) if placed == "scoring" else ("reward", "collect")
    tasks = [asyncio.create_task(replica(spec, opts, engine, role)) for role in roles]
    try:
        for k in range(1, 5):
            await owner.producer("generator", 0).put(f"p{k}>generator", encode(sampled_group(k)))
        lease = await take(owner.consumer("collect", "trainer-batches"))
        assert decode(lease.payload, Batch).origins == (1, 2, 3, 4)
        await lease.ack()
        await assert_depth(owner, "generator", 0)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_what_is_acknowledged_is_let_go_however_long_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_edge, "_REMEMBERED", 4)
    broker = MemoryBroker(durable=False)
    await broker.declare([edge("a", groups=("b",), lease_s=1e8)], [])
    producer, consumer = broker.producer("a", 0), broker.consumer("a", "b")
    for k in range(10):
        await producer.put(f"r{k}", b"payload")
        lease = await take(consumer)
        held = weakref.ref(lease)
        await lease.ack()
        del lease
        gc.collect()
        assert held() is None
    assert await producer.put("r9", b"payload") is False
    assert await producer.put("r5", b"payload") is True  # forgotten by now: 4 were remembered
    await (await take(consumer)).ack()
    await broker.close()


async def test_the_lease_upstream_is_acknowledged_when_the_output_downstream_is_durable(
    engine: Engine,
) -> None:
    """With a batch of 4 in the same role, 3 groups stay leased upstream; the fourth releases all."""
    spec, opts = graph(placed="scoring"), options(engine.run)
    owner = await declare(spec, opts, engine)
    task = asyncio.create_task(replica(spec, opts, engine, "scoring"))
    try:
        sampled = owner.producer("generator", 0)
        for k in range(3):
            await sampled.put(f"p{k}>generator", encode(sampled_group(k)))
        await asyncio.sleep(0.2)
        assert (await owner.depth("generator")).leased == {"reward-records": 3}
        await sampled.put("p3>generator", encode(sampled_group(3)))
        lease = await take(owner.consumer("collect", "trainer-batches"))
        assert decode(lease.payload, Batch).origins == (0, 1, 2, 3)
        await lease.ack()
        await assert_depth(owner, "generator", 0)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def sampled_group(k: int) -> RolloutGroup:
    prompt = Prompt(id=f"p{k}", text="?", row=k, origins=(k,))
    group = RolloutGroup(prompt=prompt, rollouts=(rollout(0), rollout(0)))
    return group.stamped(id=f"p{k}>generator", parents=(f"p{k}",), origins=(k,))


@pytest.mark.parametrize("seed", range(3))
async def test_a_process_of_several_nodes_that_dies_is_one_lease_given_back(
    engine: Engine, seed: int
) -> None:
    """Generator and reward in one role, cut off at random moments: each prompt is trained once."""
    chance = random.Random(seed)
    spec = graph(
        generators=2, generator=Shaky(most_s=0.004), trainer=Noting(steps=6, seconds=0.003), placed="sampling"
    )
    opts = options(engine.run, max_deliveries=20)
    owner = await declare(spec, opts, engine)
    tasks = start(spec, opts, engine)
    for _ in range(6):
        await asyncio.sleep(chance.uniform(0.0, 0.03))
        key = ("sampling", chance.randrange(2))
        if not tasks[key].done():
            tasks[key].cancel()
            await asyncio.gather(tasks[key], return_exceptions=True)
            tasks[key] = asyncio.create_task(replica(spec, opts, engine, *key))
    async with asyncio.timeout(20):
        await asyncio.gather(*tasks.values())
    ledger = check_books(await read(owner), engine.run, staleness=1, groups=4)
    assert ledger.trained == 24
    assert set(ledger.dropped) <= {"stale"}
    assert len(SEEN[engine.run]) == 6


async def test_a_record_that_always_fails_is_dropped_and_its_prompt_given_back(engine: Engine) -> None:
    spec = graph(reward=Moody(once=5, always=7), trainer=Noting(steps=4), placed="scoring")
    opts = options(engine.run, max_dead_letters=1000)
    ledger = check_books(await play(spec, engine, opts), engine.run, staleness=1, groups=4)
    assert ledger.trained == 16
    assert ledger.dropped["dead_letter"] >= 1


def narrow(room: int, *, together: bool) -> GraphSpec:
    """prompts -> reward -> collect of 4 -> trainer; `room` records on the edge before the reward."""
    g = Graph("narrow")
    weights = g.loop(Weights, staleness=1)
    prompts = g.add(Prompts(), name="prompts")()
    rollouts = g.add(Shaky(), name="generator", capacity=Capacity(messages=room))(prompts, weights)
    role = "scoring" if together else ""
    scored = g.add(Moody(), name="reward", role=role)(rollouts)
    weights.close(
        g.add(Noting(), name="trainer")(g.add(ToyCollect(groups=4), name="collect", role=role)(scored))
    )
    return g.check()


def test_the_edge_before_a_process_holds_what_is_gathered_inside() -> None:
    """Apart, one record at a time passes; together, the 4 of a batch wait for their answer at once."""
    narrow(1, together=False)
    narrow(4, together=True)
    with pytest.raises(GraphError, match=r"deadlock: .*generator waits for room on its output"):
        narrow(3, together=True)


async def test_an_edge_in_memory_is_of_one_process_and_others_are_reached_as_before(engine: Engine) -> None:
    spec, opts = graph(placed="scoring"), options(engine.run)
    outside = await declare(spec, opts, engine)
    inside = await fused(outside, spec, opts, "scoring")
    assert await fused(outside, spec, opts, "trainer") is outside
    producer = inside.producer("reward", 0)
    assert not producer.durable
    assert inside.producer("collect", 0).durable
    await producer.put("a", b"payload")
    lease = await take(inside.consumer("reward", "collect-scored"))
    waiting = asyncio.create_task(producer.settled("a"))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    assert (await inside.depth("reward")).leased == {"collect-scored": 1}
    await lease.ack()
    await asyncio.wait_for(waiting, 1.0)
    assert (await inside.depth("reward")).messages == 0
    with pytest.raises(Exception, match="reward: in memory already"):
        await inside.declare([edge("reward")], [])
