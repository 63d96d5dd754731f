"""The graph: components placed on streams. Only a `loop` can close a cycle; no other one can be written.

    g = Graph("aipo")
    weights = g.loop(Weights, staleness=1)
    prompts = g.add(PromptSource(...))()
    rollouts = g.add(Generator(...), replicas=4)(prompts, weights)
    weights.close(g.add(Trainer(...))(...))

Types say which stream fits where; what they can't say is refused when a node is connected, or by `check`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar, cast

from arriero.engine.component import (
    Component,
    Each,
    EvaluatesDuring,
    Evaluation,
    GraphView,
    HasEvaluation,
    HasLimit,
    HasProblems,
    HasRates,
    HasRemarks,
    HasWant,
    PerRecord,
    PutsBack,
    Rates,
    StoresParts,
    each,
)  # fmt: skip
from arriero.engine.errors import GraphError, one_line
from arriero.engine.portable import build, fields_to_json, import_path, resolve
from arriero.engine.ports import default_name, inputs_of, ports, puts_back, record_type
from arriero.engine.stream import Loop, Stream, Versioned
from arriero.schemas.graph import Capacity, GraphSpec, InputSpec, LoopSpec, NodeSpec, Resources
from arriero.schemas.messages import Record

__all__ = [
    "Component", "Each", "EvaluatesDuring", "Evaluation", "Graph", "GraphView", "HasEvaluation", "HasLimit",
    "HasProblems", "HasRates", "HasRemarks", "HasWant", "Node", "PerRecord", "PutsBack", "Rates",
    "StoresParts", "each", "ports",
]  # fmt: skip

P = ParamSpec("P")
T = TypeVar("T")
V = TypeVar("V", bound=Versioned)

_ONE_CPU = Resources()


@dataclass(frozen=True, kw_only=True)
class Node:
    """A component in its place; `inputs` in the order of its ports."""

    name: str
    component: Any
    inputs: dict[str, Stream[Any]]
    output: type[Record]
    replicas: int
    ranks: int
    role: str
    resources: Resources
    capacity: Capacity | None

    @property
    def rates(self) -> Rates:
        """What its component declares; one record in, one out, if it declares nothing."""
        return self.component.rates() if isinstance(self.component, HasRates) else Rates()


class Graph:
    """Nodes and loops under one name. A mistake raises GraphError where it is made; `check` finds others."""

    def __init__(self, name: str) -> None:
        self.name = _valid_name(name, "graph")
        self.nodes: dict[str, Node] = {}
        self.loops: dict[str, Loop[Any]] = {}
        self.unconnected: list[str] = []  # added, but not called on streams

    def loop(self, record: type[V], *, staleness: int, name: str = "") -> Loop[V]:
        """A feedback edge that carries versions. Raises GraphError for a negative bound or a used name."""
        name = _valid_name(name or record.__name__.lower(), "loop")
        if staleness < 0:
            raise GraphError(
                f"loop {name}: staleness {staleness} is negative; 0 is synchronous, 1 one step of delay"
            )
        if name in self.loops:
            raise GraphError(f"two loops are named {name}; pass name=")
        if "version" not in getattr(record, "model_fields", {}):
            raise GraphError(
                f"loop {name}: {record.__name__} has no field `version`, which a loop's record needs"
            )
        loop = Loop(name, record, staleness)
        self.loops[name] = loop
        return loop

    def add(
        self,
        component: Component[P, T],
        *,
        name: str = "",
        replicas: int = 1,
        ranks: int = 1,
        role: str = "",
        resources: Resources = _ONE_CPU,
        capacity: Capacity | None = None,
    ) -> Callable[P, Stream[T]]:
        """Place a component; call the result on its input streams to get its output stream.

        `replicas` compete for the records of one stream; `ranks` are one logical component in a
        torch.distributed world. `capacity` bounds the output edge. Raises GraphError, also from the call.
        """
        takes, gives = ports(component)
        name = _valid_name(name or default_name(component), "node")
        if name in self.nodes:
            raise GraphError(f"two nodes are named {name}; pass name= to tell them apart")
        for what, number in (("replicas", replicas), ("ranks", ranks)):
            if number < 1:
                raise GraphError(f"{name}: {what} is {number}; at least 1 is needed")
        role = _valid_name(role or name, "role")
        self.unconnected.append(name)

        def connect(*args: P.args, **kwargs: P.kwargs) -> Stream[T]:
            if name in self.unconnected:
                self.unconnected.remove(name)
            if name in self.nodes:
                raise GraphError(f"{name} is connected already; add it once per place")
            inputs = inputs_of(name, takes, args, kwargs)
            self.nodes[name] = Node(
                name=name, component=component, inputs=inputs, output=gives, replicas=replicas, ranks=ranks,
                role=role, resources=resources, capacity=capacity,
            )  # fmt: skip
            return cast("Stream[T]", Stream(name, gives))

        return connect

    def check(self) -> GraphSpec:
        """The graph as data, after every static check. Raises GraphError that lists all that is wrong."""
        from arriero.engine.check import check

        return check(self)

    def spec(self) -> GraphSpec:
        """The graph as data, unchecked. Raises GraphError for a part that has no exact JSON form."""
        return GraphSpec(
            name=self.name,
            nodes=tuple(node_spec(n) for n in self.nodes.values()),
            loops=tuple(
                LoopSpec(
                    name=n, record=import_path(v.record), producer=v.producer or "", staleness=v.staleness
                )
                for n, v in self.loops.items()
            ),
        )

    @classmethod
    def from_spec(cls, spec: GraphSpec) -> Graph:
        """The graph that `spec` came from. Raises GraphError if a part can't be imported, built or found."""
        graph = cls(spec.name)
        for loop in spec.loops:
            graph.loops[loop.name] = Loop(loop.name, _record(loop.record), loop.staleness)
        streams: dict[str, Stream[Any]] = {n.name: Stream(n.name, _record(n.output)) for n in spec.nodes}
        for n in spec.nodes:
            inputs = {i.port: _named(graph.loops if i.loop else streams, i.source) for i in n.inputs}
            graph.nodes[n.name] = Node(
                name=n.name, component=build(n.component, n.config), inputs=inputs, output=_record(n.output),
                replicas=n.replicas, ranks=n.ranks, role=n.role, resources=n.resources, capacity=n.capacity,
            )  # fmt: skip
        for loop in spec.loops:
            graph.loops[loop.name].close(_named(streams, loop.producer))
        return graph

    def with_capacities(self, capacities: Mapping[str, Capacity]) -> Graph:
        """The same graph with the outputs of the named nodes bounded so. GraphError for other names."""
        if unknown := capacities.keys() - self.nodes.keys():
            raise GraphError(
                f"graph {self.name} has no {', '.join(sorted(unknown))}; it has {', '.join(self.nodes)}"
            )
        graph = Graph(self.name)
        graph.loops, graph.unconnected = self.loops, self.unconnected
        graph.nodes = {n: replace(v, capacity=capacities.get(n, v.capacity)) for n, v in self.nodes.items()}
        return graph


