"""Runs a graph with all its roles in this process, each on a connection of its own, and reads what it left.

    prompts -> generator (xN) -> reward -> collect -> trainer -> (back to the generator)

The toy components misbehave as told; the trainer notes which token versions it sees before which update.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass as plain_dataclass
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.engine.broker import Broker, DeadLetter
from arriero.engine.graph import Evaluation, Graph, PerRecord
from arriero.engine.runtime import Ledger, current, run_role
from arriero.engine.runtime.journal import follow_ledger
from arriero.engine.stream import Stream
from arriero.launchers.hub import edges, logs
from arriero.schemas.graph import GraphSpec
from arriero.schemas.ledger import Admitted, DroppedEvent, Event, Trained
from arriero.schemas.messages import (
    Batch,
    Dropped,
    Outcome,
    Prompt,
    RolloutGroup,
    Score,
    ScoredGroup,
    Weights,
)
from arriero.schemas.run import RunOptions
from tests.brokers import Engine
from tests.toys import ToyCollect, rollout

# By run: (version about to be replaced, version of the oldest token, prompts) of every batch.
SEEN: defaultdict[str, list[tuple[int, int, tuple[int, ...]]]] = defaultdict(list)
ATTEMPTS: defaultdict[str, Counter[int]] = defaultdict(Counter)


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """`count` prompts, and `held_out` more for evaluation after every `every` versions."""

    count: PositiveInt = 100_000
    held_out: NonNegativeInt = 0
    every: NonNegativeInt = 0

    async def evaluation(self) -> Evaluation | None:
        prompts = [Prompt(id=f"held{k}", text="?", row=k) for k in range(self.held_out)]
        return Evaluation(prompts=prompts) if prompts else None

    def evaluates_every(self) -> int:
        return self.every

    async def run(self) -> AsyncIterator[Prompt]:
        for k in range(self.count):
            yield Prompt(id=f"p{k}", text="?", row=k)


@dataclass(frozen=True, kw_only=True)
class Shaky:
    """A generator that takes up to `most_s` for a prompt, or `slow_s` for every `slow_every`-th row.

    Every `drop_every`-th row is dropped. The version is that of the start: a slow group comes back old.
    `mixes`: a held-out prompt is sampled by the newest version, too.
    """

    most_s: NonNegativeFloat = 0.002
    slow_s: NonNegativeFloat = 0.0
    slow_every: NonNegativeInt = 0
    drop_every: NonNegativeInt = 0
    mixes: bool = False

    async def run(
        self, prompts: Stream[Prompt], weights: Stream[Weights]
    ) -> AsyncIterator[RolloutGroup | Dropped]:
        version = (await weights.next() or Weights(version=0)).version
        async for prompt in prompts:
            newer = weights.poll()
            while newer is None and version < prompt.min_version:
                newer = await weights.next()
            version = newer.version if newer else version
            slow = self.slow_every and prompt.row % self.slow_every == 1
            await asyncio.sleep(self.slow_s if slow else random.uniform(0, self.most_s))
            if self.drop_every and prompt.row % self.drop_every == 2 and prompt.split == "train":
                yield Dropped(parent=prompt.id, reason="too_long", detail="as told")
            else:
                by = prompt.min_version if prompt.split == "eval" else version
                yield RolloutGroup(
                    prompt=prompt, rollouts=(rollout(by), rollout(version if self.mixes else by))
                )


@dataclass(frozen=True, kw_only=True)
class Moody(PerRecord[RolloutGroup, ScoredGroup]):
    """Fails once on every `once`-th row, and always on every `always`-th."""

    once: NonNegativeInt = 0
    always: NonNegativeInt = 0

    async def apply(self, record: RolloutGroup) -> ScoredGroup:
        row, tries = record.prompt.row, ATTEMPTS[current().run_id]
        if record.prompt.split == "train":
            tries[row] += 1
            if self.once and row % self.once == 3 and tries[row] == 1:
                raise OSError(f"row {row} fails once")
            if self.always and row % self.always == 4:
                raise ValueError(f"row {row} always fails")
        score = Score(value=1.0, outcome=Outcome.OK)
        return ScoredGroup(group=record, scores=(score,) * len(record.rollouts))


@dataclass(frozen=True, kw_only=True)
class Noting:
    """A trainer: a step takes `seconds`; it notes what it trains on and drops every `skip`-th batch."""

    steps: PositiveInt = 8
    seconds: NonNegativeFloat = 0.0
    skip: NonNegativeInt = 0
    computes: ClassVar[bool] = True

    def limit(self) -> int | None:
        return self.steps

    async def run(self, batches: Stream[Batch]) -> AsyncIterator[Weights | Dropped]:
        version, taken = 0, 0
        yield Weights(version=0)
        async for batch in batches:
            taken += 1
            if self.skip and taken % self.skip == 0:
                yield Dropped(parent=batch.id, reason="invalid", detail="as told")
                continue
            await asyncio.sleep(self.seconds)
            oldest = batch.oldest_version
            assert oldest is not None
            SEEN[current().run_id].append((version, oldest, batch.origins))
            version += 1
            yield Weights(version=version)
            if version == self.steps:
                return


PROMPTS, SHAKY, MOODY, NOTING = Prompts(), Shaky(), Moody(), Noting()

Placed = Literal["apart", "scoring", "sampling", "training", "after"]
_ROLES: dict[Placed, dict[str, str]] = {
    "apart": {},
    "scoring": {"reward": "scoring", "collect": "scoring"},
    "sampling": {"generator": "sampling", "reward": "sampling"},
    "training": {"collect": "training", "trainer": "training"},
    "after": {"reward": "after", "collect": "after", "trainer": "after"},
}


def graph(
    *,
    staleness: int = 1,
    generators: int = 1,
    groups: int = 4,
    prompts: Prompts = PROMPTS,
    generator: Shaky = SHAKY,
    reward: Moody = MOODY,
    trainer: Noting = NOTING,
    placed: Placed = "apart",
    rest: bool = False,
) -> GraphSpec:
    """The graph of the module, checked; `placed`: which nodes share a process, `rest`: of `ToyCollect`."""
    roles = _ROLES[placed]
    rewards = generators if placed == "sampling" else 1
    g = Graph("shaky")
    weights = g.loop(Weights, staleness=staleness)
    asked = g.add(prompts, name="prompts")()
    sampler = g.add(generator, name="generator", replicas=generators, role=roles.get("generator", ""))
    scored = g.add(reward, name="reward", replicas=rewards, role=roles.get("reward", ""))(
        sampler(asked, weights)
    )
    gather = ToyCollect(groups=groups, rest=rest)
    collect = g.add(gather, name="collect", role=roles.get("collect", ""))
    weights.close(g.add(trainer, name="trainer", role=roles.get("trainer", ""))(collect(scored)))
    return g.check()


@plain_dataclass(kw_only=True)
class Played:
    """What a run left: its ledger, event by event, and the dead letters."""

    events: list[Event]
    dead: list[DeadLetter]

    @property
    def ledger(self) -> Ledger:
        ledger = Ledger()
        for event in self.events:
            ledger.apply(event)
        return ledger

    @property
    def most_in_flight(self) -> int:
        ledger, most = Ledger(), 0
        for event in self.events:
            ledger.apply(event)
            most = max(most, ledger.in_flight)
        return most

    def of(self, kind: type[Admitted] | type[Trained] | type[DroppedEvent]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]


def options(run_id: str, **more: float) -> RunOptions:
    """Waits of 10 s, so that what hangs fails; a heartbeat every 50 ms."""
    return RunOptions.model_validate({"run_id": run_id, "wait_bound_s": 10.0, "heartbeat_s": 0.05} | more)


async def declare(spec: GraphSpec, opts: RunOptions, engine: Engine) -> Broker:
    """Make the graph's edges and logs; a connection."""
    return await engine.declare(*edges(spec, opts), logs=tuple(logs(spec)))


