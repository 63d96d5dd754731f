"""What a component is, what it may tell the graph about itself, and functions lifted to components."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, ParamSpec, Protocol, TypeVar, runtime_checkable

from arriero.engine.stream import Stream
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
    """Held-out prompts, sent at version 0, at the last one, and between if the source `EvaluatesDuring`."""

    prompts: Sequence[Prompt]


@runtime_checkable
class HasRates(Protocol):
    """A component that doesn't take one record and give one."""

    def rates(self) -> Rates: ...


@runtime_checkable
class HasEvaluation(Protocol):
    """A source with held-out prompts, which the runtime sends before, during and after training."""

    async def evaluation(self) -> Evaluation | None: ...


@runtime_checkable
class EvaluatesDuring(Protocol):
    """A source whose held-out prompts are sent during training too: after every so many versions; 0: not.

    The weight plane keeps these versions for as long as their evaluation may take.
    """

    def evaluates_every(self) -> int: ...


@runtime_checkable
class HasWant(Protocol):
    """A component that works on many records at once: how many it would hold, at most."""

    def want(self) -> int: ...


@runtime_checkable
class PutsBack(Protocol):
    """A component with a `Backlog`: how many records it is to hold, as configured; 0: it needs none."""

    def puts_back(self) -> int: ...


@runtime_checkable
class StoresParts(Protocol):
    """A component that follows weights in several ranks, each of which stores a part: over how many."""

    def weight_ranks(self) -> int: ...


@runtime_checkable
class HasLimit(Protocol):
    """A component that stops by itself after so many outputs (not counting a version 0); None: never."""

    def limit(self) -> int | None: ...


@runtime_checkable
class Recovers(Protocol):
    """A component that learns, and goes on from `Context.made` when it starts again.

    It makes versions, or stands before what does and gives one record for each that it learns from.
    """

    def checkpoint_place(self, run_dir: Path, run_id: str, node: str) -> str:
        """The URL of its checkpoints; empty if it needs none."""
        ...


class GraphView(Protocol):
    """What a component's `problems` may ask about its place in the graph."""

    @property
    def ranks(self) -> int: ...
    @property
    def replicas(self) -> int: ...
    @property
    def staleness(self) -> int | None: ...
    def upstream(self, kind: type[T]) -> list[T]: ...


@runtime_checkable
class HasProblems(Protocol):
    """A component that knows what of its configuration or surroundings can't work."""

    def problems(self, view: GraphView) -> Iterable[str]: ...


@runtime_checkable
class HasRemarks(Protocol):
    """A component with something to say about its configuration that isn't a mistake."""

    def remarks(self) -> Iterable[str]: ...


class PerRecord(ABC, Generic[A, B]):
    """A component that is one function of one record: `apply`, sync or async.

    A record on which it raises is delivered again and, after the edge's deliveries, becomes a dead letter
    with the error; the other records go on.
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
