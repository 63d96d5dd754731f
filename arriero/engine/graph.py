"""The graph: components placed on streams. Only a `loop` can close a cycle, so every other cycle can't be written.

    g = Graph("aipo")
    weights = g.loop(Weights, staleness=1)
    prompts = g.add(PromptSource(...))()
    rollouts = g.add(Generator(...), replicas=4)(prompts, weights)
    weights.close(g.add(Trainer(...))(...))
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast, runtime_checkable

from arriero.engine.errors import GraphError
from arriero.engine.portable import build, fields_to_json, import_path
from arriero.engine.stream import Loop, Stream
from arriero.schemas.graph import Capacity, GraphSpec, InputSpec, LoopSpec, NodeSpec, Resources
from arriero.schemas.messages import Dropped, Prompt, Record

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A", bound=Record)
B = TypeVar("B", bound=Record)
T_co = TypeVar("T_co", covariant=True)


class Component(Protocol[P, T_co]):
    """Any number of inputs, one output. Fields are the configuration; `run` is the whole behaviour."""

    def run(self, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T_co | Dropped]: ...


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Records taken from each port, and given, per firing; what isn't named is 1. Loop ports have no rate."""

    consumes: Mapping[str, int] = field(default_factory=dict[str, int])
    produces: int = 1


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Held-out prompts, sent at version 0, after every `every` versions (0: never) and at the last one."""

    prompts: Sequence[Prompt]
    every: int = 0


@runtime_checkable
class HasRates(Protocol):
    """A component that doesn't take one record and give one."""

    def rates(self) -> Rates: ...


@runtime_checkable
class HasEvaluation(Protocol):
    """A source with held-out prompts, which the runtime sends before, during and after training."""

    def evaluation(self) -> Evaluation | None: ...


@runtime_checkable
class HasWant(Protocol):
    """A component that works on many records at once: how many it would hold, at most."""

    def want(self) -> int: ...


@runtime_checkable
class HasLimit(Protocol):
    """A component that stops by itself after so many outputs (not counting a version 0); None: never."""

    def limit(self) -> int | None: ...


class GraphView(Protocol):
    """What a component's `problems` may ask about its place in the graph."""

    @property
    def ranks(self) -> int: ...
    @property
    def staleness(self) -> int | None: ...
    def upstream(self, kind: type[T]) -> list[T]: ...


@runtime_checkable
class HasProblems(Protocol):
    """A component that knows what of its configuration or surroundings can't work."""

    def problems(self, view: GraphView) -> Iterable[str]: ...


class PerRecord(ABC, Generic[A, B]):
    """A component that is one function of one record: `apply`, sync or async.

    A record on which it raises is delivered again and, after the edge's deliveries, becomes a dead letter with
    the error; the other records go on.
    """

    @abstractmethod
    def apply(self, record: A) -> B | Dropped | Awaitable[B | Dropped]:
        """The output for `record`, or why there is none."""

    async def run(self, records: Stream[A]) -> AsyncIterator[B | Dropped]:
        async for record in records:
            out = self.apply(record)
            yield await out if isinstance(out, Awaitable) else out


@dataclass(frozen=True)
class Each(PerRecord[A, B]):
    """A plain function on one record, lifted to a component. Use `each(fn)`."""

    fn: Callable[[A], B]

    def apply(self, record: A) -> B:
        return self.fn(record)


def each(fn: Callable[[A], B]) -> Each[A, B]:
    """Lift `fn` to a component: one record in, one out; see `PerRecord` for what happens when it raises."""
    return Each(fn)


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
        return self.component.rates() if isinstance(self.component, HasRates) else Rates()


