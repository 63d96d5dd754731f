"""The simulator against the runtime: the same graphs in the runtime's own code, with sleeping components."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from pydantic.dataclasses import dataclass

from arriero.engine.graph import Graph, PerRecord
from arriero.engine.planner.scenario import Scenario
from arriero.engine.planner.simulation import simulate
from arriero.engine.planner.times import Duration, Fixed, Recorded
from arriero.engine.stream import Stream
from arriero.launchers.launch import inline
from arriero.launchers.options import LaunchOptions
from arriero.launchers.rundir import create
from arriero.schemas.graph import Capacity, GraphSpec
from arriero.schemas.messages import Prompt, RolloutGroup, ScoredGroup, Weights
from arriero.schemas.run import RunOptions
from tests.toys import ToyCollect, ToyPrompts, ToyReward, ToyTrainer, rollout
from tests.virtual_time import run_in_virtual_time

slept: dict[int, float] = {}  # what a SleepingGenerator took for each prompt: a busy machine wakes it late


@dataclass(frozen=True, kw_only=True)
class SleepingGenerator:
    """Sleeps `seconds[k]` for prompt k, over and over."""

    seconds: tuple[float, ...]

    async def run(self, prompts: Stream[Prompt], weights: Stream[Weights]) -> AsyncIterator[RolloutGroup]:
        newest = await weights.next()
        async for prompt in prompts:
            while newest is not None and newest.version < prompt.min_version:
                newest = await weights.next()
            newest = weights.poll() or newest
            assert newest is not None
            began = time.monotonic()
            await asyncio.sleep(self.seconds[prompt.row % len(self.seconds)])
            slept[prompt.row] = time.monotonic() - began
            yield RolloutGroup(prompt=prompt, rollouts=(rollout(newest.version), rollout(newest.version)))


def cross_graph(
    seconds: tuple[float, ...], *, staleness: int, groups: int, generators: int, steps: int, train: float
) -> GraphSpec:
    g = Graph("cross")
    weights = g.loop(Weights, staleness=staleness)
    asked = g.add(ToyPrompts(), name="prompts")()
    rollouts = g.add(SleepingGenerator(seconds=seconds), name="generator", replicas=generators)(
        asked, weights
    )
    scored = g.add(ToyReward(), name="reward")(rollouts)
    batches = g.add(ToyCollect(groups=groups), name="collect")(scored)
    weights.close(g.add(ToyTrainer(steps=steps, seconds=train), name="trainer")(batches))
    return g.check()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("generators", [1, 3, 10])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_real_runtime_makes_every_version_at_the_simulated_moment(
    staleness: int, generators: int, seed: int, tmp_path: Path
) -> None:
    """Emulated components that sleep, in the runtime's own code, with the clock of its event loop virtual."""
    seconds = tuple(float(x) for x in np.random.default_rng(seed).lognormal(-1, 0.8, 37))
    spec = cross_graph(seconds, staleness=staleness, groups=8, generators=generators, steps=10, train=0.9)
    made = run_in_virtual_time(spec, tmp_path)
    generate = Recorded(seconds=seconds, in_order=True)
    trace = simulate(spec, Scenario(times={"generator": generate, "trainer": Fixed(0.9)}, steps=10))
    assert [m.metrics["at"] for m in made] == pytest.approx(trace.versions_s, rel=1e-3)
    assert fmean(m.staleness_mean for m in made) == pytest.approx(trace.staleness_mean)
    assert max(m.staleness_max for m in made) == max(trace.staleness)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_the_real_runtime_takes_the_simulated_time_on_this_machine(staleness: int, tmp_path: Path) -> None:
    """The same in real time: within 5 % of the simulation from the times that the components took."""
    slept.clear()
    uneven = (2.32, 1.4, 2.0, 2.84, 2.52, 2.6)
    spec = cross_graph(uneven, staleness=staleness, groups=6, generators=3, steps=5, train=2.0)
    run = create(tmp_path / "run")
    assert inline(spec, RunOptions(run_id="cross"), run, LaunchOptions(quiet=True)) == 0
    at = [json.loads(line)["time"] for line in run.metrics.read_text().splitlines()]
    generate = Recorded(seconds=tuple(slept[k] for k in sorted(slept)), in_order=True)
    trace = simulate(spec, Scenario(times={"generator": generate, "trainer": Fixed(2.0)}, steps=5))
    assert fmean(b - a for a, b in pairwise(at)) == pytest.approx(fmean(trace.steps_s()[1:]), rel=0.05)


@dataclass(frozen=True, kw_only=True)
class SleepingReward(PerRecord[RolloutGroup, ScoredGroup]):
    """Scores a group in `seconds`."""

    seconds: float

    async def apply(self, record: RolloutGroup) -> ScoredGroup:
        await asyncio.sleep(self.seconds)
        return ToyReward().apply(record)


@dataclass(frozen=True, kw_only=True)
class Join:
    """One group of each of two scored streams, the first one's scores."""

    async def run(self, left: Stream[ScoredGroup], right: Stream[ScoredGroup]) -> AsyncIterator[ScoredGroup]:
        async for mine in left:
            other = await right.next()
            assert other is not None
            yield mine.model_copy(update={"parents": (mine.id, other.id)})


@pytest.mark.parametrize("places", [1, 4])
@pytest.mark.parametrize("staleness", [0, 2])
def test_branches_that_meet_again_and_full_edges_are_simulated_as_they_run(
    staleness: int, places: int, tmp_path: Path
) -> None:
    """Both rewards get every group; the slower one holds the faster one's edge, and the generator's."""
    seconds = tuple(float(x) for x in np.random.default_rng(5).lognormal(-1, 0.6, 31))
    g = Graph("branches")
    weights = g.loop(Weights, staleness=staleness)
    asked = g.add(ToyPrompts(), name="prompts", capacity=Capacity(messages=places))()
    narrow = Capacity(messages=places)
    made = g.add(SleepingGenerator(seconds=seconds), name="generator", capacity=narrow)(asked, weights)
    left = g.add(SleepingReward(seconds=0.3), name="quick", capacity=narrow)(made)
    right = g.add(SleepingReward(seconds=0.55), name="slow", capacity=narrow)(made)
    scored = g.add(Join(), name="join")(left, right)
    batches = g.add(ToyCollect(groups=4), name="collect")(scored)
    weights.close(g.add(ToyTrainer(steps=8, seconds=0.7), name="trainer")(batches))
    spec = g.check()
    versions = run_in_virtual_time(spec, tmp_path)
    times: dict[str, Duration] = {
        "generator": Recorded(seconds=seconds, in_order=True), "quick": Fixed(0.3), "slow": Fixed(0.55),
        "trainer": Fixed(0.7),
    }  # fmt: skip
    trace = simulate(spec, Scenario(times=times, steps=8))
    assert [m.metrics["at"] for m in versions] == pytest.approx(trace.versions_s, rel=1e-3)
