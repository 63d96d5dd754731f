"""The graph, event by event: every record, replica, place on an edge and lease ahead, in simulated time.

Exact and slow (some ten thousand firings a second); `sim_bursts` is equal and fast where it applies.
Admission is `engine.rates.Window.limit`; the guard drops a group whose version is more than `staleness` older
than the one about to be replaced; both from the ledger's counts, as at run time. No held-out prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from typing import Any

import simpy

from arriero.engine.planner.scenario import TIMELINE, Change, Failure, Scenario
from arriero.engine.planner.sim_edges import BACKLOG, Edge, Reader, Replica, Sample
from arriero.engine.planner.times import ZERO, Draws
from arriero.engine.planner.trace import Faults, Interval, Trace
from arriero.engine.rates import Window, capacities, windows
from arriero.engine.runtime.guard import guarded
from arriero.schemas.graph import GraphSpec, NodeSpec

Waiting = Generator[simpy.Event, Any, Any]


class EventSimulation:
    """State of one simulation; `run` gives its trace."""

    def __init__(self, spec: GraphSpec, scenario: Scenario) -> None:
        self.spec, self.scenario, self.env = spec, scenario, simpy.Environment()
        room = capacities(spec)
        self.windows = windows(spec)
        self.edges = {n.name: Edge(len(spec.consumers(n.name)), room[n.name].messages) for n in spec.nodes}
        self.draws = {
            n.name: Draws(scenario.times.get(n.name, ZERO), n.name, scenario.seed) for n in spec.nodes
        }
        self.guards = {n.name: guarded(spec, n.name) for n in spec.nodes}
        self.replicas: dict[str, list[Replica]] = {n.name: [] for n in spec.nodes}
        self.fired = Counter[str]()
        self.counted = spec.loops[0].producer if spec.loops else spec.nodes[-1].name
        # When each version is visible; without a loop every output of the last node counts as one.
        self.made = {name: [0.0] for name in {self.counted, *(loop.producer for loop in spec.loops)}}
        self.versions: list[float] = []
        self.dropped: set[int] = set()
        self.admitted, self.trained = 0, Counter[str]()
        self.busy: dict[str, float] = {n.name: 0.0 for n in spec.nodes}
        self.alive: dict[str, float] = {n.name: 0.0 for n in spec.nodes}
        self.ages, self.queues = Counter[int](), {n.name: Counter[int]() for n in spec.nodes}
        self.timeline: list[Interval] = []
        self.lost_s, self.killed = 0.0, 0
        self._changed: list[simpy.Event] = []
        self.over = simpy.Event(self.env)

    def run(self) -> Trace:
        """To the last version, or until nothing moves any more."""
        for n in sorted(
            self.spec.nodes, key=lambda n: not n.inputs
        ):  # all readers call before anything is sent
            for _ in range(n.replicas):
                self.start(n)
        for failure in self.scenario.failures:
            self.env.process(self._fail(failure))
        for change in self.scenario.changes:
            self.env.process(self._change(change))
        try:
            self.env.run(until=self.over)
        except RuntimeError as error:
            made = len(self.versions)
            raise RuntimeError(
                f"the simulated run stands still after version {made} at {self.env.now:.3f} s"
            ) from error
        now = self.env.now
        for name, found in self.replicas.items():
            for r in found:
                self.alive[name] += now - r.began
        return Trace(
            versions_s=tuple(self.versions), busy_s={n.name: self.busy[n.name] for n in self.spec.nodes},
            replica_s={n.name: self.alive[n.name] for n in self.spec.nodes}, staleness=self.ages,
            dropped=len(self.dropped), admitted=self.admitted,
            queues={n.name: self.queues[n.name] for n in self.spec.nodes if self.edges[n.name].ports},
            timeline=tuple(self.timeline), faults=Faults(failures=self.killed, lost_s=self.lost_s),
            events=sum(self.fired.values()),
        )  # fmt: skip

    def start(self, node: NodeSpec, number: int | None = None) -> None:
        """A new replica of `node`."""
        found = self.replicas[node.name]
        number = len(found) if number is None else number
        factor = next(
            (s.factor for s in self.scenario.stragglers if (s.node, s.replica) == (node.name, number)), 1.0
        )
        replica = Replica(number, factor)
        replica.began = self.env.now
        found.append(replica)
        for i in node.inputs:
            if not i.loop:
                edge = self.edges[i.source]
                place = [(c.name, p.port) for c, p in self.spec.consumers(i.source)].index(
                    (node.name, i.port)
                )
                want = max(i.consumes, self.scenario.want.get(node.name, 0))
                replica.readers.append(Reader(self.env, edge.ports[place], want))
        replica.process = self.env.process(
            self._source(node) if not replica.readers else self._work(node, replica)
        )

    def _source(self, node: NodeSpec) -> Waiting:
        mine = [w for w in self.windows if node.name in w.sources]
        replica, k = self.replicas[node.name][0], 0
        while True:
            if seconds := self.draws[node.name].at(k):
                yield self.env.timeout(seconds)
                self.busy[node.name] += seconds
            while mine and k >= self._limit(mine):
                yield self._change_event()
            least = max([0, *((k - self._dropped(w)) // w.per_version - w.staleness for w in mine)])
            self.admitted += 1
            yield from self._give(node, replica, Sample(k, [(k, -1)], least), ())
            k += 1

    def _limit(self, mine: list[Window]) -> int:
        last = self.scenario.steps - 1
        made = {w.producer: len(self.made[w.producer]) - 1 for w in mine}
        return min(w.limit(min(made[w.producer], last - w.staleness), self._dropped(w)) for w in mine)

    def _dropped(self, window: Window) -> int:
        """Groups dropped, less those that the versions so far went without."""
        lacked = (len(self.made[window.producer]) - 1) * window.per_version - self.trained[window.producer]
        return len(self.dropped) - lacked

    def _work(self, node: NodeSpec, replica: Replica) -> Waiting:
        loops = [
            next(p.producer for p in self.spec.loops if p.name == i.source) for i in node.inputs if i.loop
        ]
        amounts = [i.consumes for i in node.inputs if not i.loop]
        for reader in replica.readers:
            reader.ask()
        try:
            while not replica.leaving:
                for reader, amount in zip(replica.readers, amounts, strict=True):
                    yield from self._take(node, replica, reader, amount)
                taken = [s for _, s in replica.holding]
                for producer in loops:
                    yield from self._version(producer, max(s.min_version for s in taken))
                yield from self._fire(node, replica, taken, loops)
        except simpy.Interrupt:
            pass

    def _take(self, node: NodeSpec, replica: Replica, reader: Reader, amount: int) -> Waiting:
        held = 0
        while held < amount:
            reader.ask()
            if not reader.ready:
                yield reader.wait()
            record = reader.ready.popleft()
            reader.ask()
            if (kept := self._fresh(node, record)) is None:
                reader.port.edge.settle(record)
                continue
            replica.holding.append((reader, kept))
            held += 1

    def _fresh(self, node: NodeSpec, record: Sample) -> Sample | None:
        """The guard: `record` without groups that are too old, None if none is left."""
        if (window := self.guards[node.name]) is None:
            return record
        old = {k for k, v in record.groups if v >= 0 and self.fired[node.name] - v > window.staleness}
        if not old:
            return record
        self.dropped |= old
        self._wake()
        record.groups = [(k, v) for k, v in record.groups if k not in old]
        return record if record.groups else None

    def _version(self, producer: str, least: int) -> Waiting:
        """Wait until the replica can have version `least`."""
        while self._visible(producer) < least:
            times = self.made[producer]
            if len(times) > least:
                yield self.env.timeout(times[least] - self.env.now)
            else:
                yield self._change_event()

    def _visible(self, producer: str) -> int:
        times, newest = self.made[producer], len(self.made[producer]) - 1
        while newest and times[newest] > self.env.now:
            newest -= 1
        return newest

    def _fire(self, node: NodeSpec, replica: Replica, taken: list[Sample], loops: list[str]) -> Waiting:
        single = len(taken) == 1 and node.inputs[0].consumes == 1
        number = taken[0].number if single else self.fired[node.name]
        groups = [g for s in taken for g in s.groups]
        if len(replica.readers) > 1:  # branches that meet: each source record once, with its oldest version
            groups = sorted(dict(sorted(groups, reverse=True)).items())
        if loops:
            oldest = min(self._visible(p) for p in loops)
            groups = [(k, oldest if v < 0 else min(v, oldest)) for k, v in groups]
        seconds, start = self.draws[node.name].at(number) * replica.factor, self.env.now
        try:
            yield self.env.timeout(seconds)
        except simpy.Interrupt:
            self.lost_s += self.env.now - start
            raise
        self.fired[node.name] += 1
        self.busy[node.name] += seconds
        if seconds and len(self.timeline) < TIMELINE:
            self.timeline.append(Interval(node.name, replica.number, start, self.env.now))
        parents = tuple(replica.holding)
        replica.holding = []
        least = max(s.min_version for s in taken)
        for j in range(node.produces):
            out = Sample(number * node.produces + j if node.produces > 1 else number, groups, least)
            yield from self._give(node, replica, out, parents if j == node.produces - 1 else ())
        if node.name in self.made:
            self._publish(node, groups)

    def _give(
        self, node: NodeSpec, replica: Replica, out: Sample, parents: tuple[tuple[Reader, Sample], ...]
    ) -> Waiting:
        def stored() -> None:
            replica.backlog -= 1
            for reader, record in parents:
                reader.port.edge.settle(record)
            if replica.room is not None and not replica.room.triggered:
                replica.room.succeed()

        while replica.backlog >= BACKLOG:
            replica.room = simpy.Event(self.env)
            yield replica.room
        replica.backlog += 1
        if self.edges[node.name].ports:
            self.edges[node.name].put(out, stored)
        else:
            stored()

    def _publish(self, node: NodeSpec, groups: list[tuple[int, int]]) -> None:
        """A version is made: into the ledger now, at the generators after `sync_s`."""
        times = self.made[node.name]
        self.trained[node.name] += len({k for k, _ in groups})
        if node.name == self.counted:
            version = len(times) - 1
            self.versions.append(self.env.now)
            self.ages.update(version - v for _, v in groups if v >= 0)
            for name, edge in self.edges.items():
                self.queues[name][edge.held] += 1
        times.append(self.env.now + self.scenario.sync_s)
        self._wake()
        if len(self.versions) >= self.scenario.steps and not self.over.triggered:
            self.over.succeed()

    def _change_event(self) -> simpy.Event:
        event = simpy.Event(self.env)
        self._changed.append(event)
        return event

    def _wake(self) -> None:
        waiting, self._changed = self._changed, []
        for event in waiting:
            event.succeed()

    def _fail(self, failure: Failure) -> Waiting:
        yield self.env.timeout(failure.at_s)
        node = self.spec.node(failure.node)
        replica = next(
            (r for r in self.replicas[node.name] if r.number == failure.replica and not r.leaving), None
        )
        if replica is None or replica.process is None or not replica.process.is_alive:
            return
        replica.process.interrupt()
        self.killed += 1
        held = [*replica.holding, *((r, s) for r in replica.readers for s in r.leave())]
        self._retire(node.name, replica)
        yield self.env.timeout(failure.detect_s)
        for reader, record in reversed(held):
            reader.port.give_back([record])
        yield self.env.timeout(max(0.0, failure.repair_s - failure.detect_s))
        self.start(node, replica.number)

    def _change(self, change: Change) -> Waiting:
        yield self.env.timeout(change.at_s)
        node = self.spec.node(change.node)
        here = sorted((r for r in self.replicas[node.name] if not r.leaving), key=lambda r: r.number)
        for number in range(len(here), change.replicas):
            self.start(node, number)
        for replica in here[change.replicas :]:
            replica.leaving = True
            for reader in replica.readers:
                reader.port.give_back(reader.leave())
            self._retire(node.name, replica)

    def _retire(self, name: str, replica: Replica) -> None:
        self.replicas[name].remove(replica)
        self.alive[name] += self.env.now - replica.began
