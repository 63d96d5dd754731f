"""How long a record takes where several are under way at once: measured, in the bound, and simulated."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arriero.engine.graph import Graph
from arriero.engine.planner.calibrate import Calibration, bounded, expected
from arriero.engine.planner.times import Fixed
from arriero.engine.runtime import waits
from arriero.engine.runtime.waits import NodeClock
from arriero.launchers.record_times import RecordTimes
from arriero.schemas.graph import GraphSpec
from arriero.schemas.messages import Weights
from arriero.schemas.run import NodeStatus, RecordTime
from tests.toys import ToyCollect, ToyGenerator, ToyPrompts, ToyReward, ToyTrainer

TRAIN_S = 0.46


def graph(*, groups: int, staleness: int) -> GraphSpec:
    g = Graph("line")
    weights = g.loop(Weights, staleness=staleness)
    rollouts = g.add(ToyGenerator(), name="generator")(g.add(ToyPrompts(), name="prompts")(), weights)
    scored = g.add(ToyReward(), name="reward")(rollouts)
    batches = g.add(ToyCollect(groups=groups), name="collect")(scored)
    weights.close(g.add(ToyTrainer(), name="trainer")(batches))
    return g.check()


def equal(seconds: float, at_once: int) -> RecordTime:
    return RecordTime(least_s=seconds, mean_s=seconds, longest_s=seconds, at_once=at_once)


def calibration(spec: GraphSpec, firing_s: dict[str, float], record_s: dict[str, RecordTime]) -> Calibration:
    times = {n.name: Fixed(firing_s.get(n.name, 0.0)) for n in spec.nodes}
    return Calibration(spec=spec, times=times, step_s=1.0, tokens=0.0, versions=20, record_s=record_s)


@pytest.mark.parametrize(("staleness", "step_s"), [(0, 1.06), (1, 0.53), (2, TRAIN_S), (4, TRAIN_S)])
def test_the_way_around_the_loop_bounds_a_step_until_enough_batches_are_on_it(
    staleness: int, step_s: float
) -> None:
    """Sixteen groups sampled together in 0.30 s, judged together in 0.30 s, trained in 0.46 s."""
    spec = graph(groups=16, staleness=staleness)
    firing_s = {"generator": 0.30 / 16, "reward": 0.30 / 16, "trainer": TRAIN_S}
    at_once = 16 * (staleness + 1)
    record_s = {"generator": equal(0.30, at_once), "reward": equal(0.30, at_once)}
    least = bounded(spec, {n: Fixed(s) for n, s in firing_s.items()}, record_s)
    assert least.seconds == pytest.approx(step_s)
    # Two batches take turns: the steps aren't all alike.
    simulated_s = calibration(spec, firing_s, record_s).predicted().step_s()
    assert simulated_s == pytest.approx(step_s, rel=0.02)


def test_a_batch_takes_as_long_as_its_longest_record_and_not_as_their_mean() -> None:
    spec = graph(groups=4, staleness=0)
    record_s = {"generator": RecordTime(least_s=0.1, mean_s=0.3, longest_s=0.9, at_once=4)}
    predicted_s, least = expected(spec, {"generator": 0.225, "trainer": 0.5}, record_s)
    assert least.seconds == pytest.approx(0.9 + 0.5)
    assert predicted_s == pytest.approx(0.9 + 0.5)
    assert {n.partition(":")[0] for n in least.nodes} >= {"generator", "trainer"}


@settings(max_examples=40)
@given(
    groups=st.integers(2, 8), at_once=st.integers(1, 8), least=st.floats(0.01, 1), more=st.floats(0, 2),
    share=st.floats(0, 1), judge=st.floats(0, 0.5), train=st.floats(0.01, 2),
)  # fmt: skip
def test_no_simulated_synchronous_run_is_faster_than_the_bound_of_its_records(
    groups: int, at_once: int, least: float, more: float, share: float, judge: float, train: float
) -> None:
    longest = least + more
    mean = (least + longest + (groups - 2) * (least + share * more)) / groups
    spec = graph(groups=groups, staleness=0)
    record_s = {
        "generator": RecordTime(least_s=least, mean_s=mean, longest_s=longest, at_once=at_once),
        "reward": equal(judge, groups),
    }
    # The work is what so many places can do when all are taken.
    firing_s = {"generator": mean / at_once, "reward": judge / groups, "trainer": train}
    if at_once == 1:
        record_s["generator"] = equal(mean, 1)
    c = calibration(spec, firing_s, record_s)
    assert c.predicted().step_s() >= c.bound().seconds * (1 - 1e-9)


class Time:
    """Passes when a test says so."""

    def __init__(self) -> None:
        self.now = 50.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    stands_in = Time()
    monkeypatch.setattr(waits, "time", stands_in)
    return stands_in


async def _waits(clock: NodeClock, time: Time, seconds: float, *, for_records: bool) -> None:
    over = asyncio.Event()
    waiting = asyncio.create_task(clock.wait(over.wait(), "it", for_records=for_records))
    await asyncio.sleep(0)
    time.now += seconds
    over.set()
    await waiting


async def test_a_record_ages_while_more_are_waited_for_but_not_while_its_node_is_held_up(time: Time) -> None:
    clock = NodeClock("generator", bound_s=5, remembered=8)
    clock.take("a")
    time.now += 1
    clock.take("b")
    await _waits(clock, time, 2, for_records=True)
    await _waits(clock, time, 8, for_records=False)  # for a version, or for room on its output
    time.now += 4
    clock.answer("a", (7,))
    clock.forget("b")
    clock.answer("b", (8,))  # it was given back: somebody else answers it
    status = clock.status()
    assert (status.took, status.at_once, status.taken) == (((7, 1.0 + 2 + 4),), 2, 2)


async def test_the_parts_of_a_record_that_came_again_add_up(time: Time) -> None:
    clock = NodeClock("generator", bound_s=5, remembered=8)
    for seconds in (3.0, 0.5):
        clock.take("a")
        time.now += seconds
        clock.answer("a", (7,))
    assert clock.status().took == ((7, 3.5),)


def test_times_are_of_the_records_that_were_trained_and_of_whole_batches() -> None:
    times = RecordTimes(graph(groups=2, staleness=1))
    took = {0: 0.1, 1: 0.4, 2: 9.0, 3: 0.3, 4: 0.5, 5: 0.2}  # 2 was dropped: too late
    for replica in range(2):
        mine = tuple((k, s) for k, s in took.items() if k % 2 == replica)
        times.heartbeat(NodeStatus(node="generator", taken=3, at_once=2 + replica, took=mine[:2]), replica)
        times.heartbeat(NodeStatus(node="generator", taken=3, at_once=2 + replica, took=mine), replica)
    for origins in ((0, 1), (3, 4), (5, 6)):  # of 6 nothing is known
        times.trained(origins)
    found = times.found(leave_out=0)
    assert found.keys() == {"generator"}
    seconds = found["generator"]
    assert (seconds.least_s, seconds.longest_s) == pytest.approx(((0.1 + 0.3) / 2, (0.4 + 0.5) / 2))
    assert seconds.mean_s == pytest.approx((0.25 + 0.4) / 2)
    assert seconds.at_once == 3
