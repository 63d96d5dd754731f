"""The graph, burst by burst: all records that one version lets in are placed at once.

    source -> nodes of one record each, one of them behind the loop -> batch -> ... -> the loop's producer

Between two moments at which the trainer acts on the source (a version, a dropped group) nothing upstream can
change, so each stretch is a few array operations whatever the number of replicas. Equal to `sim_events` up to
rounding, for graphs of this shape whose edges never fill (default capacities), without failures or changes.
"""

from __future__ import annotations

import bisect
from collections import Counter

import numpy as np
import numpy.typing as npt

from arriero.engine.planner.scenario import TIMELINE, Scenario
from arriero.engine.planner.sim_line import Line
from arriero.engine.planner.sim_stage import Array, Numbers, Placed, Stage
from arriero.engine.planner.times import ZERO, Draws
from arriero.engine.planner.trace import Interval, Trace
from arriero.schemas.graph import NodeSpec


class _Flow:
    """Records between source and batch: what was placed at each node and hasn't reached the next one."""

    def __init__(self, line: Line, scenario: Scenario) -> None:
        self.line, self.sync_s = line, scenario.sync_s
        self.stages = [_stage(n, scenario) for n in line.nodes]
        empty = np.zeros(0)
        self.ends: list[Array] = [empty] * len(self.stages)  # by node, in order of time
        self.numbers: list[Numbers] = [np.zeros(0, np.int64)] * len(self.stages)
        # When the loop's reader began them; before it: when the version is there that they need.
        self.begun: list[Array] = [empty] * len(self.stages)
        self.timeline: list[Interval] = []

    def copy(self) -> _Flow:
        other = object.__new__(_Flow)
        other.__dict__.update(self.__dict__)
        other.stages = [s.copy() for s in self.stages]
        other.ends, other.numbers, other.begun = [*self.ends], [*self.numbers], [*self.begun]
        other.timeline = []
        return other

    def admit(self, at: Array, numbers: Numbers, ready: Array) -> None:
        """Records let in at `at`; `ready`: when the version that they need can be had."""
        self._place(0, at, numbers, ready)

    def advance(self, until: float) -> None:
        """Pass on everything that ends up to `until`; nothing may be let in before it any more."""
        for k in range(len(self.stages) - 1):
            done = int(np.searchsorted(self.ends[k], until, side="right"))
            if done:
                arrival, numbers, begun = self.ends[k][:done], self.numbers[k][:done], self.begun[k][:done]
                self.ends[k], self.numbers[k], self.begun[k] = (
                    self.ends[k][done:],
                    self.numbers[k][done:],
                    self.begun[k][done:],
                )
                self._place(k + 1, arrival, numbers, begun)

    def _place(self, k: int, arrival: Array, numbers: Numbers, begun: Array) -> None:
        loop = k == self.line.loop_at
        placed = self.stages[k].push(arrival, numbers, begun if loop and self.sync_s else None)
        if len(self.timeline) < TIMELINE:
            self._remember(k, placed)
        begun = placed.begin if loop else begun
        ends = np.concatenate([self.ends[k], placed.end])
        order = np.argsort(ends, kind="stable")
        self.ends[k] = ends[order]
        self.numbers[k] = np.concatenate([self.numbers[k], numbers])[order]
        self.begun[k] = np.concatenate([self.begun[k], begun])[order]

    def _remember(self, k: int, placed: Placed) -> None:
        some = np.flatnonzero((placed.replica < 4) & (placed.seconds > 0))[:100]
        self.timeline += [
            Interval(
                self.line.nodes[k].name, int(placed.replica[i]), float(placed.begin[i]), float(placed.end[i])
            )
            for i in some
        ]


