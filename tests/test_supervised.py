"""Supervised data: what is trained on, of which tokens, and what is left out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from arriero.components.supervised import ExampleSource, SupervisedBatch
from arriero.engine.errors import UserError
from arriero.engine.graph import Graph, Rates
from arriero.schemas.messages import Batch, Dropped, Example
from tests.drive import Alone, dropped, kept, outputs, stream

Settings = dict[str, str | int | list[int] | dict[str, str | bool]]

WORDS = {"<bos>": 0, "<eos>": 1, "two": 2, "plus": 3, "is": 4, "four": 5}


def model(
    path: Path,
    *,
    ends_texts: bool = False,
    config: str = "tokenizer_config.json",
    settings: Settings | None = None,
) -> str:
    """A model directory whose tokenizer has one id per word and a truncation of its training."""
    tokenizer = Tokenizer(WordLevel(WORDS, unk_token="<eos>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]  # a property without setter type
    single = "<bos> $A <eos>" if ends_texts else "<bos> $A"
    tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=[("<bos>", 0), ("<eos>", 1)])  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.enable_truncation(3)  # pyright: ignore[reportUnknownMemberType]
    tokenizer.save(str(path / "tokenizer.json"))
    (path / config).write_text(json.dumps(settings or {"eos_token": "<eos>"}))
    return str(path)


async def run(component: SupervisedBatch, *examples: Example) -> list[Batch | Dropped]:
    return await outputs(component.run(stream(examples, Example)))


def example(number: int, prompt: str = "two plus two", response: str = "is four") -> Example:
    return Example(id=f"e0-r{number}", origins=(number,), prompt=prompt, response=response)


@pytest.mark.parametrize("ends_texts", [False, True])
async def test_the_response_and_the_end_are_trained_on(tmp_path: Path, ends_texts: bool) -> None:
    component = SupervisedBatch(model=model(tmp_path, ends_texts=ends_texts), examples=1, max_length=10)
    (batch,) = kept(await run(component, example(5)))
    (sample,) = batch.samples
    assert sample.tokens.tolist() == [0, 2, 3, 2, 4, 5, 1]
    assert sample.mask.tolist() == [False] * 4 + [True] * 3
    assert sample.advantages.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert (sample.logprobs, sample.versions, sample.origin, sample.group) == (None, None, 5, "e0-r5")
    assert (batch.parents, batch.origins) == (("e0-r5",), (5,))


async def test_what_nothing_predicts_is_not_trained_on(tmp_path: Path) -> None:
    path = model(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.post_processor = None  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (batch,) = kept(await run(SupervisedBatch(model=path, examples=1, max_length=9), example(0, prompt="")))
    assert batch.samples[0].tokens.tolist() == [4, 5, 1]
    assert batch.samples[0].mask.tolist() == [False, True, True]


async def test_long_examples_are_dropped_whole_and_the_last_batch_may_be_smaller(tmp_path: Path) -> None:
    path = model(tmp_path)
    examples = [example(0), example(1, response="is is four"), example(2), example(3)]
    found = await run(SupervisedBatch(model=path, examples=2, max_length=7), *examples)
    assert [b.parents for b in kept(found)] == [("e0-r0", "e0-r2"), ("e0-r3",)]
    assert [(d.parent, d.reason, d.detail) for d in dropped(found)] == [
        ("e0-r1", "too_long", "8 tokens, max_length is 7")
    ]
    found = await run(SupervisedBatch(model=path, examples=2, max_length=7, drop_last=True), *examples)
    assert [b.parents for b in kept(found)] == [("e0-r0", "e0-r2")]
    assert [(d.parent, d.reason) for d in dropped(found)] == [("e0-r1", "too_long"), ("e0-r3", "filtered")]


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ("tokenizer_config.json", {"eos_token": {"content": "four", "lstrip": False}}),
        ("generation_config.json", {"eos_token_id": [5, 1]}),
        ("config.json", {"eos_token_id": 5}),
    ],
)
async def test_the_end_is_found_in_any_of_the_configs(
    tmp_path: Path, config: str, settings: Settings
) -> None:
    component = SupervisedBatch(
        model=model(tmp_path, config=config, settings=settings), examples=1, max_length=9
    )
    (batch,) = kept(await run(component, example(0, response="is")))
    assert batch.samples[0].tokens.tolist()[-2:] == [4, 5]


async def test_a_model_without_tokenizer_or_end_is_refused(tmp_path: Path) -> None:
    component = SupervisedBatch(model=str(tmp_path), examples=1, max_length=9)
    with pytest.raises(UserError, match=r"no tokenizer\.json in this directory"):
        await run(component, example(0))
    assert "no tokenizer.json" in next(iter(component.problems(Alone())))
    model(tmp_path, settings={"pad_token": "<bos>"})
    assert list(component.problems(Alone())) == []
    with pytest.raises(UserError, match="no eos_token"):
        await run(component, example(0))


async def test_examples_come_once_per_epoch(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"p{i}", "response": f"r{i}", "x": 1}) + "\n" for i in range(5))
    )
    found = kept(await outputs(ExampleSource(path=str(path), epochs=2, limit=4).run()))
    assert [e.id.partition("-")[0] for e in found] == ["e0"] * 4 + ["e1"] * 4
    assert sorted(e.id for e in found) == [f"e{e}-r{i}" for e in range(2) for i in range(4)]
    assert all(e.prompt[1:] == e.response[1:] == e.id.partition("-r")[2] for e in found)
    with pytest.raises(UserError, match=r"d\.jsonl:1: no field 'completion'"):
        await outputs(ExampleSource(path=str(path), response_field="completion").run())
    assert TypeAdapter(ExampleSource).validate_python("a.jsonl") == ExampleSource(path="a.jsonl")
    assert "no such file" in next(iter(ExampleSource(path="a.jsonl").problems(Alone())))


def test_supervised_components_fit_in_a_graph() -> None:
    graph = Graph("sft")
    batcher = SupervisedBatch(model="m", examples=3, max_length=9)
    graph.add(batcher)(graph.add(ExampleSource(path="d.jsonl"))())
    assert batcher.rates() == Rates(consumes={"examples": 3})
    assert Graph.from_spec(graph.spec()).spec() == graph.spec()


def test_light_components_import_nothing_heavy() -> None:
    names = ("prompts", "rewards", "advantage", "supervised")
    code = "import sys\n" + "".join(f"import arriero.components.{name}\n" for name in names)
    code += "print([m for m in ('torch', 'transformers', 'pyarrow', 'reasoning_gym') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
