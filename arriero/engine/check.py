"""Static checks: everything that can be known to fail is refused before anything starts.

In three steps, each listing all it finds: the parts (connected, closed, portable), their places (replicas,
ranks, capacities, what the components themselves know), and the flow of records between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from arriero.engine.component import HasProblems, Recovers
from arriero.engine.errors import GraphError
from arriero.engine.graph import Graph, Node, node_spec
from arriero.engine.portable import import_path, resolve
from arriero.engine.rates import (
    ancestors,
    capacities,
    records_per_firing,
    repetitions,
    run_symbolically,
    windows,
)
from arriero.engine.stream import Loop
from arriero.schemas.graph import GraphSpec, NodeSpec
from arriero.schemas.messages import Prompt

T = TypeVar("T")


def check(graph: Graph) -> GraphSpec:
    """The graph as data. Raises GraphError that lists the problems found, one per line."""
    if not graph.nodes and not graph.unconnected:
        raise GraphError(f"graph {graph.name} is empty; add components to it")
    _refuse([*_unconnected(graph), *_loop_problems(graph), *_unknown_sources(graph), *_not_portable(graph)])
    spec = graph.spec()
    looks = (replica_problems, _capacity_problems, _backlog_problems)
    places = [p for n in spec.nodes for look in looks for p in look(spec, n)]
    problems = [*_unread_loops(spec), *_closer_problems(spec), *_role_problems(spec), *places]
    problems += _component_problems(graph, spec)
    problems += _caught(partial(repetitions, spec)) or [
        *_source_problems(spec),
        *_caught(partial(windows, spec)),
        *(p for n in spec.nodes for p in _rank_problems(spec, n)),
    ]
    _refuse(problems)
    run_symbolically(spec, capacities(spec))
    return spec


@dataclass(frozen=True, kw_only=True)
class PlacedView:
    """A node's surroundings, for its own `problems`."""

    graph: Graph
    spec: GraphSpec
    node: Node

    @property
    def ranks(self) -> int:
        """How many ranks the node has."""
        return self.node.ranks

    @property
    def replicas(self) -> int:
        """How many replicas the node has."""
        return self.node.replicas

    @property
    def staleness(self) -> int | None:
        """The largest bound of the loops that feed anything upstream; None without a loop."""
        around = ancestors(self.spec, self.node.name)
        loops = {i.source for n in self.spec.nodes if n.name in around for i in n.inputs if i.loop}
        return max((self.graph.loops[name].staleness for name in loops), default=None)

    def upstream(self, kind: type[T]) -> list[T]:
        """Components of class `kind` whose records reach this node, itself excluded."""
        names = ancestors(self.spec, self.node.name) - {self.node.name}
        found = [self.graph.nodes[n].component for n in self.graph.nodes if n in names]
        return [c for c in found if isinstance(c, kind)]


def _refuse(problems: list[str]) -> None:
    if problems:
        raise GraphError("\n".join(problems))


def _caught(look: Callable[[], object]) -> list[str]:
    """What `look` raises; empty if it doesn't."""
    try:
        look()
    except GraphError as error:
        return [str(error)]
    return []


def _unconnected(graph: Graph) -> Iterator[str]:
    for name in graph.unconnected:
        yield f"{name} is added but not connected; call what `add` returned on its input streams"


def _loop_problems(graph: Graph) -> Iterator[str]:
    for name, loop in graph.loops.items():
        if loop.producer is None:
            yield f"loop {name} is never closed; call {name}.close(...) with the stream of its versions"
        elif loop.producer not in graph.nodes:
            yield f"loop {name} is closed by {loop.producer}, not a node of graph {graph.name}; add it there"


def _unknown_sources(graph: Graph) -> Iterator[str]:
    for n in graph.nodes.values():
        for port, stream in n.inputs.items():
            known = graph.loops if isinstance(stream, Loop) else graph.nodes
            if stream.source not in known:
                yield (
                    f"{n.name}.{port} reads {stream.source}, which is not in graph {graph.name}; "
                    "streams stay in one graph"
                )


def _not_portable(graph: Graph) -> Iterator[str]:
    for n in graph.nodes.values():
        yield from _caught(partial(node_spec, n))


def _source_problems(spec: GraphSpec) -> Iterator[str]:
    # Each would count its records from 0, and the ledger tells prompts apart by their numbers.
    sources = [n.name for n in spec.nodes if all(i.loop for i in n.inputs)]
    if len(sources) > 1:
        yield f"{', '.join(sources)} are {len(sources)} sources; a graph has one: mix the data in a component"


