"""Synchronous dataflow: repetition vector, admission windows, and a symbolic run that finds deadlocks.

Source: Lee and Messerschmitt, "Synchronous Data Flow", Proc. IEEE 75(9), 1987. A loop is an edge with
`(staleness + 1) * window` initial tokens: the consumer's prompts are admitted up to that many ahead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from arriero.engine.errors import GraphError
from arriero.schemas.graph import Capacity, GraphSpec, NodeSpec


def repetitions(spec: GraphSpec) -> dict[str, int]:
    """Firings of each node in one iteration of the graph: the smallest positive integers that balance all edges.

    Raises GraphError naming a port that is fed at a rate its node can't keep.
    """
    rate: dict[str, Fraction] = {spec.nodes[0].name: Fraction(1)}
    todo = [spec.nodes[0].name]
    while todo:
        name = todo.pop()
        for other, factor, _ in _neighbours(spec, name):
            if other not in rate:
                rate[other] = rate[name] * factor
                todo.append(other)
        if not todo and (rest := [n.name for n in spec.nodes if n.name not in rate]):
            raise GraphError(f"{', '.join(rest)} is not connected to {spec.nodes[0].name}; use two graphs")
    for name in rate:
        for other, factor, port in _neighbours(spec, name):
            if rate[other] != rate[name] * factor:
                raise GraphError(
                    f"{port}: it is fed at {rate[name] * factor / rate[other]} of the rate its node needs; "
                    "groups and batch sizes must divide along every path"
                )
    scale = math.lcm(*(r.denominator for r in rate.values()))
    counts = {n: int(r * scale) for n, r in rate.items()}
    common = math.gcd(*counts.values())
    return {n: c // common for n, c in counts.items()}


def _neighbours(spec: GraphSpec, name: str) -> list[tuple[str, Fraction, str]]:
    """(neighbour, its firings per firing of `name`, port) over the edges at `name`; a loop sets no rate."""
    node = spec.node(name)
    down = [(c.name, Fraction(node.produces, i.consumes), f"{c.name}.{i.port}") for c, i in spec.consumers(name)]
    up = [
        (i.source, Fraction(i.consumes, spec.node(i.source).produces), f"{name}.{i.port}")
        for i in node.inputs
        if not i.loop
    ]
    return down + up


def ancestors(spec: GraphSpec, name: str) -> set[str]:
    """Nodes whose records reach `name` over edges, itself included."""
    found, todo = {name}, [name]
    while todo:
        for i in spec.node(todo.pop()).inputs:
            if not i.loop and i.source not in found:
                found.add(i.source)
                todo.append(i.source)
    return found


@dataclass(frozen=True, kw_only=True)
class Window:
    """Admission of one loop: the records of `sources` needed for one version, and the bound on staleness."""

    loop: str
    producer: str
    sources: tuple[str, ...]
    per_version: int
    staleness: int

    def limit(self, version: int, dropped: int) -> int:
        """Source records that may have been admitted while `version` is the newest: (v + S + 1) * groups."""
        return (version + self.staleness + 1) * self.per_version + dropped


def windows(spec: GraphSpec) -> tuple[Window, ...]:
    """One admission window per loop. Raises GraphError if a version doesn't take whole source records."""
    counts = repetitions(spec)
    found: list[Window] = []
    for loop in spec.loops:
        consumers = [n.name for n in spec.nodes for i in n.inputs if i.loop and i.source == loop.name]
        gated = set[str]().union(*(ancestors(spec, c) for c in consumers)) if consumers else set[str]()
        sources = tuple(n.name for n in spec.nodes if n.name in gated and not any(not i.loop for i in n.inputs))
        per = [Fraction(counts[s] * spec.node(s).produces, counts[loop.producer]) for s in sources]
        if any(p.denominator != 1 or p != per[0] for p in per):
            raise GraphError(
                f"loop {loop.name}: one version of {loop.producer} takes {per[0]} records of {sources[0]}; "
                "it must take a whole number"
            )
        if sources:
            found.append(
                Window(
                    loop=loop.name, producer=loop.producer, sources=sources, per_version=int(per[0]),
                    staleness=loop.staleness,
                )
            )  # fmt: skip
    return tuple(found)


