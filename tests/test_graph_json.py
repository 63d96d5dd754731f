"""Graphs as JSON and back, bit for bit; what has no exact form is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
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
from arriero.components.rewards import Contains, Function
from arriero.components.sampling import Sampling
from arriero.components.supervised import ExampleSource, SupervisedBatch
from arriero.components.trainer import Trainer
from arriero.engine.errors import GraphError
from arriero.engine.graph import Graph, PerRecord
from arriero.engine.portable import build, fields_to_json, from_json, import_path, resolve, to_json
from arriero.pipelines.aipo import AIPOConfig, aipo
from arriero.pipelines.grpo import GRPOConfig, grpo
from arriero.pipelines.sft import SFTConfig, sft
from arriero.schemas.graph import Capacity, GraphSpec, Resources
from arriero.schemas.messages import Prompt, Rollout
from tests.graphs import Source, chain, looped

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
    code = "from tests.test_graph_json import pipelines\nprint([g.spec().digest for g in pipelines()])"
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
    assert to_json(Colour.RED) == {"$ref": "tests.test_graph_json:Colour.RED"}
    assert to_json(same) == {"$ref": "tests.test_graph_json:same"}
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


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def f(\n", "SyntaxError: '(' was never closed (toy_broken.py:1)"),
        ("x = 1\ny = {}['no']\n", "KeyError: 'no' (toy_broken.py:2)"),
        ("int('many')\n", "ValueError: invalid literal for int() with base 10: 'many' (toy_broken.py:1)"),
        ("import no_such_thing\n", "ModuleNotFoundError: No module named 'no_such_thing' (toy_broken.py:1)"),
        ("raise SystemExit(3)\n", "SystemExit: 3 (toy_broken.py:1)"),
    ],
)
def test_a_module_that_fails_is_told_by_its_line(
    text: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy_broken.py").write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(GraphError) as caught:
        resolve("toy_broken:f")
    assert str(caught.value) == f"'toy_broken:f' can't be imported: {told}"


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
