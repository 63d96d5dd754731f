"""A run as it goes on, in numbers: what `arriero top` prints and `arriero ui` shows.

Nothing is asked of the run itself: who can read its directory can look, and nothing more.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from arriero.launchers.progress import doing
from arriero.launchers.rundir import RunDir
from arriero.launchers.vitals import Vitals, hubs_told, rooms
from arriero.schemas.graph import GraphSpec
from arriero.schemas.run import EdgeState, VitalsFile

_TAIL_BYTES = 1 << 20
Activity = Literal["starts", "works", "waits", "syncs", "ended"]
Flow = Literal["full", "flows", "empty"]
Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class NodeNow:
    """A node over all its replicas; rates are those since the look before, None where nothing is known."""

    name: str
    does: str
    activity: Activity
    idle: float | None
    records_per_s: float | None
    tokens_per_s: float | None
    heard_s: float | None


@dataclass(frozen=True, kw_only=True)
class EdgeNow:
    """An edge by the name of its producer, and who reads it (a backlog: nobody else).

    `full`: the producer waits for room, or there is none left.
    """

    name: str
    to: tuple[str, ...]
    messages: int
    capacity: int
    waiting: int
    leased: int
    fill: float
    flow: Flow


@dataclass(frozen=True, kw_only=True)
class Now:
    """The run as its launcher saw it `seen_s` ago; `warned`: the gates of the last step.

    `hubs`: what each of several does; empty for one.
    """

    run: str
    state: str
    step: int
    seen_s: float
    warned: tuple[str, ...]
    nodes: tuple[NodeNow, ...]
    edges: tuple[EdgeNow, ...]
    hubs: str = ""


class Observer:
    """Makes `Now` of what a launcher saw, again and again: rates are those since the time before."""

    def __init__(self, spec: GraphSpec) -> None:
        self._spec, self._rooms = spec, rooms(spec)
        self._before: VitalsFile | None = None

    def now(self, file: VitalsFile, lines: Lines, *, run: str, state: str) -> Now:
        """With `lines` of metrics.jsonl."""
        vitals, room = Vitals.read(file, time.time()), self._rooms
        found = Now(
            run=run,
            state=state,
            step=lines[-1]["step"] if lines else file.step,
            seen_s=max(time.time() - file.time, 0.0),
            warned=tuple(lines[-1].get("health") or {}) if lines else (),
            hubs=hubs_told(file.hubs),
            nodes=tuple(self._node(n.name, file, vitals) for n in self._spec.nodes),
            edges=tuple(
                self._edge(k, e, vitals, max(room.get(k, e.capacity), 1)) for k, e in file.edges.items()
            ),
        )
        self._before = file
        return found

    def _node(self, name: str, file: VitalsFile, vitals: Vitals) -> NodeNow:
        new = _sums(file, name)
        old = _sums(self._before, name) if self._before else (0.0, 0.0, 0, 0)
        busy_s, idle_s, given, tokens = (a - b for a, b in zip(new, old, strict=True))
        span = busy_s + idle_s
        per_s = self._spec.node(name).replicas / span if span > 0 else None
        known = vitals.nodes(name)
        return NodeNow(
            name=name, does=doing(vitals, name), activity=activity(vitals, name),
            idle=idle_s / span if span > 0 else None,
            records_per_s=given * per_s if per_s else None,
            tokens_per_s=tokens * per_s if per_s and tokens else None,
            heard_s=max((age_s for *_, age_s in known), default=None),
        )  # fmt: skip

    def _edge(self, name: str, edge: EdgeState, vitals: Vitals, room: int) -> EdgeNow:
        held_up = any(s.waits_for.startswith("room on") for _, s, _ in vitals.nodes(name))
        full = held_up or edge.messages >= room
        return EdgeNow(
            name=name, to=tuple(dict.fromkeys(n.name for n, _ in self._spec.consumers(name))),
            messages=edge.messages, capacity=edge.capacity, waiting=sum(edge.waiting.values()),
            leased=sum(edge.leased.values()), fill=min(edge.messages / room, 1.0),
            flow="full" if full else "flows" if edge.messages else "empty",
        )  # fmt: skip


class Look:
    """One who looks at a run's directory again and again. UserError if it is none."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self.spec: GraphSpec = run.read_graph()
        self._observer = Observer(self.spec)

    def over(self) -> bool:
        return self._run.summary.exists()

    def now(self, lines: Lines) -> Now | None:
        """The run, with `lines` of metrics.jsonl; None before any heartbeat."""
        if not self._run.vitals.exists():
            return None
        state = self._run.read_summary().state if self.over() else "goes on"
        return self._observer.now(self._run.read_vitals(), lines, run=self._run.path.name, state=state)


def activity(vitals: Vitals, node: str) -> Activity:
    """What most of a node's replicas do: it waits only if all of them wait, and syncs if one is at that."""
    known = [s for _, s, _ in vitals.nodes(node)]
    if not known:
        return "starts"
    if all(s.ended for s in known):
        return "ended"
    left = [s for s in known if not s.ended]
    if any(syncs(s.waits_for) for s in left):
        return "syncs"
    return "waits" if all(s.waits_for for s in left) else "works"


def syncs(waits_for: str) -> bool:
    """Whether a wait is one for weights."""
    return waits_for.startswith(("version ", "a version "))


def last_lines(path: Path) -> list[dict[str, Any]]:
    """The last steps of metrics.jsonl; of a long file only its end is read."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL_BYTES))
        texts = file.read().split(b"\n")
    whole = texts[1:-1] if size > _TAIL_BYTES else texts[:-1]  # a torn first one, an unfinished last one
    return [json.loads(text) for text in whole if text]


def _sums(file: VitalsFile, node: str) -> tuple[float, float, int, int]:
    """Busy and idle seconds, records given and tokens of all replicas of a node."""
    found = [n for p in file.pulses.values() if not p.status.rank for n in p.status.nodes if n.node == node]
    return (
        sum(n.busy_s for n in found), sum(n.idle_s for n in found), sum(n.given for n in found),
        sum(n.tokens for n in found),
    )  # fmt: skip
