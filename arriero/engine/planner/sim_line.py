"""Which graphs are a line: one record at a time to one batch, one batch at a time to the loop's producer."""

from __future__ import annotations

from dataclasses import dataclass

from arriero.engine.planner.scenario import Scenario
from arriero.engine.planner.times import ZERO
from arriero.engine.rates import Window, capacities, windows
from arriero.schemas.graph import GraphSpec, NodeSpec


@dataclass(frozen=True, kw_only=True)
class Line:
    """Its nodes in order of the data."""

    source: NodeSpec
    nodes: tuple[NodeSpec, ...]  # one record each
    loop_at: int  # which of them reads the loop
    batch: NodeSpec
    after: tuple[NodeSpec, ...]  # one batch each, the producer last
    window: Window


def line_of(spec: GraphSpec, scenario: Scenario) -> Line | None:
    """`spec` as a line, or None if it isn't one or the scenario needs events."""
    found = windows(spec)
    if len(found) != 1 or len(spec.loops) != 1 or scenario.failures or scenario.changes or scenario.want:
        return None
    window, room = found[0], capacities(spec)
    order = [spec.node(window.sources[0])]
    while readers := list(spec.consumers(order[-1].name)):
        reader = readers[0][0]
        if len(readers) > 1 or sum(not i.loop for i in reader.inputs) > 1:
            return None
        order.append(reader)
    if len(order) != len(spec.nodes) or order[-1].name != window.producer or order[0].produces > 1:
        return None
    takes = [next(i.consumes for i in n.inputs if not i.loop) for n in order[1:]]
    at = next((k for k, count in enumerate(takes) if count == window.per_version), None)
    if (
        at is None
        or any(c != 1 for k, c in enumerate(takes) if k != at)
        or any(n.produces > 1 for n in order)
    ):
        return None
    nodes, loops = tuple(order[1 : at + 1]), [any(i.loop for i in n.inputs) for n in order[1:]]
    if sum(loops) != 1 or not any(loops[:at]) or scenario.times.get(order[0].name, ZERO).mean:
        return None
    held = [(window.staleness + 1) * (window.per_version if k <= at else 1) for k in range(len(order) - 1)]
    if any(room[n.name].messages < most for n, most in zip(order[:-1], held, strict=True)):
        return None
    return Line(
        source=order[0], nodes=nodes, loop_at=loops.index(True), batch=order[at + 1],
        after=tuple(order[at + 2 :]), window=window,
    )  # fmt: skip