def capacities(spec: GraphSpec) -> dict[str, Capacity]:
    """Capacity of every output edge: as stated, else twice a firing of its consumer and all that is admitted."""
    counts, admitted = repetitions(spec), windows(spec)
    return {n.name: n.capacity or _default_capacity(spec, n, counts, admitted) for n in spec.nodes}


def _default_capacity(
    spec: GraphSpec, node: NodeSpec, counts: dict[str, int], admitted: tuple[Window, ...]
) -> Capacity:
    takes = max((i.consumes for _, i in spec.consumers(node.name)), default=1)
    ahead = [
        math.ceil(Fraction((w.staleness + 1) * counts[node.name] * node.produces, counts[w.producer]))
        for w in admitted
    ]
    return Capacity(messages=max(2 * takes, 2 * node.produces, *ahead, 16))


def run_symbolically(spec: GraphSpec, capacity: dict[str, Capacity]) -> None:
    """Fire the nodes on counted tokens through `staleness + 2` iterations, within the capacities.

    A dataflow graph's self-timed run either completes for every order or for none, so one order decides:
    deadlock, capacity smaller than a firing, and reconvergent paths that starve each other.
    Raises GraphError that says who waits for what.
    """
    state = _Symbolic(spec, capacity)
    rounds = max((w.staleness for w in windows(spec)), default=0) + 2
    goal = {n: c * rounds for n, c in repetitions(spec).items()}
    moved = True
    while moved:
        moved = False
        for n in spec.nodes:
            while state.fired[n.name] < goal[n.name] and not state.blocked(n):
                state.fire(n)
                moved = True
    if waiting := [(n, w) for n in spec.nodes if state.fired[n.name] < goal[n.name] for w in state.blocked(n)]:
        lines = "; ".join(f"{n.name} waits for {what}" for n, what in waiting)
        raise GraphError(f"deadlock: {lines}; raise a capacity or lower what a firing takes")


class _Symbolic:
    """Tokens on every port; a place on an edge is given back when all its ports have taken the token."""

    def __init__(self, spec: GraphSpec, capacity: dict[str, Capacity]) -> None:
        self.spec, self.capacity, self.windows = spec, capacity, windows(spec)
        self.fired = {n.name: 0 for n in spec.nodes}
        self.tokens = {(n.name, i.port): 0 for n in spec.nodes for i in n.inputs if not i.loop}
        self.out: dict[str, list[tuple[str, str]]] = {
            n.name: [(c.name, i.port) for c, i in spec.consumers(n.name)] for n in spec.nodes
        }

    def blocked(self, node: NodeSpec) -> list[str]:
        """What the next firing of `node` waits for; empty if it can fire."""
        waits = [
            f"{i.source} ({self.tokens[node.name, i.port]} of {i.consumes})"
            for i in node.inputs
            if not i.loop and self.tokens[node.name, i.port] < i.consumes
        ]
        held = max((self.tokens[p] for p in self.out[node.name]), default=0)
        if self.out[node.name] and held + node.produces > self.capacity[node.name].messages:
            waits.append(f"room on its own output (holds {held} of {self.capacity[node.name].messages})")
        for w in self.windows:
            limit = w.limit(self.fired[w.producer], 0)
            if node.name in w.sources and (self.fired[node.name] + 1) * node.produces > limit:
                waits.append(f"loop {w.loop} to admit more than {limit}")
        return waits

    def fire(self, node: NodeSpec) -> None:
        for i in node.inputs:
            if not i.loop:
                self.tokens[node.name, i.port] -= i.consumes
        for port in self.out[node.name]:
            self.tokens[port] += node.produces
        self.fired[node.name] += 1
