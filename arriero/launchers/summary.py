"""The numbers of a run, folded from its ledger events and heartbeats, and the screen that shows them."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Literal

from arriero.engine.planner.calibrate import expected, firings
from arriero.engine.planner.cycles import Cycle
from arriero.engine.runtime.ledger import Ledger
from arriero.launchers.evaluations import Evaluations, evaluation_table
from arriero.launchers.record_times import RecordTimes
from arriero.schemas.graph import GraphSpec, NodeSpec
from arriero.schemas.ledger import Event, Trained
from arriero.schemas.run import NodeStatus, RecordTime, RoleStatus, RunSummary

log = logging.getLogger(__name__)

State = Literal["finished", "failed", "stopped"]
_EDGE_SHARE = 0.1  # of the steps: what `reward_first` and `reward_last` are means of
_WARM_UP = 2  # steps that `step_s` leaves out, if enough are left


_Life = tuple[str, int, int]  # node, replica, process


class Account:
    """Statistics so far. A node's time runs from its first record to the last heartbeat with progress."""

    def __init__(self, spec: GraphSpec) -> None:
        self._spec = spec
        self._trained: list[tuple[float, float]] = []  # time and mean reward, by version
        self._trainer = ""
        self.evaluations = Evaluations()
        self._begun: dict[_Life, NodeStatus] = {}  # when it first had fired
        self._work: dict[_Life, NodeStatus] = {}  # at its last progress
        self._until: dict[_Life, float] = {}  # when that was
        self._records = RecordTimes(spec)
        self._counts: dict[tuple[str, int], Mapping[str, int]] = {}  # of the last heartbeat, or of the end

    def event(self, event: Event, at_s: float) -> None:
        """`at_s`: any clock in seconds, the same for all events; not a number for one of an earlier life."""
        self.evaluations.event(event)
        match event:
            case Trained():
                self._trained.append((at_s, event.reward_mean))
                self._trainer = self._trainer or event.node
                self._records.trained(event.origins)
            case _:
                pass

    def heartbeat(self, status: RoleStatus, at_s: float) -> None:
        """Ranks above 0 work in step with rank 0 and aren't counted. `at_s`: any clock, the same for all."""
        for node in status.nodes if status.rank == 0 else ():
            self._counts[node.node, status.replica] = node.counts
            key = (node.node, status.replica, status.pid)
            last = self._work.get(key)
            if last is None or (node.taken, node.given, node.tokens) != (last.taken, last.given, last.tokens):
                self._work[key], self._until[key] = node, at_s
            self._records.heartbeat(node, status.replica)
            if node.taken or node.given:
                self._begun.setdefault(key, node)

    def ended(self, counts: Mapping[tuple[str, int], Mapping[str, int]]) -> None:
        """The counters of nodes and replicas at their end."""
        self._counts.update(counts)

    @property
    def steps(self) -> int:
        return len(self._trained)

    def step_s(self) -> float | None:
        """Median seconds between versions, after the first two where four or more were made."""
        times = [at for at, _ in self._trained if not math.isnan(at)]
        gaps = [b - a for a, b in pairwise(times[_WARM_UP:] if len(times) >= _WARM_UP + 2 else times)]
        return median(gaps) if gaps else None

    def firing_s(self) -> dict[str, float]:
        """Seconds of one firing of each node; empty before every node has fired.

        Measured between two heartbeats of a replica, so that what it needed to start doesn't count, or up to
        the only one there is. Per firing, so that held-out prompts and a heartbeat missed don't either.
        """
        found = {n.name: self._firing_s(n) for n in self._spec.nodes}
        known = {name: seconds for name, seconds in found.items() if seconds is not None}
        return known if len(known) == len(found) else {}

    def _firing_s(self, node: NodeSpec) -> float | None:
        for begun in (self._begun, dict[_Life, NodeStatus]()):
            busy_s = fired = 0.0
            for key, last in self._work.items():
                if key[0] == node.name:
                    first = begun.get(key, NodeStatus(node=node.name))
                    busy_s += last.busy_s - first.busy_s
                    fired += firings(node, taken=last.taken - first.taken, given=last.given - first.given)
            if fired > 0:
                return busy_s / fired
        return None

    def idle_share(self) -> dict[str, float]:
        """Per role: the share of its processes' time in which none of its nodes worked."""
        return {
            role: fmean(1 - min(sum(s.busy_s for s in p) / _span(p), 1.0) for p in spans)
            for role in self._spec.roles
            if (spans := [p for p, _ in self._processes(role) if _span(p) > 0])
        }

    def tokens_per_s(self) -> dict[str, float]:
        """Per role that counts tokens: all of them, over the time from its first to its last work.

        Replicas that left, or were started again, count with what they did, whoever else worked then.
        """
        rates: dict[str, float] = {}
        for role in self._spec.roles:
            lives = [(p, until) for p, until in self._processes(role) if _span(p) > 0]
            if tokens := sum(s.tokens for p, _ in lives for s in p):
                began = min(until - _span(p) for p, until in lives)
                rates[role] = tokens / (max(until for _, until in lives) - began)
        return rates

    def summary(self, ledger: Ledger, *, state: State, error: str, wall_s: float) -> RunSummary:
        rewards = [reward for _, reward in self._trained]
        edge = max(1, round(len(rewards) * _EDGE_SHARE))
        reports = [r for v in self.evaluations.versions for r in self.evaluations.report(v)]
        whole = [r.pass_at[1].value if r.pass_at else None for r in reports if not r.source]
        firing_s = self.firing_s() if self._trained else {}
        record_s = self._records.found(leave_out=_WARM_UP) if firing_s else {}
        predicted_s, bound = self._expected(firing_s, record_s)
        return RunSummary(
            state=state,
            steps=self.steps,
            reward_first=fmean(rewards[:edge]) if rewards else None,
            reward_last=fmean(rewards[-edge:]) if rewards else None,
            accuracy_before=whole[0] if whole else None,
            accuracy_after=whole[-1] if len(whole) > 1 else None,
            evaluations=tuple(reports),
            staleness_bound=max((loop.staleness for loop in self._spec.loops), default=None),
            staleness_max=ledger.staleness_max,
            groups_admitted=ledger.admitted,
            groups_trained=ledger.trained,
            groups_dropped={k: v for k, v in ledger.dropped.items() if v},
            counts=dict(sum((Counter(c) for c in self._counts.values()), Counter[str]())),
            tokens_per_s=self.tokens_per_s(),
            idle_share=self.idle_share(),
            wall_s=wall_s,
            step_s=self.step_s(),
            firing_s=firing_s,
            record_s=record_s,
            predicted_step_s=predicted_s,
            bound_step_s=bound.seconds if bound else None,
            bound_nodes=bound.nodes if bound else (),
            error=error,
        )

    def _expected(
        self, firing_s: dict[str, float], record_s: dict[str, RecordTime]
    ) -> tuple[float, Cycle] | tuple[None, None]:
        try:
            return expected(self._spec, firing_s, record_s) if firing_s else (None, None)
        except (RuntimeError, ValueError):  # how a run ended must be told, whatever the planner makes of it
            log.warning("no prediction of the step", exc_info=True)
            return None, None

    def _processes(self, role: str) -> list[tuple[list[NodeStatus], float]]:
        """The statuses of the role's nodes, and when they last did something, process by process."""
        nodes = self._spec.roles[role]
        lives = sorted({(replica, pid) for name, replica, pid in self._work if name == nodes[0].name})
        found = [[k for n in nodes if (k := (n.name, *life)) in self._work] for life in lives]
        return [([self._work[k] for k in keys], max(self._until[k] for k in keys)) for keys in found]


