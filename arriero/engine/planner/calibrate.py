"""Component times from a recorded run, the step they predict, and what would change it.

Source of the times: heartbeats, as the whole run's (`summary.json`) or as those known at each version
(`metrics.jsonl`). A node that works on many records at once has the seconds of one, from its beginning to its
end, and its places count as replicas; while a run goes on these aren't known, and it counts as one that does
them in turn at the same rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean
from typing import cast

from arriero.engine.errors import UserError
from arriero.engine.planner.costs import Layout, TrainWork, train_step
from arriero.engine.planner.cycles import Cycle, NodeTime, bound
from arriero.engine.planner.hardware import Hardware, Precision
from arriero.engine.planner.models import ModelShape
from arriero.engine.planner.scenario import Scenario
from arriero.engine.planner.simulation import simulate
from arriero.engine.planner.times import Duration, Fixed, Recorded
from arriero.engine.planner.trace import Trace
from arriero.engine.rates import repetitions, windows
from arriero.schemas.graph import GraphSpec, NodeSpec
from arriero.schemas.ledger import Event, Resumed, Trained
from arriero.schemas.run import RecordTime

Line = Mapping[str, object]
_WARM_UP = 2
_STEPS = 20  # enough for a steady state of equal firings
_FIRINGS = 200_000  # some seconds of simulation
_WORTH = 0.97  # of the step: changes that save less aren't named


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What a run measured: seconds per firing of each node, seconds and trained tokens per version."""

    spec: GraphSpec
    times: Mapping[str, Duration]
    step_s: float
    tokens: float
    versions: int
    record_s: Mapping[str, RecordTime] = field(default_factory=dict[str, RecordTime])

    def simulated(self, spec: GraphSpec) -> Trace:
        """`spec`, which is this graph or a changed one, simulated with these times."""
        steps = max(_STEPS, min(self.versions, 200))
        return _simulated(spec, self.times, self.record_s, steps)

    def predicted(self) -> Trace:
        """The same graph, simulated with these times."""
        return self.simulated(self.spec)

    def bound(self) -> Cycle:
        """The step below which the graph can't get with these times, and the cycle that says so."""
        return bounded(self.spec, self.times, self.record_s)


def bounded(spec: GraphSpec, times: Mapping[str, Duration], record_s: Mapping[str, RecordTime]) -> Cycle:
    """The step below which no run with these times gets, and the cycle that says so."""
    known = {n: NodeTime(mean=t.mean, least=t.least) for n, t in times.items()}
    for n, r in record_s.items():
        least = r.least_s if r.at_once > 1 else known[n].least
        known[n] = replace(known[n], least=least, longest=r.longest_s, at_once=r.at_once)
    return bound(spec, known)