async def replica(spec: GraphSpec, opts: RunOptions, engine: Engine, role: str, number: int = 0) -> None:
    """One role on a connection of its own."""
    broker = await engine.connect()
    try:
        await run_role(spec, opts, role=role, replica=number, run_dir=Path(), broker=broker)
    finally:
        await broker.close()


def start(spec: GraphSpec, opts: RunOptions, engine: Engine) -> dict[tuple[str, int], asyncio.Task[None]]:
    """All roles, as tasks by role and replica."""
    return {
        (role, k): asyncio.create_task(replica(spec, opts, engine, role, k))
        for role, nodes in spec.roles.items()
        for k in range(nodes[0].replicas)
    }


async def play(spec: GraphSpec, engine: Engine, opts: RunOptions | None = None) -> Played:
    """Run to the end; raises the first error of a role."""
    opts = opts or options(engine.run)
    owner = await declare(spec, opts, engine)
    tasks = start(spec, opts, engine)
    try:
        await asyncio.gather(*tasks.values())
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    return await read(owner)


async def read(broker: Broker) -> Played:
    """The ledger, until it says nothing new for 0.2 s, and the dead letters."""
    events: list[Event] = []
    arrived = asyncio.Event()

    async def follow() -> None:
        async for event in follow_ledger(broker):
            events.append(event)
            arrived.set()

    following = asyncio.create_task(follow())
    try:
        while True:
            arrived.clear()
            async with asyncio.timeout(0.2):
                await arrived.wait()
    except TimeoutError:
        pass
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    return Played(events=events, dead=await broker.dead_letters())


def check_books(played: Played, run: str, *, staleness: int, groups: int) -> Ledger:
    """What must hold whatever went wrong on the way; the ledger."""
    ledger = played.ledger
    assert ledger.admitted == ledger.trained + ledger.dropped.total()
    assert ledger.in_flight == 0
    assert not ledger.evaluating
    assert played.most_in_flight <= (staleness + 1) * groups
    assert ledger.staleness_max <= staleness
    seen = SEEN[run]
    assert all(0 <= version - oldest <= staleness for version, oldest, _ in seen)
    assert [version for version, _, _ in seen] == list(range(len(seen)))
    trained = [origin for _, _, origins in seen for origin in origins]
    assert len(trained) == len(set(trained)) == ledger.trained
    return ledger