class Graph:
    """Nodes and loops under one name. Mistakes raise GraphError where they are made; `check` finds the rest."""

    def __init__(self, name: str) -> None:
        self.name = _valid_name(name, "graph")
        self.nodes: dict[str, Node] = {}
        self.loops: dict[str, Loop[Any]] = {}

    def loop(self, record: type[T], *, staleness: int, name: str = "") -> Loop[T]:
        """A feedback edge that carries versions. Raises GraphError for a negative bound or a used name."""
        name = _valid_name(name or record.__name__.lower(), "loop")
        if staleness < 0:
            raise GraphError(f"loop {name}: staleness {staleness} is negative; 0 is synchronous, 1 one step of delay")
        if name in self.loops:
            raise GraphError(f"two loops are named {name}; pass name=")
        if "version" not in getattr(record, "model_fields", {}):
            raise GraphError(f"loop {name}: {record.__name__} has no field `version`, which a loop's record needs")
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
        resources: Resources = Resources(),
        capacity: Capacity | None = None,
    ) -> Callable[P, Stream[T]]:
        """Place a component; call the result on its input streams to get its output stream.

        `replicas` compete for the records of one stream; `ranks` are one logical component in a
        torch.distributed world. `capacity` bounds the output edge. Raises GraphError, also from the call.
        """
        name = _valid_name(name or _default_name(component), "node")
        if name in self.nodes:
            raise GraphError(f"two nodes are named {name}; pass name= to tell them apart")
        for what, number in (("replicas", replicas), ("ranks", ranks)):
            if number < 1:
                raise GraphError(f"{name}: {what} is {number}; at least 1 is needed")
        takes, gives = ports(component)

        def connect(*args: P.args, **kwargs: P.kwargs) -> Stream[T]:
            if len(args) > len(takes):
                raise GraphError(f"{name} takes {len(takes)} inputs ({', '.join(takes) or 'none'}), got {len(args)}")
            inputs = cast("dict[str, Stream[Any]]", dict(zip(takes, args, strict=False)) | kwargs)
            if inputs.keys() != takes.keys():
                raise GraphError(f"{name} takes {', '.join(takes) or 'no inputs'}; got {', '.join(inputs) or 'none'}")
            for port, want in takes.items():
                if (got := inputs[port].record) is not want:
                    raise GraphError(
                        f"{name}.{port} takes {want.__name__}, but {inputs[port].source} gives {got.__name__}; "
                        "insert a component between them"
                    )
            if name in self.nodes:
                raise GraphError(f"{name} is connected already; add it once per place")
            self.nodes[name] = Node(
                name=name, component=component, inputs={p: inputs[p] for p in takes}, output=gives,
                replicas=replicas, ranks=ranks, role=_valid_name(role or name, "role"), resources=resources,
                capacity=capacity,
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
            nodes=tuple(_node_spec(n) for n in self.nodes.values()),
            loops=tuple(
                LoopSpec(name=n, record=import_path(v.record), producer=v.producer or "", staleness=v.staleness)
                for n, v in self.loops.items()
            ),
        )

    @classmethod
    def from_spec(cls, spec: GraphSpec) -> Graph:
        """The graph that `spec` came from. Raises GraphError if a component can't be imported or built."""
        graph = cls(spec.name)
        for item in spec.loops:
            graph.loops[item.name] = Loop(item.name, _record(item.record), item.staleness)
        streams = {n.name: Stream(n.name, _record(n.output)) for n in spec.nodes}
        for n in spec.nodes:
            inputs = {i.port: graph.loops[i.source] if i.loop else streams[i.source] for i in n.inputs}
            graph.nodes[n.name] = Node(
                name=n.name, component=build(n.component, n.config), inputs=inputs, output=_record(n.output),
                replicas=n.replicas, ranks=n.ranks, role=n.role, resources=n.resources, capacity=n.capacity,
            )  # fmt: skip
        for item in spec.loops:
            graph.loops[item.name].close(streams[item.producer])
        return graph

    def with_capacities(self, capacities: Mapping[str, Capacity]) -> Graph:
        """The same graph with the output edges of the named nodes bounded so."""
        graph = Graph(self.name)
        graph.loops = self.loops
        graph.nodes = {n: replace(v, capacity=capacities.get(n, v.capacity)) for n, v in self.nodes.items()}
        return graph


def ports(component: object) -> tuple[dict[str, type[Record]], type[Record]]:
    """Input ports and output record type, from the annotations of `run` (or of a lifted function)."""
    if isinstance(component, PerRecord):
        function = cast("Any", component).fn if isinstance(component, Each) else type(cast("Any", component)).apply
        hints = typing.get_type_hints(function)
        gives = hints.pop("return", None)
        if len(hints) != 1 or gives is None:
            raise GraphError(f"{import_path(function)}: an annotated function of one record is needed")
        return {"records": next(iter(hints.values()))}, _without_dropped(gives)
    run = getattr(component, "run", None)
    if run is None or isinstance(component, type):
        raise GraphError(f"{component!r} is not a component: it needs `async def run(self, ...)` and to be an instance")
    if not inspect.isasyncgenfunction(getattr(run, "__func__", run)):
        raise GraphError(f"{type(component).__name__}.run must be `async def` with `yield`")
    try:
        hints = typing.get_type_hints(type(component).run)  # type: ignore[attr-defined]  # has run: see above
        gives = _without_dropped(typing.get_args(hints.pop("return"))[0])
        return {port: typing.get_args(hint)[0] for port, hint in hints.items()}, gives
    except (NameError, KeyError, IndexError) as error:
        raise GraphError(
            f"{type(component).__name__}.run must be annotated as (self, port: Stream[In], ...) -> "
            f"AsyncIterator[Out], with names importable at run time ({error})"
        ) from error


def _without_dropped(hint: Any) -> type[Record]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(h for h in typing.get_args(hint) if h is not Dropped and typing.get_origin(h) is not Awaitable)
    return cast("type[Record]", hint)


def _record(path: str) -> type[Record]:
    from arriero.engine.portable import resolve

    return cast("type[Record]", resolve(path))


def _node_spec(n: Node) -> NodeSpec:
    rates = n.rates
    return NodeSpec(
        name=n.name,
        component=import_path(type(n.component)),
        config=fields_to_json(n.component),
        inputs=tuple(
            InputSpec(
                port=port, source=s.source, record=import_path(s.record), loop=isinstance(s, Loop),
                consumes=rates.consumes.get(port, 1),
            )
            for port, s in n.inputs.items()
        ),
        output=import_path(n.output), produces=rates.produces, replicas=n.replicas, ranks=n.ranks, role=n.role,
        resources=n.resources, capacity=n.capacity,
    )  # fmt: skip


def _default_name(component: object) -> str:
    if isinstance(component, Each):
        return cast("Any", component).fn.__name__.replace("_", "")
    return type(component).__name__.lower()


def _valid_name(name: str, what: str) -> str:
    # Schedulers strip or rewrite anything else in a role's name, and then peers don't find each other.
    if not re.fullmatch(r"[a-z][a-z0-9]{0,39}", name):
        raise GraphError(f"{what} name {name!r}: lower-case letters and digits only, a letter first, at most 40")
    return name
