"""The health of a run as the launcher sees it: the trainer's measures, and those of the run around it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping

from arriero.components.health import Gate, HasGates, HealthGates, judge
from arriero.engine.graph import Graph
from arriero.engine.rates import repetitions
from arriero.launchers.vitals import Vitals
from arriero.schemas.graph import GraphSpec
from arriero.schemas.ledger import DroppedEvent, Event, Resumed, Trained, Unhealthy

Numbers = dict[str, float | int | None]
AROUND = ("lag_s", "imbalance")  # measures of the run around a step, which no ledger has


class Health:
    """Judges each step by the gates of the graph's trainer; by the defaults where it names none."""

    def __init__(self, spec: GraphSpec) -> None:
        self._spec = spec
        self._gates = gates_of(Graph.from_spec(spec))
        self._needs = {g.measure for g in self._gates} | {g.enough[0] for g in self._gates}
        self.history: list[dict[str, float]] = []  # measures of all steps so far
        self._stale = 0  # groups dropped since the last step
        self._clock: dict[str, tuple[float, float]] = {}  # busy and idle seconds of trainers at the last step
        self._last: set[str] = set()
        self.found: list[Unhealthy] = []  # of the newest step
        self._counts: Counter[str] = Counter()

    @property
    def warned(self) -> dict[str, int]:
        """Of how many steps each gate has warned."""
        return dict(self._counts)

    def event(self, event: Event) -> None:
        """Every event of the ledger, also those of earlier lives of the run."""
        match event:
            case DroppedEvent() if event.reason == "stale":
                self._stale += len(event.origins)
            case Trained():
                groups = self._stale + len(event.origins)
                own = {"stale_share": self._stale / groups if groups else 0.0}
                self.history.append(self._kept(measures(event) | own))
                self._stale = 0
            case Resumed():
                del self.history[max(event.versions.values(), default=0) :]
            case _:
                pass

    def step(
        self, event: Trained, vitals: Vitals, tell: Callable[[Unhealthy], None]
    ) -> dict[str, float | int | dict[str, float | int | None] | None]:
        """What to note of the step, whose event was heard: own measures, and 1 (warned) or 2 by gate.

        `tell` is called with what wasn't so at the step before.
        """
        own = {"lag_s": _lag_s(vitals), "imbalance": self._imbalance(vitals)}
        self.history[-1] |= self._kept(own)
        self.found = judge(self._gates, self.history, event.version, event.node)
        self._counts.update(f.gate for f in self.found)
        for finding in self.found:
            if finding.gate not in self._last or finding.level == "stop":
                tell(finding)
        self._last = {f.gate for f in self.found}
        noted = {f.gate: (2 if f.level == "stop" else 1) for f in self.found}
        shares: Numbers = {"stale_share": self.history[-1].get("stale_share"), **own}
        return {**shares, "health": Numbers(noted)}

    def _kept(self, measured: Mapping[str, float]) -> dict[str, float]:
        """What gates look at, and what their messages tell."""
        return {k: v for k, v in measured.items() if k in self._needs or k.startswith("fresh_")}

    def _imbalance(self, vitals: Vitals) -> float:
        """How full the fullest queue is, up to what one step takes, times the trainer's idle share since the
        last step.
        """
        idle = self._idle_share(vitals)
        counts = repetitions(self._spec)
        fill = max(
            (
                min(
                    max(depth.waiting.values(), default=0) / (counts[name] * self._spec.node(name).produces),
                    1.0,
                )
                for name, depth in vitals.depths.items()
                if name in counts
            ),
            default=0.0,
        )
        return fill * idle

    def _idle_share(self, vitals: Vitals) -> float:
        shares = [0.0]
        for loop in self._spec.loops:
            now = [(s.busy_s, s.idle_s) for _, s, _ in vitals.nodes(loop.producer)]
            busy_s, idle_s = sum(b for b, _ in now), sum(i for _, i in now)
            busy_then, idle_then = self._clock.get(loop.producer, (0.0, 0.0))
            span = busy_s + idle_s - busy_then - idle_then
            if span > 0:
                shares.append(min(max((idle_s - idle_then) / span, 0.0), 1.0))
                self._clock[loop.producer] = (busy_s, idle_s)
        return max(shares)


def measures(event: Trained) -> dict[str, float]:
    """The measures of a step that the ledger has."""
    own = {"tokens": float(event.tokens), "staleness_mean": event.staleness_mean}
    return {k: v for k, v in event.metrics.items() if math.isfinite(v)} | own


def gates_of(graph: Graph) -> tuple[Gate, ...]:
    """The gates of the first component that has any."""
    own = (n.component for n in graph.nodes.values())
    return next((tuple(c.gates()) for c in own if isinstance(c, HasGates)), HealthGates().gates())


def _lag_s(vitals: Vitals) -> float:
    return max((p.status.lag_s for p in vitals.pulses.values()), default=0.0)
