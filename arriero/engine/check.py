"""Static checks: everything that can be known to fail is refused before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar, cast

from arriero.engine.errors import GraphError
from arriero.engine.graph import Graph, HasProblems, Node
from arriero.engine.rates import ancestors, capacities, repetitions, run_symbolically, windows
from arriero.engine.stream import Loop
from arriero.schemas.graph import GraphSpec

T = TypeVar("T")


def check(graph: Graph) -> GraphSpec:
    """The graph as data. Raises GraphError that lists every problem found, one per line."""
    if not graph.nodes:
        raise GraphError(f"graph {graph.name} is empty; add components to it")
    _refuse([f"loop {n} is read but never closed; call {n}.close(...)" for n, v in graph.loops.items() if not v.producer])
    _refuse(list(_unknown_sources(graph)))
    spec = graph.spec()
    _refuse([*_unread_loops(spec), *_replica_problems(graph, spec), *_component_problems(graph, spec)])
    repetitions(spec)
    _refuse(list(_rank_problems(spec)))
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
        return self.node.ranks

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
        return [cast("T", c) for c in found if isinstance(c, kind)]


def _refuse(problems: list[str]) -> None:
    if problems:
        raise GraphError("\n".join(problems))


def _unknown_sources(graph: Graph) -> Iterator[str]:
    for n in graph.nodes.values():
        for port, stream in n.inputs.items():
            known = graph.loops if isinstance(stream, Loop) else graph.nodes
            if stream.source not in known:
                yield f"{n.name}.{port} reads {stream.source}, which is not in graph {graph.name}; streams stay in one graph"


def _unread_loops(spec: GraphSpec) -> Iterator[str]:
    for loop in spec.loops:
        if not any(i.loop and i.source == loop.name for n in spec.nodes for i in n.inputs):
            yield f"loop {loop.name} is closed by {loop.producer} but nobody reads it; remove it or pass it to a component"


def _replica_problems(graph: Graph, spec: GraphSpec) -> Iterator[str]:
    for n in spec.nodes:
        if n.replicas == 1:
            continue
        if not n.inputs:
            yield f"{n.name}: a source has one replica, or its records would be issued {n.replicas} times"
        if any(i.consumes > 1 for i in n.inputs):
            yield f"{n.name}: it gathers several records per firing, so it has one replica; use ranks to split its work"
        if n.ranks > 1:
            yield f"{n.name}: replicas and ranks are both above 1; replicas compete for records, ranks share each one"
        if any(loop.producer == n.name for loop in spec.loops):
            yield f"{n.name}: it closes a loop, so its versions need one order: 1 replica, not {n.replicas}; use ranks"


def _component_problems(graph: Graph, spec: GraphSpec) -> Iterator[str]:
    for n in graph.nodes.values():
        if isinstance(n.component, HasProblems):
            view = PlacedView(graph=graph, spec=spec, node=n)
            yield from (f"{n.name}: {problem}" for problem in n.component.problems(view))


def _rank_problems(spec: GraphSpec) -> Iterator[str]:
    for w in windows(spec):
        ranks = spec.node(w.producer).ranks
        if w.per_version % ranks:
            yield (
                f"{w.producer}: {w.per_version} records of {w.sources[0]} per step don't divide by its {ranks} ranks; "
                f"use a multiple of {ranks}"
            )