def expected(
    spec: GraphSpec, firing_s: Mapping[str, float], record_s: Mapping[str, RecordTime]
) -> tuple[float, Cycle]:
    """Seconds of a step when `spec` is simulated with firings that always take so long, and their bound.

    Takes seconds at most: of a very large graph fewer steps are simulated.
    """
    times = {name: Fixed(seconds) for name, seconds in firing_s.items()}
    firings_a_step = sum(repetitions(spec).values())
    steps = max(_WARM_UP + 3, min(_STEPS, _FIRINGS // firings_a_step))
    least = bounded(spec, times, record_s)
    return max(_simulated(spec, times, record_s, steps).step_s(), least.seconds), least


def _simulated(
    spec: GraphSpec, times: Mapping[str, Duration], record_s: Mapping[str, RecordTime], steps: int
) -> Trace:
    """Each place of a node that works on several records at once as a replica of its own."""
    known, counts = dict(times), repetitions(spec)
    for name, r in record_s.items():
        if r.at_once > 1:
            spec = with_replicas(spec, name, spec.node(name).replicas * r.at_once)
            known[name] = _spread(r, counts[name])
    return simulate(spec, Scenario(times=known, steps=steps))


def _spread(r: RecordTime, number: int) -> Recorded:
    """The records of one iteration after the other: the shortest, the longest, and the mean of all."""
    rest = (number * r.mean_s - r.least_s - r.longest_s) / max(1, number - 2)
    return Recorded(seconds=(r.longest_s, r.least_s, *[max(0.0, rest)] * (number - 2)), in_order=True)


@dataclass(frozen=True)
class Advice:
    """A change of the graph and the step it is simulated to have."""

    change: str
    step_s: float


def calibrate(
    spec: GraphSpec,
    metrics: Sequence[Line],
    ledger: Iterable[Event],
    firing_s: Mapping[str, float],
    record_s: Mapping[str, RecordTime],
) -> Calibration:
    """Times of a run's components, of one that went on since then. Raises UserError below four versions.

    `firing_s`, `record_s`: those of the whole run's summary; empty if the run isn't over.
    """
    events = [*ledger]
    resumed = next((e for e in reversed(events) if isinstance(e, Resumed)), None)
    since = max(resumed.versions.values(), default=0) if resumed else 0
    made = [line for line in metrics if _number(line["step"]) > since]
    if len(made) < _WARM_UP + 2:
        went_on = f" since it went on from version {since}" if since else ""
        raise UserError(
            f"the run made {len(made)} versions{went_on}; at least {_WARM_UP + 2} are needed to learn from"
        )
    lines = made[_WARM_UP - 1 :]
    at = [_number(line["time"]) for line in lines]
    producer = spec.loops[0].producer if spec.loops else spec.nodes[-1].name
    step_s = (at[-1] - at[0]) / (len(at) - 1)
    times: dict[str, Duration] = {}
    for node in spec.nodes:
        # Heartbeats are a second apart: single steps shorter than some of them can't be told apart.
        each = _between(node, lines) if step_s > 5.0 else ()
        mean = firing_s.get(node.name) or fmean(_between(node, [lines[0], lines[-1]]) or (0.0,))
        times[node.name] = Recorded(seconds=tuple(each)) if each else Fixed(mean)
    if not any(t.mean for t in times.values()):
        raise UserError("the run was over before its components told how long they take, once a second")
    trained = [e.tokens for e in events if isinstance(e, Trained) and e.node == producer]
    return Calibration(
        spec=spec,
        times=times,
        step_s=step_s,
        tokens=fmean(trained) if trained else 0.0,
        versions=len(made),
        record_s=record_s,
    )


def advice(c: Calibration) -> list[Advice]:
    """Changes that are simulated to make the step at least 3 % shorter, the best first."""
    now = c.predicted().step_s()
    found = [a for a in one_more(c).values() if a.step_s < _WORTH * now]
    for loop in c.spec.loops:
        least = now  # what a milder bound reaches
        for more in (1, 2, 4):
            if more > loop.staleness:
                step = c.simulated(with_staleness(c.spec, loop.name, more)).step_s()
                if step < _WORTH * least:
                    found.append(Advice(f"staleness {more} instead of {loop.staleness}", step))
                least = min(step, least)
    return sorted(found, key=lambda a: a.step_s)


def one_more(c: Calibration) -> dict[str, Advice]:
    """By node: what one more replica on devices of its own makes of the step.

    What closes a loop has no replicas: one more rank is taken to divide its time, as if it scaled perfectly.
    Sources, and nodes that gather records, can't be more than one.
    """
    found: dict[str, Advice] = {}
    for n in c.spec.nodes:
        if any(loop.producer == n.name for loop in c.spec.loops):
            shorter = Fixed(c.times[n.name].mean * n.ranks / (n.ranks + 1))
            faster = replace(c, times={**c.times, n.name: shorter})
            words = f"{n.ranks + 1} ranks of {n.name}, if it scales"
            found[n.name] = Advice(words, faster.predicted().step_s())
        elif n.inputs and n.ranks == 1 and not any(i.consumes > 1 for i in n.inputs):
            words = f"{n.replicas + 1} replicas of {n.name}, on devices of their own"
            spec = with_replicas(c.spec, n.name, n.replicas + 1)
            found[n.name] = Advice(words, c.simulated(spec).step_s())
    return found


def with_staleness(spec: GraphSpec, loop: str, staleness: int) -> GraphSpec:
    """The same graph with another bound on one loop."""
    loops = tuple(v.model_copy(update={"staleness": staleness}) if v.name == loop else v for v in spec.loops)
    return spec.model_copy(update={"loops": loops})


def with_replicas(spec: GraphSpec, node: str, replicas: int) -> GraphSpec:
    """The same graph with another number of replicas of one node."""
    nodes = tuple(n.model_copy(update={"replicas": replicas}) if n.name == node else n for n in spec.nodes)
    return spec.model_copy(update={"nodes": nodes})


def attained(hardware: Hardware, *, modelled_s: float, measured_s: float) -> Hardware:
    """`hardware` with its rates set so that a component modelled at `modelled_s` takes `measured_s`.

    Raises UserError for a time that isn't positive.
    """
    if modelled_s <= 0 or measured_s <= 0:
        raise UserError(
            f"calibration needs positive times, got {modelled_s} modelled and {measured_s} measured"
        )
    return hardware.scaled(modelled_s / measured_s)


def corrected(c: Calibration, hardware: Hardware, model: ModelShape, precision: Precision) -> Hardware:
    """`hardware` as the run's trainer reached it. Raises UserError for a run that trained nothing."""
    window = next(iter(windows(c.spec)), None)
    if window is None or c.tokens <= 0:
        raise UserError(
            f"{c.spec.name}: the run trained no sampled tokens, so there is nothing to compare with"
        )
    node = c.spec.node(window.producer)
    work = TrainWork(
        tokens=c.tokens, context=c.tokens / window.per_version / 2, precision=precision, recompute=False
    )
    modelled = train_step(model, hardware, Layout(dp=node.ranks), work).total
    return attained(hardware, modelled_s=modelled, measured_s=c.times[window.producer].mean)


def firings(node: NodeSpec, *, taken: float, given: float) -> float:
    """How often a node has fired that took and gave so many records."""
    takes = sum(i.consumes for i in node.inputs if not i.loop)
    return taken / takes if takes else given / node.produces


def _between(node: NodeSpec, lines: Sequence[Line]) -> list[float]:
    """Seconds of one firing, from each line to the next in which the node had fired."""
    found: list[float] = []
    for before, after in pairwise(_progress(node, line) for line in lines):
        if (fired := after[1] - before[1]) > 0:
            found.append(max(0.0, after[0] - before[0]) / fired)
    return found


def _progress(node: NodeSpec, line: Line) -> tuple[float, float]:
    """Busy seconds and firings of all replicas so far."""
    nodes = cast("Mapping[str, Mapping[str, object]]", line.get("nodes", {}))
    if (known := nodes.get(node.name)) is None:
        return 0.0, 0.0
    done = firings(node, taken=_number(known["taken"]), given=_number(known["given"]))
    return _number(known["busy_s"]), done


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
