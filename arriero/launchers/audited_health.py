"""What the gates found, found again from the steps on record.

A gate that looks at what the trainer measured is judged once more, for every step of the history; of one that
looks at the run around it (queues, event loops), and of a step that was stopped before it was made, the
measure isn't on record: then only what the event itself says can be checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from arriero.components.health import Gate, beyond, judge
from arriero.engine.graph import Graph
from arriero.engine.lineage.findings import Finding
from arriero.launchers.health import AROUND, Health, gates_of
from arriero.schemas.graph import GraphSpec
from arriero.schemas.ledger import Event, Trained, Unhealthy

Key = tuple[str, int, str]  # node, version, gate


def found_again(history: Sequence[Event], spec: GraphSpec, graph: Graph, *, noted: bool) -> Iterator[Finding]:
    """Events of gates that don't follow from the steps; if they were `noted`, those that are missing too."""
    gates = {g.name: g for g in gates_of(graph)}
    told = {_key(e): e for e in history if isinstance(e, Unhealthy)}
    due = {_key(e): e for e in _judged(history, spec, gates.values())}
    made = {(e.node, e.version) for e in history if isinstance(e, Trained)}
    for key, event in told.items():
        gate = gates.get(event.gate)
        where = f"step {event.version}"
        if gate is None:
            yield Finding(check="health", where=where, what=f"gate {event.gate} is none of the graph's")
        elif gate.measure in AROUND or key[:2] not in made:
            if why := _wrong(event, gate):
                yield Finding(check="health", where=where, what=why)
        elif (again := due.get(key)) is None or again != event:
            now = "nothing" if again is None else f"{again.level} at {again.value:g}, bound {again.bound:g}"
            what = (
                f"gate {event.gate} is said to {event.level} at {event.value:g}; by the record it finds {now}"
            )
            yield Finding(check="health", where=where, what=what)
    for key, event in due.items() if noted else ():
        if key not in told:
            what = f"gate {event.gate} finds {event.value:g}, bound {event.bound:g}; no event says so"
            yield Finding(check="health", where=f"step {event.version}", what=what)


def _judged(history: Iterable[Event], spec: GraphSpec, gates: Iterable[Gate]) -> Iterator[Unhealthy]:
    """What those gates find whose measures are on record."""
    known = [g for g in gates if g.measure not in AROUND]
    health = Health(spec)
    for event in history:
        health.event(event)
        if isinstance(event, Trained):
            yield from judge(known, health.history, event.version, event.node)


def _wrong(event: Unhealthy, gate: Gate) -> str:
    """What of the event can't be, whatever was measured."""
    bound = gate.stop if event.level == "stop" else gate.warn
    if event.measure != gate.measure or event.bound != bound:
        return (
            f"gate {gate.name} is told with {event.measure} and bound {event.bound:g}; the graph has others"
        )
    if not beyond(gate, event.value, event.bound):
        return (
            f"gate {gate.name} is said to {event.level} at {event.value:g}, which is within {event.bound:g}"
        )
    return ""


def _key(event: Unhealthy) -> Key:
    return event.node, event.version, event.gate
