"""Building graphs: what is refused where it is written, and graphs as JSON and back, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field
from pydantic.dataclasses import dataclass

from arriero.components.losses import AIPO, DecoupledPPO, ImportanceWeight, WithKL
from arriero.components.optimizer import AdamW
from arriero.components.prompts import PromptSource
from arriero.components.rewards import Contains, ExactMatch, Function
from arriero.components.sampling import Sampling
from arriero.components.supervised import ExampleSource, SupervisedBatch
from arriero.components.trainer import Trainer
from arriero.engine.errors import GraphError
from arriero.engine.graph import Graph, PerRecord, each, ports
from arriero.engine.portable import build, fields_to_json, from_json, import_path, resolve, to_json
from arriero.engine.stream import Stream
from arriero.pipelines.aipo import AIPOConfig, aipo
from arriero.pipelines.grpo import GRPOConfig, grpo
from arriero.pipelines.sft import SFTConfig, sft
from arriero.schemas.graph import Capacity, GraphSpec, Resources
from arriero.schemas.messages import Dropped, Prompt, Record, Rollout, RolloutGroup, ScoredGroup, Weights
from tests.graphs import Follower, Join, Source, Stage, Versions, chain, fork, looped

ROOT = Path(__file__).resolve().parents[1]


class Colour(StrEnum):
    RED = "red"


class Size(Enum):
    LARGE = (1, 2)


@dataclasses.dataclass(frozen=True)
class Inner:
    """A plain dataclass: nothing converts its fields."""

    value: Any = None


class Model(BaseModel):
    model_config = ConfigDict(frozen=True)

    name: str = "m"
    inner: Inner | None = None


@dataclass(frozen=True, kw_only=True, config=ConfigDict(arbitrary_types_allowed=True))
class Configured(PerRecord[Prompt, Prompt]):
    """A component with all kinds of fields."""

    number: int | float | str = 0
    inner: Inner | Model | None = None
    pair: tuple[int, ...] = ()
    table: Mapping[str, float] = Field(default_factory=dict[str, float])
    colour: Colour = Colour.RED
    anything: Any = None

    def apply(self, record: Prompt) -> Prompt:
        return record


def same(prompt: Prompt) -> Prompt:
    """A function at the top of a module."""
    return prompt


def longer(prompt: Prompt, rollout: Rollout) -> bool:
    """A reward function."""
    return len(rollout.text) > len(prompt.text)


def pipelines() -> list[Graph]:
    gym: dict[str, Any] = {"data": PromptSource(path="reasoning_gym:x", options={"a": [1, [2]]})}
    data = PromptSource(path="data.jsonl", held_out=2)
    common: dict[str, Any] = {"model": "m", "data": data, "groups_per_step": 4, "generators": 3, "ranks": 2}
    return [
        aipo(AIPOConfig(**common, sampling=Sampling(stop=("\n",)))),
        grpo(GRPOConfig(**common, reward=Contains(text="yes"), optimizer=AdamW(max_grad_norm=1e9))),
        aipo(AIPOConfig(**common, reward=Function(function=longer))),
        grpo(GRPOConfig(**common | gym)),
        sft(SFTConfig(model="m", data=ExampleSource(path="e.jsonl"))),
    ]


def test_every_pipeline_comes_back_from_json_with_the_same_hash() -> None:
    for graph in pipelines():
        spec = graph.spec()
        again = GraphSpec.model_validate_json(spec.model_dump_json())
        assert again == spec
        rebuilt = Graph.from_spec(again)
        assert rebuilt.spec() == spec
        assert rebuilt.spec().digest == spec.digest
        for name, node in graph.nodes.items():
            assert rebuilt.nodes[name].component == node.component


def test_the_hash_is_the_same_in_every_process() -> None:
    code = "from tests.test_graph import pipelines\nprint([g.spec().digest for g in pipelines()])"
    found = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("0", "4711")
    }  # fmt: skip
    assert found == {f"{[g.spec().digest for g in pipelines()]}\n"}


def test_every_field_counts_in_the_hash() -> None:
    base = looped((1, 1))
    changed = [
        looped((1, 1), staleness=2),
        looped((1, 1), steps=4),
        looped((2, 1)),
        looped((1, 1), (1, 1)),
        base.with_capacities({"source": Capacity(messages=9)}),
        base.with_capacities({"source": Capacity(messages=9, bytes=1)}),
    ]
    places: list[dict[str, Any]] = [
        {"replicas": 2}, {"ranks": 2}, {"role": "other"}, {"resources": Resources(gpus=1)},
    ]  # fmt: skip
    for place in places:
        g = looped((1, 1))
        g.nodes["s0"] = dataclasses.replace(g.nodes["s0"], **place)
        changed.append(g)
    digests = [g.spec().digest for g in (base, *changed)]
    assert len(set(digests)) == len(digests)
    assert looped((1, 1)).spec().digest == digests[0]


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.sampled_from([Colour.RED, Size.LARGE, Path("a/b"), same, Inner, math.isfinite])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.just("$type"), inner, max_size=3)
        | st.dictionaries(st.integers() | st.tuples(st.text(max_size=3)), inner, max_size=3)
        | inner.map(Inner)
    ),
    max_leaves=12,
)


def through_text(value: Any) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))


def assert_same(found: object, expected: object) -> None:
    assert found == expected
    assert sorted(repr(found)) == sorted(repr(expected))  # tells 1 from 1.0 and True; mappings have no order


@given(VALUES)
def test_any_configuration_value_comes_back_exactly(value: Any) -> None:
    assert_same(from_json(through_text(to_json(value))), value)


@given(
    st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    VALUES,
    st.lists(st.integers()),
)
def test_a_component_comes_back_with_its_configuration(number: Any, value: Any, pair: list[int]) -> None:
    component = Configured(
        number=number,
        anything=value,
        inner=Model(inner=Inner(value)),
        pair=tuple(pair),
        table={"a": 1e308},
    )
    found = build(import_path(Configured), through_text(fields_to_json(component)))
    assert found == component
    assert type(found.number) is type(number)
    assert (type(found.inner), found.colour) == (Model, Colour.RED)


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_a_number_that_isnt_finite_is_refused_wherever_it_stands(number: float) -> None:
    for value in (number, (1.5, number), [number], {"a": number}, {number: 1}):
        with pytest.raises(GraphError, match=f"^{number} isn't finite; give a number, a large one"):
            to_json(value)
    with pytest.raises(GraphError, match=f"^anything.value: {number} isn't finite"):
        fields_to_json(Configured(anything=Inner((1, number))))


def test_an_infinite_clip_is_no_clip() -> None:
    # It would pass for ratio control on stale data.
    g = Graph("clipless")
    loss = WithKL(loss=DecoupledPPO(weight=ImportanceWeight(upper=math.inf)), beta=0.1)
    batches = g.add(SupervisedBatch(model="m", examples=1, max_length=9))(g.add(ExampleSource(path="x"))())
    g.add(Trainer(model="m", loss=loss, steps=1))(batches)
    with pytest.raises(GraphError, match=r"^trainer: loss.loss.weight.upper: inf isn't finite"):
        g.check()


def test_what_json_looks_like() -> None:
    assert to_json((1, "a", None)) == [1, "a", None]
    assert to_json(Colour.RED) == {"$ref": "tests.test_graph:Colour.RED"}
    assert to_json(same) == {"$ref": "tests.test_graph:same"}
    assert to_json(AIPO(rho=3.0)) == {"$type": import_path(AIPO), "rho": 3.0}
    assert to_json({"b": [1.5], "a": 2}) == {"b": {"$list": [1.5]}, "a": 2}
    assert to_json({2: "b", 1: "a"}) == {"$map": [[1, "a"], [2, "b"]]}


NAMELESS: Callable[[Any], Any] = lambda prompt: prompt  # noqa: E731  # a lambda is what is tested


class Thing:
    def method(self, prompt: Prompt) -> Prompt:
        return prompt


def outer() -> Any:
    def inner(prompt: Prompt) -> Prompt:
        return prompt

    return inner


@pytest.mark.parametrize(
    "value",
    [NAMELESS, outer(), Thing().method, Thing(), b"bytes", {1, 2}, 1j, object()],
    ids=["lambda", "local", "method", "object", "bytes", "set", "complex", "bare"],
)
def test_what_has_no_exact_json_form_is_refused_by_its_field(value: Any) -> None:
    with pytest.raises(GraphError, match=r"^anything: "):
        fields_to_json(Configured(anything=value))
    g = Graph("g")
    g.add(Configured(anything={"deep": (value,)}), name="odd")(g.add(Source())())
    with pytest.raises(GraphError, match=r"^odd: anything: ") as caught:
        g.check()
    assert "\n" not in str(caught.value)


def test_a_graph_file_builds_data_classes_only() -> None:
    with pytest.raises(GraphError, match=r"^os:getcwd is not a dataclass; only components"):
        build("os:getcwd", {})
    with pytest.raises(GraphError, match=r"^subprocess:Popen is not a dataclass"):
        from_json({"$type": "subprocess:Popen", "args": "true"})


@pytest.mark.parametrize("path", ["nowhere:X", "os:nothing", "os", "", ":", "os:path.nothing"])
def test_a_path_that_leads_nowhere_is_named(path: str) -> None:
    with pytest.raises(GraphError, match=r"can't be imported .*; write it as package\.module:name"):
        resolve(path)


def test_a_configuration_that_does_not_fit_is_named_in_one_line() -> None:
    with pytest.raises(GraphError) as caught:
        build(import_path(Sampling), {"max_new_tokens": 0, "temperature": "hot"})
    assert str(caught.value) == (
        "arriero.components.sampling:Sampling doesn't take this configuration: "
        "max_new_tokens: Input should be greater than 0 (got 0); "
        "temperature: Input should be a valid number, unable to parse string as a number (got 'hot')"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "nobody"}, "the graph file names 'nobody', which it doesn't hold; it has source, s0"),
        ({"component": "tests.graphs:Gone"}, "'tests.graphs:Gone' can't be imported"),
        ({"output": "tests.graphs:Stage"}, "tests.graphs:Stage is annotated as Stage; one record type"),
    ],
)
def test_a_damaged_graph_file_is_refused(change: dict[str, str], message: str) -> None:
    data = json.loads(chain((1, 1)).spec().model_dump_json())
    node = data["nodes"][1]
    (node["inputs"][0] if "source" in change else node).update(change)
    with pytest.raises(GraphError) as caught:
        Graph.from_spec(GraphSpec.model_validate(data))
    assert message in str(caught.value)


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
