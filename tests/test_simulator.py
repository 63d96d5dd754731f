"""The simulator against itself (events and bursts), against the bound, and on cases done by hand."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arriero.engine.graph import Graph
from arriero.engine.planner.cycles import NodeTime, bound
from arriero.engine.planner.scenario import Change, Failure, Scenario, Straggler
from arriero.engine.planner.sim_bursts import BurstSimulation
from arriero.engine.planner.sim_events import EventSimulation
from arriero.engine.planner.sim_line import line_of
from arriero.engine.planner.simulation import simulate
from arriero.engine.planner.times import Duration, Fixed, LogNormal
from arriero.engine.planner.trace import draw_timeline
from arriero.schemas.graph import Capacity, GraphSpec
from arriero.schemas.messages import Weights
from tests.toys import ToyCollect, ToyGenerator, ToyPrompts, ToyReward, ToyTrainer, toy_graph

TIMES: dict[str, Duration] = {
    "generator": LogNormal(median=1.0, sigma=0.8),
    "reward": LogNormal(median=0.02, sigma=0.3),
    "collect": Fixed(0.1),
    "trainer": LogNormal(median=0.9, sigma=0.2),
}


def wide_graph(*, generators: int, rewards: int, groups: int, staleness: int) -> GraphSpec:
    g = Graph("wide")
    weights = g.loop(Weights, staleness=staleness)
    asked = g.add(ToyPrompts(), name="prompts")()
    rollouts = g.add(ToyGenerator(), name="generator", replicas=generators)(asked, weights)
    scored = g.add(ToyReward(), name="reward", replicas=rewards)(rollouts)
    batches = g.add(ToyCollect(groups=groups), name="collect")(scored)
    weights.close(g.add(ToyTrainer(), name="trainer")(batches))
    return g.check()


@settings(max_examples=25)
@given(
    shape=st.sampled_from([*itertools.product([1, 3, 7, 60], [1, 2, 50], [2, 5, 40])]),
    staleness=st.integers(0, 4), sync_s=st.sampled_from([0.0, 0.3]), seed=st.integers(0, 99),
    slow=st.booleans(),
)  # fmt: skip
def test_bursts_equal_events_one_by_one(
    shape: tuple[int, int, int], staleness: int, sync_s: float, seed: int, slow: bool
) -> None:
    generators, rewards, groups = shape
    spec = wide_graph(generators=generators, rewards=rewards, groups=groups, staleness=staleness)
    slower = (Straggler(node="generator", replica=0, factor=3.0),) if slow else ()
    scenario = Scenario(times=TIMES, steps=8, sync_s=sync_s, seed=seed, stragglers=slower)
    line = line_of(spec, scenario)
    assert line is not None
    events, bursts = EventSimulation(spec, scenario).run(), BurstSimulation(line, scenario).run()
    assert np.allclose(events.versions_s, bursts.versions_s, rtol=1e-9)
    assert (events.staleness, events.dropped, events.admitted) == (
        bursts.staleness,
        bursts.dropped,
        bursts.admitted,
    )
    assert events.queues == bursts.queues


@settings(max_examples=40)
@given(
    staleness=st.integers(0, 3), generators=st.integers(1, 6), groups=st.integers(2, 12),
    generate=st.floats(0.01, 2), train=st.floats(0.01, 2), reward=st.floats(0, 0.5), sync_s=st.floats(0, 0.5),
)  # fmt: skip
def test_no_simulated_run_is_faster_than_the_maximum_cycle_mean(
    staleness: int, generators: int, groups: int, generate: float, train: float, reward: float, sync_s: float
) -> None:
    spec = wide_graph(generators=generators, rewards=2, groups=groups, staleness=staleness)
    times: dict[str, Duration] = {
        "generator": Fixed(generate),
        "trainer": Fixed(train),
        "reward": Fixed(reward),
    }
    trace = simulate(spec, Scenario(times=times, steps=30, sync_s=sync_s))
    least = bound(spec, {k: NodeTime(mean=t.mean, least=t.least) for k, t in times.items()}, sync_s=sync_s)
    # Versions come in packs of staleness + 1: counted from the start, no pack is ahead of its time.
    assert trace.versions_s[-1] >= (30 - staleness - 1) * least.seconds * (1 - 1e-9)
    assert trace.versions_s[-1] - trace.versions_s[10] >= (19 - staleness) * least.seconds * (1 - 1e-9)


def test_long_tails_too_stay_above_the_bound() -> None:
    for staleness in (0, 1, 4):
        spec = wide_graph(generators=8, rewards=2, groups=32, staleness=staleness)
        trace = simulate(spec, Scenario(times=TIMES, steps=60))
        mean = {
            n: trace.busy_s[n] / (trace.steps if n in ("collect", "trainer") else trace.admitted)
            for n in TIMES
        }
        least = {n: NodeTime(mean=mean[n], least=TIMES[n].least) for n in TIMES}
        assert (
            trace.step_s() >= bound(spec, least).seconds * 0.98
        )  # the means are of all firings, cut-off ends too


def test_synchronous_step_is_the_sum_of_its_parts_and_one_step_of_delay_hides_the_shorter() -> None:
    times: dict[str, Duration] = {"generator": Fixed(0.05), "trainer": Fixed(0.08)}
    sync = simulate(toy_graph(generators=2, staleness=0).check(), Scenario(times=times, steps=20))
    late = simulate(toy_graph(generators=2, staleness=1).check(), Scenario(times=times, steps=20))
    assert sync.step_s() == pytest.approx(0.05 * 2 + 0.08)
    assert late.step_s() == pytest.approx(0.1)
    assert set(sync.staleness) == {0}
    assert max(late.staleness) == 1


def test_no_group_is_trained_staler_than_the_bound_and_dropped_ones_are_replaced() -> None:
    trace = simulate(
        wide_graph(generators=8, rewards=1, groups=8, staleness=1), Scenario(times=TIMES, steps=200)
    )
    assert max(trace.staleness) <= 1
    assert trace.dropped > 0
    assert trace.staleness.total() == 200 * 8


def test_a_full_edge_holds_its_producer() -> None:
    """A slow reward behind an edge of two places: 17 outputs wait in the outbox, then the generator stops."""
    graph = toy_graph(generators=1, staleness=20)
    spec = graph.with_capacities({"generator": Capacity(messages=2)}).check()
    trace = simulate(spec, Scenario(times={"generator": Fixed(0.001), "reward": Fixed(1.0)}, steps=4))
    assert trace.step_s() == pytest.approx(4.0)
    assert max(trace.queues["generator"]) == 2
    assert trace.busy_s["generator"] <= 0.001 * (17 + 2 + 1 + 16 + 1)


def test_a_failure_costs_its_repair_and_loses_no_record() -> None:
    spec = toy_graph(generators=2, staleness=0).check()
    times: dict[str, Duration] = {"generator": Fixed(1.0), "trainer": Fixed(1.0)}
    dead = Failure(node="generator", replica=0, at_s=3.5, detect_s=0.5, repair_s=10.0)
    trace = simulate(spec, Scenario(times=times, steps=5, failures=(dead,)))
    # Without it: 3, 6, 9, ... The replica dies half-way through its first prompt of the second step; the
    # other one does its two prompts by 5.0, then what came back: 6.0 and 7.0.
    assert trace.versions_s[:2] == pytest.approx((3.0, 8.0))
    assert trace.staleness.total() == 20
    assert trace.faults.failures == 1
    assert trace.faults.lost_s == pytest.approx(0.5)


def test_generators_that_join_shorten_the_step() -> None:
    spec = toy_graph(generators=1, staleness=1).check()
    times: dict[str, Duration] = {"generator": Fixed(1.0), "trainer": Fixed(0.5)}
    trace = simulate(
        spec, Scenario(times=times, steps=20, changes=(Change(node="generator", at_s=30, replicas=4),))
    )
    assert trace.steps_s()[3] == pytest.approx(4.0)
    assert trace.steps_s()[-1] == pytest.approx(1.0)


def test_a_run_that_can_never_move_says_where_it_stands() -> None:
    spec = toy_graph(generators=1, staleness=0).check()
    gone = Change(node="generator", at_s=0.1, replicas=0)
    with pytest.raises(RuntimeError, match="stands still after version 0"):
        simulate(spec, Scenario(times={"generator": Fixed(1.0)}, steps=3, changes=(gone,)))


def test_thousands_of_generators_take_seconds_and_leave_a_timeline(tmp_path: Path) -> None:
    spec = wide_graph(generators=4096, rewards=128, groups=4096, staleness=1)
    trace = simulate(spec, Scenario(times=TIMES, steps=10))
    assert trace.steps == 10
    assert 0 < trace.idle_share()["generator"] < 1
    assert "staleness" in trace.table()
    draw_timeline(trace, tmp_path / "timeline.svg")
    assert (tmp_path / "timeline.svg").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sixteen_thousand_generators_and_a_thousand_steps_take_less_than_a_minute_of_one_core() -> None:
    spec = wide_graph(generators=16384, rewards=512, groups=16384, staleness=1)
    times: dict[str, Duration] = {
        "generator": LogNormal(median=40, sigma=0.6, longest=300), "reward": Fixed(0.3), "trainer": Fixed(48),
    }  # fmt: skip
    began = time.process_time()
    trace = simulate(spec, Scenario(times=times, steps=1000, sync_s=2.0))
    assert time.process_time() - began < 60
    assert trace.steps == 1000
    assert trace.staleness.total() == 1000 * 16384
