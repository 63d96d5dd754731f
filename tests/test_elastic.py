"""Replicas that join and leave, as tasks of one process: nothing lost, nothing twice, an end for all."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from arriero.engine.backlog import node_of
from arriero.engine.broker import Broker
from arriero.engine.elastic import check_role, check_scaled, elastic_roles
from arriero.engine.errors import UserError
from arriero.engine.memory import MemoryBroker
from arriero.engine.runtime.journal import announce
from arriero.launchers.crew import RemoteCrew
from arriero.launchers.guests import Guests
from arriero.launchers.hub import edges, logs
from arriero.launchers.launch import inline
from arriero.launchers.options import LaunchOptions
from arriero.launchers.roster import Roster
from arriero.launchers.rundir import create, write_json
from arriero.launchers.scaling import Scaling
from arriero.launchers.supervise import Supervisor
from arriero.schemas.crew import CREW_LOG, ORDERS_LOG, Asks, Leaving, Welcome
from arriero.schemas.graph import GraphSpec
from arriero.schemas.ledger import CONTROL, CONTROL_LOG, Joined, Leave
from arriero.schemas.run import RunOptions
from tests.brokers import Engine
from tests.runtime_runs import Noting, Prompts, check_books, declare, options, read, replica, start
from tests.segments import WORKERS, Segmented, graph
from tests.toys import ToyTrainer, toy_graph

ROOT = Path(__file__).parents[1]
T = TypeVar("T")


class Coming:
    """Roles as tasks, more of which join and leave."""

    def __init__(self, spec: GraphSpec, opts: RunOptions, engine: Engine, owner: Broker) -> None:
        self.spec, self.opts, self.engine, self.owner = spec, opts, engine, owner
        self.roster = Roster(spec)
        self.tasks = start(spec, opts, engine)

    async def join(self, role: str) -> None:
        (number,) = self.roster.join(role, 1)
        await announce(self.owner, Joined(role=role, replicas=(number,)))
        own = replica(self.spec, self.opts, self.engine, role, number)
        self.tasks[role, number] = asyncio.create_task(own)

    async def leave(self, role: str) -> None:
        *_, last = self.roster.staying(role)
        self.roster.leave(role, [last])
        await announce(self.owner, Leave(role=role, replica=last))

    async def end(self) -> None:
        """When the source has ended nobody joins any more, as in a run."""
        await self.tasks["prompts", 0]
        for edge in edges(self.spec, self.opts):
            if edge.open:
                of = self.roster.of(self.spec.node(node_of(edge.name)).role)
                await self.owner.seal(edge.name, len(of))
        await asyncio.gather(*self.tasks.values())


async def test_replicas_that_join_and_leave_cost_no_prompt_and_take_none_twice(engine: Engine) -> None:
    spec = graph(Segmented(most=4, seconds=0.01), trainer=Noting(steps=30), prompts=Prompts(held_out=3))
    opts = options(engine.run, elastic=True, max_deliveries=20)
    run = Coming(spec, opts, engine, await declare(spec, opts, engine))
    draw = random.Random(engine.kind)
    try:
        async with asyncio.timeout(60):
            for _ in range(12):
                await asyncio.sleep(draw.uniform(0.0, 0.1))
                role = draw.choice(["generator", "generator", "reward"])
                can_leave = len(run.roster.staying(role)) > 1
                await (run.leave if can_leave and draw.random() < 0.5 else run.join)(role)
            await run.end()
    finally:
        for task in run.tasks.values():
            task.cancel()
        await asyncio.gather(*run.tasks.values(), return_exceptions=True)
    assert len(run.roster.of("generator")) > 2
    played = await read(run.owner)
    ledger = check_books(played, engine.run, staleness=1, groups=4)
    assert ledger.trained == 30 * 4
    assert played.dead == []
    assert {k for workers in WORKERS[engine.run].values() for k in workers} > {0}


async def test_who_leaves_answers_what_it_has_and_ends_while_the_others_go_on(engine: Engine) -> None:
    spec = graph(Segmented(most=2, seconds=0.01, replicas=2), trainer=Noting(steps=40))
    opts = options(engine.run, elastic=True)
    run = Coming(spec, opts, engine, await declare(spec, opts, engine))
    async with asyncio.timeout(60):
        while 1 not in {k for workers in WORKERS[engine.run].values() for k in workers}:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await run.leave("generator")
        await run.tasks["generator", 1]
        assert not run.tasks["generator", 0].done()
        await run.end()
    played = await read(run.owner)
    assert {*check_books(played, engine.run, staleness=1, groups=4).dropped} <= {"stale"}
    assert played.dead == []


def test_a_number_is_given_once_and_those_that_came_last_leave_first() -> None:
    roster = Roster(toy_graph(generators=2).check())
    assert roster.join("generator", 2) == (2, 3)
    roster.leave("generator", [3])
    assert roster.join("generator", 1) == (4,)
    assert roster.staying("generator") == [0, 1, 2, 4]
    assert list(roster.of("generator")) == [0, 1, 2, 3, 4]
    assert roster.leaves("generator", 3)


def test_what_may_have_several_replicas_may_be_scaled_and_nothing_else() -> None:
    spec = toy_graph(ranks=2).check()
    assert elastic_roles(spec) == {"generator", "reward"}
    for role, why in {
        "prompts": "a source has one replica",
        "collect": "gathers several records",
        "trainer": "2 ranks",
    }.items():
        with pytest.raises(UserError, match=why):
            check_role(spec, role)
    check_scaled(spec, "generator", 60)


def test_an_inline_run_has_only_edges_that_nobody_joins(tmp_path: Path) -> None:
    spec = toy_graph(trainer=ToyTrainer(steps=2)).check()
    opts = RunOptions(run_id="closed")
    assert not any(e.open for e in edges(spec, opts))
    run = create(tmp_path / "run")
    write_json(run.graph, spec)
    assert inline(spec, opts, run, LaunchOptions(quiet=True)) == 0


async def test_a_later_submission_is_given_a_number_or_told_why_not_and_may_leave() -> None:
    spec, opts = toy_graph().check(), RunOptions(run_id="guests", elastic=True)
    broker = MemoryBroker()
    await broker.declare(edges(spec, opts), [*logs(spec), CREW_LOG, ORDERS_LOG])
    crew = RemoteCrew(spec, broker, {}, "the log of {}")
    supervisor = Supervisor(spec, opts, crew.processes, start=crew.restart)
    scaling = Scaling(spec, opts, supervisor)
    Guests(crew, scaling, supervisor)
    supervisor.watch(crew.follow())
    scaling.start(broker)
    said: list[Asks | Leaving] = []
    said += [Asks(role=role, life=role, host="n7") for role in ("trainer", "generator")]
    said += [Leaving(name="generator-1", life="another"), Leaving(name="generator-1", life="generator")]
    for k, message in enumerate(said):
        await broker.append(CREW_LOG, str(k), message.model_dump_json().encode())
        await asyncio.sleep(0.05)
    orders = {o.life: o async for o in first(2, broker.follow(ORDERS_LOG), Welcome.model_validate_json)}
    assert "it closes a loop, so it has one replica" in orders["trainer"].why
    assert (orders["generator"].replica, orders["generator"].why) == (1, "")
    control = [c async for c in first(2, broker.follow(CONTROL_LOG), CONTROL.validate_json)]
    assert control == [Joined(role="generator", replicas=(1,)), Leave(role="generator", replica=1)]
    assert [m.name for m in crew.processes if m.guest] == ["generator-1"]
    assert not supervisor.failed
    await supervisor.close()


async def first(count: int, entries: AsyncIterator[bytes], read: Callable[[bytes], T]) -> AsyncIterator[T]:
    """The first so many entries of a log; it fails if they don't come."""
    async with asyncio.timeout(5):
        for _ in range(count):
            yield read(await anext(entries))