def _named(streams: Mapping[str, Stream[Any]], name: str) -> Stream[Any]:
    if name not in streams:
        raise GraphError(f"the graph file names {name!r}, which it doesn't hold; it has {', '.join(streams)}")
    return streams[name]


def _record(path: str) -> type[Record]:
    return record_type(resolve(path), path)


def node_spec(n: Node) -> NodeSpec:
    """The node as data. Raises GraphError that names the node and the part without a JSON form."""
    rates = n.rates
    edges = [port for port, s in n.inputs.items() if not isinstance(s, Loop)]
    if unknown := rates.consumes.keys() - set(edges):
        known = ", ".join(edges) or "none"
        raise GraphError(f"{n.name}: rates() names {', '.join(sorted(unknown))}; ports with a rate: {known}")
    try:
        return NodeSpec(
            name=n.name,
            component=import_path(cast("object", type(n.component))),
            config=fields_to_json(n.component),
            inputs=tuple(
                InputSpec(
                    port=port, source=s.source, record=import_path(s.record), loop=isinstance(s, Loop),
                    consumes=rates.consumes.get(port, 1),
                )
                for port, s in n.inputs.items()
            ),
            output=import_path(n.output), produces=rates.produces, replicas=n.replicas, ranks=n.ranks,
            role=n.role, resources=n.resources, capacity=n.capacity, puts_back=puts_back(n.component),
        )  # fmt: skip
    except ValueError as error:
        raise GraphError(f"{n.name}: {one_line(error)}") from error


def _valid_name(name: str, what: str) -> str:
    # Schedulers strip or rewrite anything else in a role's name, and then peers don't find each other.
    if not re.fullmatch(r"[a-z][a-z0-9]{0,39}", name):
        raise GraphError(
            f"{what} name {name!r}: lower-case letters and digits only, a letter first, at most 40"
        )
    return name
