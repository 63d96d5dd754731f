"""Prompts that pass from one replica of a node to another: none lost, none trained twice, an end for all.

The toy generator works in segments of one token; whoever takes a continuation goes on with it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic.dataclasses import dataclass

from arriero.engine.backlog import NO_BACKLOG, Backlog
from arriero.engine.broker import Broker, EdgeDecl
from arriero.engine.codec import encode
from arriero.engine.errors import GraphError
from arriero.engine.graph import Graph
from arriero.engine.memory_edge import MemoryLease
from arriero.engine.picture import mermaid, svg, table
from arriero.engine.runtime.inputs import EdgeSource
from arriero.engine.runtime.waits import NodeClock
from arriero.engine.stream import Stream
from arriero.launchers.hub import edges, logs
from arriero.schemas.continuations import Continuation
from arriero.schemas.graph import Capacity, GraphSpec
from arriero.schemas.messages import Prompt, RolloutGroup, Weights
from arriero.schemas.run import RunOptions
from tests.brokers import Engine
from tests.runtime_runs import (
    Moody,
    Noting,
    Prompts,
    check_books,
    options,
    play,
    read,
    replica,
    start,
)
from tests.segments import EIGHT, SEGMENTED, WORKERS, Segmented, graph
from tests.toys import ToyCollect


@pytest.mark.parametrize("replicas", [1, 3])
async def test_every_prompt_is_trained_or_dropped_once_over_any_number_of_segments(
    engine: Engine, replicas: int
) -> None:
    spec = graph(
        Segmented(most=5, seconds=0.002, replicas=replicas, drop_every=7), prompts=Prompts(held_out=3)
    )
    async with asyncio.timeout(30):
        played = await play(spec, engine)
    ledger = check_books(played, engine.run, staleness=1, groups=4)
    assert ledger.trained == 32
    work = WORKERS[engine.run]
    assert all(len(work[f"p{k}"]) == k % 5 + 1 for k in range(32) if k % 7 != 2)
    if replicas > 1:
        assert any(len(set(workers)) > 1 for workers in work.values())


async def test_prompts_wait_for_nobody_when_the_backlog_has_no_room(engine: Engine) -> None:
    """Every replica goes on with what the edge refuses; nothing waits in a circle."""
    spec, opts = graph(Segmented(most=4, replicas=2)), options(engine.run)
    owner = await declare_with(spec, opts, engine, room=1)
    async with asyncio.timeout(30):
        await asyncio.gather(*start(spec, opts, engine).values())
    assert check_books(await read(owner), engine.run, staleness=1, groups=4).trained == 32


async def declare_with(spec: GraphSpec, opts: RunOptions, engine: Engine, *, room: int) -> Broker:
    """As `declare`, with room for so many continuations."""
    decls = [
        replace(e, capacity=Capacity(messages=room)) if e.name == "generator-backlog" else e
        for e in edges(spec, opts)
    ]
    return await engine.declare(*decls, logs=tuple(logs(spec)))


async def test_tail_replicas_take_what_others_put_back_and_no_prompts(engine: Engine) -> None:
    spec = graph(Segmented(most=4, replicas=3, tail=1, seconds=0.002))
    async with asyncio.timeout(30):
        played = await play(spec, engine)
    assert check_books(played, engine.run, staleness=1, groups=4).trained == 32
    first = {workers[0] for workers in WORKERS[engine.run].values()}
    assert first <= {0, 1}
    assert any(2 in workers[1:] for workers in WORKERS[engine.run].values())


@given(
    replicas=st.integers(1, 3),
    most=st.integers(1, 5),
    room=st.integers(1, 12),
    drop_every=st.sampled_from([0, 5]),
    leaves=st.lists(st.tuples(st.integers(0, 2), st.floats(0.0, 0.04)), max_size=6),
)
@settings(max_examples=30)
def test_replicas_may_leave_and_come_back_at_any_moment(
    replicas: int, most: int, room: int, drop_every: int, leaves: list[tuple[int, float]]
) -> None:
    run = f"random{len(WORKERS)}-{random.random()}"
    WORKERS[run].clear()
    generator = Segmented(most=most, seconds=0.001, drop_every=drop_every, replicas=replicas)
    spec = graph(generator, trainer=Noting(steps=5))

    async def played() -> None:
        engine = Engine("memory", run)
        opts = options(run, max_deliveries=20)
        owner = await declare_with(spec, opts, engine, room=room)
        tasks = start(spec, opts, engine)
        for k, after_s in leaves:
            await asyncio.sleep(after_s)
            key = ("generator", k % replicas)
            if not tasks[key].done():
                tasks[key].cancel()
                await asyncio.gather(tasks[key], return_exceptions=True)
                tasks[key] = asyncio.create_task(replica(spec, opts, engine, *key))
        async with asyncio.timeout(20):
            await asyncio.gather(*tasks.values())
        ledger = check_books(await read(owner), run, staleness=1, groups=4)
        assert ledger.trained == 20
        assert set(ledger.dropped) <= {"invalid", "stale"}
        await engine.assert_empty()
        await engine.close()

    with pytest.MonkeyPatch.context() as patch:
        # So that a replica also leaves between a continuation and the acknowledgement of what it replaces.
        patch.setattr(MemoryLease, "ack", _late_ack)
        asyncio.run(played())


_ack = MemoryLease.ack


async def _late_ack(lease: MemoryLease) -> None:
    await asyncio.sleep(random.choice((0.0, 0.004)))
    await _ack(lease)


def test_an_edge_of_its_own_shows_in_table_picture_and_json_and_changes_the_digest() -> None:
    spec = graph()
    (row,) = [row for row in table(spec) if row[0] == "generator"]
    assert row[1] == "1 Prompt, 1 Weights or 1 Continuation"
    assert row[2] == "1 RolloutGroup or 1 Continuation"
    assert "a Continuation (32 records; it never waits for room)" in row[3]
    assert "generator" in row[4].split(", ")
    assert "n_generator -->|Continuation| n_generator" in mermaid(spec)
    assert ">Continuation</text>" in svg(spec)
    assert Graph.from_spec(GraphSpec.model_validate_json(spec.model_dump_json())).check() == spec
    without = spec.model_copy(
        update={"nodes": tuple(n.model_copy(update={"puts_back": 0}) for n in spec.nodes)}
    )
    assert without.digest != spec.digest


@dataclass(frozen=True, kw_only=True)
class Forgetful:
    """Means to put back, and has nothing to do it with."""

    def puts_back(self) -> int:
        return 100

    async def run(self, prompts: Stream[Prompt]) -> AsyncIterator[Prompt]:
        async for prompt in prompts:
            yield prompt


@dataclass(frozen=True, kw_only=True)
class OfGroups(Forgetful):
    """Puts back what it takes, which are no prompts."""

    async def run(  # type: ignore[override]  # another port
        self, groups: Stream[RolloutGroup], backlog: Backlog = NO_BACKLOG
    ) -> AsyncIterator[RolloutGroup]:
        async for group in groups:
            yield group


def test_check_refuses_nodes_that_cant_put_back() -> None:
    g = Graph("forgetful")
    g.add(Forgetful(), name="sink")(g.add(Prompts(), name="prompts")())
    with pytest.raises(GraphError, match=r"give Forgetful\.run a parameter backlog: Backlog = NO_BACKLOG"):
        g.check()
    g = Graph("groups")
    weights = g.loop(Weights, staleness=1)
    groups = g.add(SEGMENTED, name="generator")(g.add(Prompts(), name="prompts")(), weights)
    kept: Any = g.add(OfGroups(), name="filter")
    scored = g.add(Moody(), name="reward")(kept(groups))
    weights.close(g.add(EIGHT, name="trainer")(g.add(ToyCollect(groups=4), name="collect")(scored)))
    with pytest.raises(
        GraphError, match="filter: it takes 1 of generator; a node that puts back takes prompts"
    ):
        g.check()


async def test_what_comes_while_it_is_put_elsewhere_waits_and_the_holder_still_holds_it(
    engine: Engine,
) -> None:
    decl = EdgeDecl(name="own", groups=("own",), capacity=Capacity(messages=9), lease_s=20.0)
    broker = await engine.declare(decl)
    producer = broker.producer("own", 0)
    prompt = Prompt(id="p-0", text="")
    first = Continuation(prompt=prompt).moved("node", hop=1, losses=0)
    await producer.put(first.id, encode(first))
    source: EdgeSource[Continuation] = EdgeSource(
        broker.consumer("own", "own"), Continuation, name="a continuation",
        clock=NodeClock("node", bound_s=20),
        accept=lambda _, arrived: arrived, poisoned=unexpected, again=unexpected, want=2, max_deliveries=3,
        key=lambda continuation: continuation.prompt.id,
    )  # fmt: skip
    held = await source.next()
    assert held is not None
    with source.moving("p-0"):
        second = held.moved("node", hop=2, losses=0)
        await producer.put(second.id, encode(second))
        await producer.end()
        emptied = asyncio.create_task(source.emptied())
        coming = asyncio.create_task(source.next())
        _, waiting = await asyncio.wait([emptied, coming], timeout=0.5)
        assert waiting == {emptied, coming}
        assert source.taken["p-0"][1].id == first.id
    lease = source.taken["p-0"][0]
    source.answer("p-0")
    back = await asyncio.wait_for(coming, 5)
    assert back is not None
    assert back.id == second.id
    await lease.ack()
    await source.taken["p-0"][0].ack()
    source.answer("p-0")
    await asyncio.wait_for(emptied, 10)
    await source.close()


def unexpected(*arguments: object) -> Any:
    raise AssertionError(f"nothing is poisoned or comes twice here: {arguments}")


async def test_a_backlog_works_only_in_a_run() -> None:
    with pytest.raises(RuntimeError, match=r"only inside run\(\) of a component that puts_back\(\)"):
        NO_BACKLOG.poll()