def _unread_loops(spec: GraphSpec) -> Iterator[str]:
    for loop in spec.loops:
        if not any(i.loop and i.source == loop.name for n in spec.nodes for i in n.inputs):
            yield (
                f"loop {loop.name} is closed by {loop.producer} but nobody reads it; "
                "remove it or pass it to a component"
            )


def _closer_problems(spec: GraphSpec) -> Iterator[str]:
    # The ledger books one record per version: of several, it would lose the prompts of all but one.
    for loop in spec.loops:
        for i in spec.node(loop.producer).inputs:
            if i.consumes > 1:
                yield (
                    f"{loop.producer}.{i.port} takes {i.consumes} records per version of loop {loop.name}; "
                    "gather them in a component before it"
                )


def _role_problems(spec: GraphSpec) -> Iterator[str]:
    for role, nodes in spec.roles.items():
        for what in ("replicas", "ranks"):
            counts = {n.name: int(getattr(n, what)) for n in nodes}
            if len(set(counts.values())) > 1:
                each = ", ".join(f"{name} {count}" for name, count in counts.items())
                yield f"role {role}: its nodes differ in {what} ({each}); set them equal or use two roles"


def replica_problems(spec: GraphSpec, n: NodeSpec) -> Iterator[str]:
    """What speaks against several replicas of a node."""
    if n.replicas == 1:
        return
    if all(i.loop for i in n.inputs):
        yield f"{n.name}: a source has one replica; {n.replicas} would each give all of its records"
    if any(i.consumes > 1 for i in n.inputs):
        yield (
            f"{n.name}: it gathers several records per firing, so it has one replica, not {n.replicas}; "
            "use ranks to split it"
        )
    if n.ranks > 1:
        yield (
            f"{n.name}: {n.replicas} replicas and {n.ranks} ranks; replicas compete for records, ranks share "
            "each one: raise one of the two"
        )
    if any(loop.producer == n.name for loop in spec.loops):
        yield (f"{n.name}: it closes a loop, so it has one replica, not {n.replicas}; use ranks")
    elif issubclass(resolve(n.component), Recovers):
        yield f"{n.name}: it learns, so it has one replica, not {n.replicas}; use ranks"
    if sum(not i.loop for i in n.inputs) > 1:
        yield (
            f"{n.name}: it joins several streams, so it has one replica, not {n.replicas}: "
            "competing replicas would take records that don't belong together"
        )


def _capacity_problems(spec: GraphSpec, n: NodeSpec) -> Iterator[str]:
    if n.capacity is None:
        return
    room = n.capacity.messages
    firings = {f"{n.name} gives": n.produces}
    firings |= {f"{c.name}.{i.port} takes": i.consumes for c, i in spec.consumers(n.name)}
    for what, records in firings.items():
        if records > room:
            yield f"{n.name}: capacity {room}, but {what} {records} records per firing; use {records} or more"


def _backlog_problems(spec: GraphSpec, n: NodeSpec) -> Iterator[str]:
    if not n.puts_back:
        return
    edges = [i for i in n.inputs if not i.loop]
    if [(i.record, i.consumes) for i in edges] != [(import_path(Prompt), 1)]:
        takes = ", ".join(f"{i.consumes} of {i.source}" for i in edges) or "nothing"
        yield f"{n.name}: it takes {takes}; a node that puts back takes prompts, one by one, and nothing else"
    if n.produces != 1:
        yield f"{n.name}: it gives {n.produces} records for a prompt; a node that puts back gives one"
    if n.ranks > 1:
        yield f"{n.name}: it puts back, so it has one rank, not {n.ranks}; use replicas"


def _component_problems(graph: Graph, spec: GraphSpec) -> Iterator[str]:
    for n in graph.nodes.values():
        if isinstance(n.component, HasProblems):
            view = PlacedView(graph=graph, spec=spec, node=n)
            yield from (f"{n.name}: {problem}" for problem in n.component.problems(view))


def _rank_problems(spec: GraphSpec, n: NodeSpec) -> Iterator[str]:
    if n.ranks == 1:
        return
    if any(i.loop for i in n.inputs):
        yield f"{n.name}: it follows a loop, so it has one rank, not {n.ranks}; use replicas"
    for source, records in records_per_firing(spec, n.name).items():
        if records > 1 and records % n.ranks:
            yield (
                f"{n.name}: {records} records of {source} per step don't divide by its {n.ranks} ranks; "
                f"use a multiple of {n.ranks}"
            )
