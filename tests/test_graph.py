"""Building graphs: what is refused where it is written."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from arriero.components.rewards import ExactMatch
from arriero.engine.errors import GraphError
from arriero.engine.graph import Graph, PerRecord, each, ports
from arriero.engine.stream import Stream
from arriero.schemas.graph import Capacity
from arriero.schemas.messages import Dropped, Prompt, Record, RolloutGroup, ScoredGroup, Weights
from tests.graphs import Follower, Join, Source, Stage, Versions, chain, fork

ROOT = Path(__file__).resolve().parents[1]


def same(prompt: Prompt) -> Prompt:
    """A function at the top of a module."""
    return prompt


NAMELESS: Callable[[Any], Any] = lambda prompt: prompt  # noqa: E731  # a lambda is what is tested


def refusal(build: Any) -> str:
    with pytest.raises(GraphError) as caught:
        build()
    return str(caught.value)


def test_wrong_streams_are_refused_where_they_are_connected() -> None:
    g = Graph("g")
    weights: Any = g.loop(Weights, staleness=0)
    prompts: Any = g.add(Source())()
    add: Any = g.add
    follower = add(Follower())
    assert refusal(lambda: follower(prompts, prompts)) == (
        "follower.weights takes Weights, but source gives Prompt; insert a component between them"
    )
    assert refusal(lambda: follower(weights, prompts)).startswith(
        "follower.prompts takes Prompt, but weights"
    )
    assert refusal(lambda: follower(prompts)) == "follower takes prompts, weights; got prompts"
    assert refusal(lambda: follower(prompts, weight=weights)) == (
        "follower takes prompts, weights; got prompts, weight"
    )
    assert refusal(lambda: follower(prompts, weights, prompts)) == (
        "follower takes prompts, weights; got 3 streams, 1 too many"
    )
    assert refusal(lambda: follower(prompts, prompts=prompts)) == (
        "follower.prompts is given twice, by position and by name; give it once"
    )
    assert refusal(lambda: add(Source(), name="again")(prompts)) == (
        "again takes no inputs; got 1 streams, 1 too many"
    )
    assert refusal(lambda: follower(add(Source(), name="other"), weights)).startswith(
        "follower.prompts takes a stream, not <function"
    )
    assert refusal(lambda: add(each(same))(weights)).startswith(
        "same.records takes Prompt, but weights gives"
    )


def test_a_stream_of_a_subclass_fits() -> None:
    g = Graph("g")
    g.add(each(any_record), name="take")(g.add(Source())())
    assert g.check().node("take").inputs[0].record == "arriero.schemas.messages:Prompt"


def any_record(record: Record) -> Prompt:
    return Prompt(text=record.id)


def test_names_are_used_once_and_fit_every_scheduler() -> None:
    g = Graph("g")
    prompts = g.add(Source())()
    assert refusal(lambda: g.add(Source())) == "two nodes are named source; pass name= to tell them apart"
    connect = g.add(Stage())
    connect(prompts)
    assert refusal(lambda: connect(prompts)) == "stage is connected already; add it once per place"
    g.loop(Weights, staleness=0)
    assert refusal(lambda: g.loop(Weights, staleness=0)) == "two loops are named weights; pass name="
    for name in ("Upper", "a-b", "a_b", "1a", "a" * 41):
        assert "lower-case letters and digits only" in refusal(lambda name=name: g.add(Stage(), name=name))
        assert "role name" in refusal(lambda name=name: g.add(Stage(), name="fine", role=name))


def test_loops_are_bounded_versioned_and_closed_once() -> None:
    g = Graph("g")
    loop: Any = g.loop
    assert refusal(lambda: loop(Weights, staleness=-1)).startswith(
        "loop weights: staleness -1 is negative; 0 is"
    )
    assert refusal(lambda: loop(Prompt, staleness=0)) == (
        "loop prompt: Prompt has no field `version`, which a loop's record needs"
    )
    weights: Any = g.loop(Weights, staleness=0)
    prompts = g.add(Source())()
    assert refusal(lambda: weights.close(prompts)) == (
        "loop weights carries Weights, but source gives Prompt; close it with a component that gives Weights"
    )
    versions = g.add(Versions())(g.add(Follower())(prompts, weights))
    weights.close(versions)
    assert refusal(lambda: weights.close(versions)) == (
        "loop weights is already closed by versions; a loop has one producer"
    )


def test_streams_yield_only_inside_run() -> None:
    stream = Graph("g").add(Source())()
    with pytest.raises(RuntimeError, match="stream source yields only inside run"):
        stream.poll()


def test_ports_are_read_from_annotations() -> None:
    assert ports(Source()) == ({}, Prompt)
    assert ports(Follower()) == ({"prompts": Prompt, "weights": Weights}, Prompt)
    assert ports(each(same)) == ({"records": Prompt}, Prompt)
    assert ports(ExactMatch()) == ({"records": RolloutGroup}, ScoredGroup)


class Later(PerRecord[Prompt, Prompt]):
    def apply(self, record: Prompt) -> Prompt | Dropped | Awaitable[Prompt | Dropped]:
        return record


class NoGenerator:
    async def run(self, prompts: Stream[Prompt]) -> None: ...


class NoStream:
    async def run(self, prompts: AsyncIterator[Prompt]) -> AsyncIterator[Prompt]:
        async for prompt in prompts:
            yield prompt


class NoRecord:
    async def run(self, prompts: Stream[int]) -> AsyncIterator[Prompt]:
        yield Prompt(text="")


class TwoRecords:
    async def run(self, prompts: Stream[Prompt]) -> AsyncIterator[Prompt | Weights]:
        yield Prompt(text="")


class NoAnnotation:
    async def run(self, prompts) -> AsyncIterator[Prompt]:  # type: ignore[no-untyped-def]
        yield Prompt(text="")


class AnyNumber:
    async def run(self, *prompts: Stream[Prompt]) -> AsyncIterator[Prompt]:
        yield Prompt(text="")


class NoIterator:
    async def run(self) -> AsyncIterable[Prompt]:
        yield Prompt(text="")


def two_parameters(a: Prompt, b: Prompt) -> Prompt:
    return Prompt(text=a.text + b.text)


def no_record(a: Prompt) -> int:
    return len(a.text)


@pytest.mark.parametrize(
    ("component", "message"),
    [
        (same, "is not a component: it needs `async def run(self, ...)` and to be an instance"),
        (Source, "is not a component"),
        (3, "3 is not a component"),
        (NoGenerator(), "NoGenerator.run is no async generator; make it `async def` with `yield`"),
        (NoStream(), "NoStream.run: prompts is a AsyncIterator; annotate it as Stream[...] of a record"),
        (NoRecord(), "NoRecord.run: prompts is annotated as int; one record type is needed"),
        (TwoRecords(), "TwoRecords.run is annotated as"),
        (NoAnnotation(), "NoAnnotation.run: prompts is not annotated; name its record type"),
        (AnyNumber(), "AnyNumber.run: prompts takes any number; give each input a name"),
        (NoIterator(), "NoIterator.run gives AsyncIterable; annotate it as AsyncIterator[...] of a record"),
        (each(two_parameters), "two_parameters takes 2 parameters; a function of one record is needed"),  # type: ignore[arg-type]
        (each(no_record), "no_record is annotated as int; one record type is needed"),  # type: ignore[type-var]
        (each(NAMELESS), "<lambda>: prompt is not annotated"),
    ],
)
def test_what_is_no_component_is_refused(component: Any, message: str) -> None:
    found = refusal(lambda: Graph("g").add(component))
    assert message in found


def test_an_apply_that_may_be_awaited_or_drop_still_has_one_record_type() -> None:
    assert ports(Later()) == ({"records": Prompt}, Prompt)


def test_unknown_nodes_get_no_capacity() -> None:
    assert refusal(lambda: chain((1, 1)).with_capacities({"s7": Capacity(messages=1)})) == (
        "graph chain has no s7; it has source, s0"
    )


def test_consumers_and_roles_of_a_graph() -> None:
    spec = fork(batch=2).spec()
    assert [(n.name, i.port) for n, i in spec.consumers("source")] == [
        ("one", "records"),
        ("many", "records"),
    ]
    assert list(spec.roles) == ["source", "one", "many", "join"]
    assert Join() == Graph.from_spec(spec).nodes["join"].component