def _span(nodes: Iterable[NodeStatus]) -> float:
    return max(s.busy_s + s.idle_s for s in nodes)


def result_screen(s: RunSummary, run_dir: Path) -> str:
    """What a run came to, on one screen."""
    lines = [f"{s.state} after {_plural(s.steps, 'step')} in {s.wall_s:.1f} s"]
    if s.accuracy_before is not None:
        after = f" -> {s.accuracy_after:.1%}" if s.accuracy_after is not None else ""
        lines.append(_row("accuracy", f"{s.accuracy_before:.1%}{after} of held-out samples"))
    if s.reward_first is not None and s.reward_last is not None:
        lines.append(_row("reward", f"{s.reward_first:.3f} -> {s.reward_last:.3f}"))
    first_and_last = {r.version for r in (*s.evaluations[:1], *s.evaluations[-1:])}
    if shown := [r for r in s.evaluations if r.version in first_and_last]:
        lines += [f"  {line}" for line in evaluation_table(shown).splitlines()]
    bound = "no loop" if s.staleness_bound is None else f"bound {s.staleness_bound}"
    lines.append(_row("staleness", f"at most {s.staleness_max} ({bound})"))
    dropped = ", ".join(f"{n} {reason}" for reason, n in sorted(s.groups_dropped.items()))
    lines.append(
        _row(
            "prompts",
            f"{s.groups_admitted} admitted, {s.groups_trained} trained, dropped: {dropped or 'none'}",
        )
    )
    if s.step_s is not None and s.predicted_step_s is not None and s.bound_step_s is not None:
        held = ", ".join(dict.fromkeys(n.partition(":")[0] for n in s.bound_nodes))
        # The median may be below what mean times allow: on a busy machine single firings take long.
        predicted = f"predicted {s.predicted_step_s:.3g}, at least {s.bound_step_s:.3g}: {held}"
        lines.append(_row("seconds/step", f"{s.step_s:.3g} in the median (of mean times: {predicted})"))
    lines += [_row("tokens/s", _list(s.tokens_per_s, "{:.0f}"))] if s.tokens_per_s else []
    lines += [_row("idle", _list(s.idle_share, "{:.0%}"))] if s.idle_share else []
    if s.health:
        lines.append(
            _row("warned of", ", ".join(f"{k} in {_plural(n, 'step')}" for k, n in s.health.items()))
        )
    lines.append(_row("record", str(run_dir)))
    if s.state == "stopped" and s.steps and not (run_dir / "model").is_dir():
        lines.append(_row("model", "not saved: only a run that ends by itself leaves one in model/"))
    if s.lineage is not None:
        lines.append(_row("head", f"{s.lineage.head} ({s.lineage.entries} entries), for arriero audit"))
    return "\n".join(lines)


def _row(name: str, value: str) -> str:
    return f"  {name:<13} {value}"


def _list(values: dict[str, float], form: str) -> str:
    return ", ".join(f"{k} {form.format(v)}" for k, v in values.items())


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