class BurstSimulation:
    """State of one simulation; `run` gives its trace."""

    def __init__(self, line: Line, scenario: Scenario) -> None:
        self.line, self.scenario = line, scenario
        self.flow = _Flow(line, scenario)
        self.draws = [
            Draws(scenario.times.get(n.name, ZERO), n.name, scenario.seed) for n in (line.batch, *line.after)
        ]
        self.factors = [_factors(n, scenario)[0] for n in (line.batch, *line.after)]
        self.free = [0.0] * len(self.draws)
        self.work = [0.0] * len(self.draws)
        self.done: list[list[float]] = [[] for _ in self.draws]
        self.made: list[float] = []  # in the ledger
        self.pending: list[float] = []  # versions under way, in order: when each will be made
        self.batches = self.dropped = self.admitted = self.held = 0
        self.members: list[Numbers] = []  # of batches: versions of their groups
        self.kept: list[Numbers] = []  # of the batch that is being gathered
        self.ages: Counter[int] = Counter()
        edges = (line.source, *line.nodes, line.batch, *line.after)[:-1]
        self.queues: dict[str, Counter[int]] = {n.name: Counter[int]() for n in edges}

    def run(self) -> Trace:
        self._admit(np.zeros(self._room()), np.zeros(1, np.int64))
        while len(self.made) < self.scenario.steps:
            self._stretch(self.pending[0] if self.pending else np.inf)
        return self._trace()

    def _stretch(self, until: float) -> None:
        """Gather up to the next moment that acts on the source: a version, the end of a batch, or drops."""
        trial = self.flow.copy()
        trial.advance(until)
        upto, drops = self._gathered(trial, until)
        if not np.isfinite(upto):
            raise RuntimeError(f"the simulated run stands still after version {len(self.made)}")
        self.flow.advance(upto)
        before = self.dropped
        self._take(upto)
        if self.dropped > before:
            self._admit(drops, before + 1 + np.arange(len(drops)))
        if self.held == self.line.window.per_version:
            self._batch(upto)
        if self.pending and self.pending[0] <= upto:
            self._version(self.pending.pop(0))

    def _gathered(self, trial: _Flow, until: float) -> tuple[float, Array]:
        """How far this stretch goes, and when groups are dropped in it."""
        taken = np.maximum(trial.ends[-1], self.free[0])
        fresh = self._fresh(trial.begun[-1])
        missing = self.line.window.per_version - self.held
        full = np.flatnonzero(np.cumsum(fresh) == missing)
        upto = min(until, float(taken[full[0]])) if len(full) else until
        drops = taken[~fresh & (taken <= upto)]
        if len(drops):
            # A dropped group lets another in, which may come back before the batch is full.
            first = self.flow.stages[0]
            seconds = first.draws.range(self.admitted, len(drops)) * float(first.factor.min())
            upto = min(upto, max(float((drops + seconds).min()), float(drops[0])))
            drops = drops[drops <= upto]
        return upto, drops

    def _fresh(self, begun: Array) -> npt.NDArray[np.bool_]:
        return self.batches - self._versions(begun) <= self.line.window.staleness

    def _versions(self, begun: Array) -> Numbers:
        """The newest version that could be had when each was begun."""
        visible = np.asarray(self.made) + self.scenario.sync_s
        return np.searchsorted(visible, begun, side="right")

    def _take(self, upto: float) -> None:
        """Move what the batch node takes up to `upto` into the batch, or drop it."""
        flow, missing = self.flow, self.line.window.per_version - self.held
        taken = np.maximum(flow.ends[-1], self.free[0])
        fresh = self._fresh(flow.begun[-1])
        here = taken <= upto
        here &= np.cumsum(fresh) - fresh < missing  # the batch is full: the rest waits
        count = int(here.sum())
        ages = self._versions(flow.begun[-1][:count])[fresh[:count]]
        self.kept.append(ages)
        self.held += len(ages)
        self.dropped += count - len(ages)
        flow.ends[-1], flow.numbers[-1], flow.begun[-1] = (
            flow.ends[-1][count:],
            flow.numbers[-1][count:],
            flow.begun[-1][count:],
        )

    def _batch(self, full: float) -> None:
        """The batch is full: through the nodes after it, one after the other."""
        now = full
        for k, draws in enumerate(self.draws):
            seconds = draws.at(self.batches) * self.factors[k]
            self.free[k] = now = max(now, self.free[k]) + seconds
            self.work[k] += seconds
            self.done[k].append(now)
        self.pending.append(now)
        self.members.append(np.concatenate(self.kept))
        self.kept, self.held = [], 0
        self.batches += 1

    def _version(self, at: float) -> None:
        version = len(self.made)
        values, counts = np.unique(version - self.members[version], return_counts=True)
        self.ages.update({int(v): int(n) for v, n in zip(values, counts, strict=True)})
        self.members[version] = np.zeros(0, np.int64)
        self._depths(at)
        self.made.append(at)
        self._admit(np.full(max(0, self._room()), at), np.array([self.dropped]))

    def _room(self) -> int:
        limit = min(
            self.line.window.limit(len(self.made), self.dropped),
            self.scenario.steps * self.line.window.per_version + self.dropped,
        )
        return limit - self.admitted

    def _admit(self, at: Array, dropped: Numbers) -> None:
        """Let records in at these moments, when so many (or each time so many) had been dropped."""
        at = at[: max(0, self._room())]
        if not len(at):
            return
        dropped = dropped[: len(at)]
        numbers = np.arange(self.admitted, self.admitted + len(at))
        w = self.line.window
        need = np.maximum(0, (numbers - dropped) // w.per_version - w.staleness)
        visible = np.concatenate([[0.0], np.asarray(self.made) + self.scenario.sync_s])
        self.admitted += len(at)
        self.flow.admit(at, numbers, visible[need])

    def _depths(self, at: float) -> None:
        """Records that each edge holds: published and not yet answered."""
        per, ends = self.line.window.per_version, self.flow.ends
        out = [
            self.admitted,
            *(s.count - int(np.sum(e > at)) for s, e in zip(self.flow.stages, ends, strict=True)),
        ]
        given = [bisect.bisect_right(times, at) for times in self.done]
        answered = [*out[1:], per * given[0] + self.dropped, *given[1:]]
        for name, published, gone in zip(self.queues, [*out, *given[:-1]], answered, strict=True):
            self.queues[name][published - gone] += 1

    def _trace(self) -> Trace:
        line, span = self.line, self.made[-1]
        singles = (line.batch, *line.after)
        busy = {line.source.name: 0.0}
        busy |= {n.name: s.busy for n, s in zip(line.nodes, self.flow.stages, strict=True)}
        busy |= {n.name: w for n, w in zip(singles, self.work, strict=True)}
        alive = {n.name: n.replicas * span for n in (line.source, *line.nodes, *singles)}
        return Trace(
            versions_s=tuple(map(float, self.made)), busy_s=busy, replica_s=alive, staleness=self.ages,
            dropped=self.dropped, admitted=self.admitted, queues=self.queues,
            timeline=tuple(self.flow.timeline[:TIMELINE]),
            events=sum(s.count for s in self.flow.stages) + self.batches * len(singles),
        )  # fmt: skip


def _factors(node: NodeSpec, scenario: Scenario) -> Array:
    factors = np.ones(node.replicas)
    for s in scenario.stragglers:
        if s.node == node.name and s.replica < node.replicas:
            factors[s.replica] = s.factor
    return factors


def _stage(node: NodeSpec, scenario: Scenario) -> Stage:
    draws = Draws(scenario.times.get(node.name, ZERO), node.name, scenario.seed)
    return Stage(draws, node.replicas, _factors(node, scenario))
