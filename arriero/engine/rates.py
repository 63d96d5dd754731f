"""Synchronous dataflow: repetition vector, admission windows, and a symbolic run that finds deadlocks.

Source: Lee and Messerschmitt, "Synchronous Data Flow", Proc. IEEE 75(9), 1987. A loop is an edge with
`(staleness + 1) * window` initial tokens: the consumer's prompts are admitted up to that many ahead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from arriero.engine.backlog import backlog_edge
from arriero.engine.errors import GraphError
from arriero.schemas.graph import Capacity, GraphSpec, InputSpec, LoopSpec, NodeSpec


def repetitions(spec: GraphSpec) -> dict[str, int]:
    """Firings of each node in one iteration: the smallest positive integers that balance all edges.

    Raises GraphError naming a port that is fed at a rate its node can't keep, or a node without connection.
    """
    return dict(_repetitions(spec))


def ancestors(spec: GraphSpec, name: str) -> set[str]:
    """Nodes whose records reach `name` over edges, itself included."""
    nodes = _edges(spec).nodes
    found, todo = {name}, [name]
    while todo:
        for i in nodes[todo.pop()].inputs:
            if not i.loop and i.source not in found:
                found.add(i.source)
                todo.append(i.source)
    return found


def by_record(spec: GraphSpec, name: str) -> bool:
    """Whether the node takes single records, several for each iteration, which may be under way together."""
    node = _edges(spec).nodes[name]
    takes = [i.consumes for i in node.inputs if not i.loop]
    return node.ranks == 1 and bool(takes) and set(takes) == {1} and _repetitions(spec)[name] > 1


def records_per_firing(spec: GraphSpec, name: str) -> dict[str, Fraction]:
    """For each source upstream of `name`: its records that go into one firing of `name`."""
    counts, nodes = _repetitions(spec), _edges(spec).nodes
    sources = [n for n in ancestors(spec, name) if _is_source(nodes[n])]
    return {s: Fraction(counts[s] * nodes[s].produces, counts[name]) for s in sorted(sources)}


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
    return _windows_once(_Same(spec))


def capacities(spec: GraphSpec) -> dict[str, Capacity]:
    """Capacity of every output edge: as stated, else enough that no edge holds the graph up.

    That is twice a firing at either end, one whole iteration (so that reconvergent paths can't starve each
    other) and all that the loops admit.
    """
    counts, admitted = _repetitions(spec), windows(spec)
    return {n.name: n.capacity or _default_capacity(spec, n, counts, admitted) for n in spec.nodes}


def fusible(spec: GraphSpec) -> frozenset[str]:
    """The nodes whose output need not leave the process: all who read it are in the same role.

    A source's has to, for nobody could make its records again, and so has that of several ranks.
    """
    readers = _edges(spec).readers
    return frozenset(
        n.name
        for n in spec.nodes
        if not _is_source(n) and n.ranks == 1 and readers[n.name]
        if all(reader.role == n.role for reader, _ in readers[n.name])
    )


def backlogs(spec: GraphSpec) -> dict[str, Capacity]:
    """Capacity of the edge that a node puts back on: what it wants, but no more than twice what loops admit.

    Twice, because a continuation lies beside the one whose place it takes for a moment. Nobody waits for room
    on such an edge, so it adds nothing to the flow of records and no way to a deadlock.
    """
    nodes = [n for n in spec.nodes if n.puts_back]
    admitted = max((w.limit(0, 0) for w in windows(spec)), default=0) if nodes else 0
    most = 2 * max(admitted, 16)
    return {backlog_edge(n.name): Capacity(messages=min(n.puts_back, most)) for n in nodes}


def run_symbolically(spec: GraphSpec, capacity: Mapping[str, Capacity]) -> None:
    """Fire the nodes on counted tokens through one iteration, within the capacities and admission windows.

    In a synchronous dataflow graph every order of firing gets equally far, and an iteration leaves the tokens
    as it found them, so one order and one iteration decide: deadlock, capacity smaller than a firing, and
    reconvergent paths that starve each other. Raises GraphError that says who waits for what.
    """
    state = _Symbolic(spec, capacity)
    while state.advance():
        pass
    if waiting := [(n.name, state.blocked(n)) for n in spec.nodes if state.missing[n.name]]:
        lines = "; ".join(f"{name} waits for {' and '.join(what)}" for name, what in waiting)
        full = any(name for name, _ in waiting if state.full(name))
        remedy = "raise a capacity" if full else "raise the staleness"
        raise GraphError(f"deadlock: {lines}; {remedy} or lower what a firing takes")


@dataclass(frozen=True, kw_only=True)
class _Edges:
    """The nodes by name, and who reads the output of each over edges."""

    nodes: Mapping[str, NodeSpec]
    readers: Mapping[str, tuple[tuple[NodeSpec, InputSpec], ...]]

    def factor(self, port: InputSpec) -> Fraction:
        """Firings of the node at `port` per firing of the node that feeds it."""
        return Fraction(self.nodes[port.source].produces, port.consumes)

    def neighbours(self, name: str) -> list[tuple[str, Fraction]]:
        """(neighbour, its firings per firing of `name`) for each edge at `name`; a loop sets no rate."""
        down = [(reader.name, self.factor(i)) for reader, i in self.readers[name]]
        return down + [(i.source, 1 / self.factor(i)) for i in self.nodes[name].inputs if not i.loop]


class _Same:
    """A cache key: the very same graph. To compare two graphs by value takes longer than to work all out."""

    def __init__(self, spec: GraphSpec) -> None:
        self.spec = spec

    def __hash__(self) -> int:
        return id(self.spec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.spec is self.spec


def _edges(spec: GraphSpec) -> _Edges:
    return _edges_once(_Same(spec))


def _repetitions(spec: GraphSpec) -> Mapping[str, int]:
    return _repetitions_once(_Same(spec))


# The runtime asks for the same graph again and again.
@lru_cache(maxsize=32)
def _edges_once(key: _Same) -> _Edges:
    spec = key.spec
    readers: dict[str, list[tuple[NodeSpec, InputSpec]]] = {n.name: [] for n in spec.nodes}
    for n in spec.nodes:
        for i in n.inputs:
            if not i.loop:
                readers[i.source].append((n, i))
    return _Edges(
        nodes={n.name: n for n in spec.nodes}, readers={name: tuple(found) for name, found in readers.items()}
    )


@lru_cache(maxsize=32)
def _repetitions_once(key: _Same) -> Mapping[str, int]:
    spec = key.spec
    edges, first = _edges(spec), spec.nodes[0].name
    rate, found = {first: Fraction(1)}, [first]
    for name in found:  # grows while it is read: nearest nodes first
        for other, factor in edges.neighbours(name):
            if other not in rate:
                rate[other] = rate[name] * factor
                found.append(other)
    if apart := [n.name for n in spec.nodes if n.name not in rate]:
        raise GraphError(f"{', '.join(apart)}: not connected to {first}; use one graph for each part")
    for name, node in edges.nodes.items():
        for i in node.inputs:
            if not i.loop and (fed := rate[i.source] * edges.factor(i) / rate[name]) != 1:
                raise GraphError(
                    f"{name}.{i.port}: {i.source} feeds it at {fed} of the rate its node needs; "
                    "groups and batch sizes must divide along every path"
                )
    scale = math.lcm(*(r.denominator for r in rate.values()))
    counts = {n.name: int(rate[n.name] * scale) for n in spec.nodes}
    common = math.gcd(*counts.values())
    return {name: count // common for name, count in counts.items()}


@lru_cache(maxsize=32)
def _windows_once(key: _Same) -> tuple[Window, ...]:
    found = [_window(key.spec, loop) for loop in key.spec.loops]
    return tuple(w for w in found if w is not None)


def _window(spec: GraphSpec, loop: LoopSpec) -> Window | None:
    """None for a loop that no source stands behind: it holds nobody back."""
    counts, nodes = _repetitions(spec), _edges(spec).nodes
    readers = [n.name for n in spec.nodes if any(i.loop and i.source == loop.name for i in n.inputs)]
    gated = set[str]().union(*(ancestors(spec, r) for r in readers))
    sources = tuple(n.name for n in spec.nodes if n.name in gated and _is_source(n))
    if not sources:
        return None
    per = {s: Fraction(counts[s] * nodes[s].produces, counts[loop.producer]) for s in sources}
    for source, records in per.items():
        if records.denominator != 1:
            raise GraphError(
                f"loop {loop.name}: one version of {loop.producer} takes {records} records of {source}; "
                "it must take a whole number"
            )
    if len(set(per.values())) > 1:
        takes = ", ".join(f"{records} of {source}" for source, records in per.items())
        raise GraphError(
            f"loop {loop.name}: one version of {loop.producer} takes {takes}; "
            "sources behind one loop must give equally many"
        )
    return Window(
        loop=loop.name, producer=loop.producer, sources=sources, per_version=int(per[sources[0]]),
        staleness=loop.staleness,
    )  # fmt: skip


def _is_source(node: NodeSpec) -> bool:
    return all(i.loop for i in node.inputs)


def _default_capacity(
    spec: GraphSpec, node: NodeSpec, counts: Mapping[str, int], admitted: tuple[Window, ...]
) -> Capacity:
    takes = max((i.consumes for _, i in _edges(spec).readers[node.name]), default=1)
    given = counts[node.name] * node.produces  # in one iteration
    ahead = [math.ceil(Fraction((w.staleness + 1) * given, counts[w.producer])) for w in admitted]
    return Capacity(messages=max(2 * takes, 2 * node.produces, given, *ahead, 16))


class _Symbolic:
    """Tokens on every port; a place on an edge is given back when all its ports have taken the token.

    Where a reader's own output stays in its process, the place is given back with that of the output.
    """

    def __init__(self, spec: GraphSpec, capacity: Mapping[str, Capacity]) -> None:
        self.spec, self.capacity, self.windows = spec, capacity, windows(spec)
        self.missing = dict(_repetitions(spec))
        self.fired = dict.fromkeys(self.missing, 0)
        self.tokens = {(n.name, i.port): 0 for n in spec.nodes for i in n.inputs if not i.loop}
        self.nodes, readers = _edges(spec).nodes, _edges(spec).readers
        self.out = {name: [(c.name, i.port) for c, i in found] for name, found in readers.items()}
        self.chained = {
            (c.name, i.port): Fraction(i.consumes, c.produces)
            for found in readers.values()
            for c, i in found
            if c.name in fusible(spec)
        }

    def advance(self) -> bool:
        """Fire every node as often as it can now; false if none could."""
        moved = False
        for n in self.spec.nodes:
            if times := min(self.missing[n.name], *(can for can, _ in self._limits(n))):
                self._fire(n, times)
                moved = True
        return moved

    def blocked(self, node: NodeSpec) -> list[str]:
        """What the next firing of `node` waits for; empty if it can fire."""
        return [what for can, what in self._limits(node) if can == 0]

    def full(self, name: str) -> bool:
        """Whether the output of node `name` has no room for a firing."""
        return self.held(name) + self.nodes[name].produces > self.capacity[name].messages

    def held(self, name: str) -> int:
        """Records on the output of node `name` that not all of its readers have answered for."""
        return max((self.tokens[p] + self._unanswered(p) for p in self.out[name]), default=0)

    def _unanswered(self, port: tuple[str, str]) -> int:
        """Records that were taken at `port`, while what was made of them is held in the same process."""
        if (records := self.chained.get(port)) is None:
            return 0
        return math.ceil(records * self.held(port[0]))

    def _limits(self, node: NodeSpec) -> list[tuple[int, str]]:
        """How often `node` could fire in a row as far as each input, its output and each loop go."""
        limits: list[tuple[int, str]] = []
        for i in node.inputs:
            if not i.loop:
                there = self.tokens[node.name, i.port]
                limits.append((there // i.consumes, f"{i.source} ({there} of {i.consumes} records)"))
        if self.out[node.name]:
            held, room = self.held(node.name), self.capacity[node.name].messages
            limits.append(((room - held) // node.produces, f"room on its output ({held} of {room} taken)"))
        for w in self.windows:
            if node.name in w.sources:
                limit = w.limit(self.fired[w.producer], 0)
                can = limit // node.produces - self.fired[node.name]
                limits.append((can, f"loop {w.loop} to admit more than {limit} records"))
        return limits or [(self.missing[node.name], "")]

    def _fire(self, node: NodeSpec, times: int) -> None:
        for i in node.inputs:
            if not i.loop:
                self.tokens[node.name, i.port] -= i.consumes * times
        for port in self.out[node.name]:
            self.tokens[port] += node.produces * times
        self.fired[node.name] += times
        self.missing[node.name] -= times
