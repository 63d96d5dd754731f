"""Supervised data as chat messages: what of a conversation is learned, in the template of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from arriero.components.chat import ChatFormat
from arriero.components.labelled import LabelledBatch, LabelledSource
from arriero.components.preferences import PreferenceBatch, PreferenceSource
from arriero.components.supervised import ExampleSource, SupervisedBatch
from arriero.engine.errors import UserError
from arriero.schemas.messages import Batch, Example, Record, Sample
from tests.drive import Alone, kept, outputs, stream
from tests.inline_runs import saved
from tests.test_chat import CHATML, FORGETFUL
from tests.tiny_models import tiny_llama, tiny_tokenizer

ASKED = [{"role": "user", "content": "1+1"}]
TALK = [*ASKED, {"role": "assistant", "content": "2"}, {"role": "user", "content": "2+2"}]
ANSWERED = [*TALK, {"role": "assistant", "content": "4"}]


def file(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def shown(sample: Sample) -> str:
    """The text of a sample, with what is learned in braces."""
    text: Any = tiny_tokenizer(100)
    pieces: list[tuple[bool, list[int]]] = []
    for token, learned in zip(sample.tokens.tolist(), sample.mask.tolist(), strict=True):
        if not pieces or pieces[-1][0] != learned:
            pieces.append((learned, []))
        pieces[-1][1].append(token)
    return "".join(f"{{{text.decode(ids)}}}" if learned else text.decode(ids) for learned, ids in pieces)


async def batched(source: Any, batcher: Any) -> tuple[Sample, ...]:
    records: list[Any] = await outputs(source.run())
    kind = cast("type[Record]", records[0].__class__)
    (batch,) = kept(await outputs(batcher.run(stream(records, kind))))
    assert isinstance(batch, Batch)
    return batch.samples


def model(path: Path) -> str:
    return saved(tiny_llama(seed=1, vocab_size=100), path / "model", vocab_size=100)


CHAT = ChatFormat(template=CHATML)


async def test_every_turn_of_the_assistant_is_learned_and_nothing_else(tmp_path: Path) -> None:
    source = ExampleSource(path=file(tmp_path / "d.jsonl", {"messages": ANSWERED}), epochs=1)
    batcher = SupervisedBatch(
        model=model(tmp_path), examples=1, max_length=99, chat=ChatFormat(template=CHATML)
    )
    (sample,) = await batched(source, batcher)
    assert shown(sample) == "[user]1+1<eos>\n[assistant]{2<eos>}\n[user]2+2<eos>\n[assistant]{4<eos>}"


async def test_a_prompt_is_shown_by_the_template_as_text_or_as_messages(tmp_path: Path) -> None:
    rows = ({"prompt": "1+1", "response": "2"}, {"prompt": ASKED, "response": "2"})
    source = ExampleSource(path=file(tmp_path / "d.jsonl", *rows), epochs=1)
    chat = ChatFormat(template=CHATML, system="Add")
    batcher = SupervisedBatch(model=model(tmp_path), examples=2, max_length=99, chat=chat)
    first, second = await batched(source, batcher)
    assert shown(first) == shown(second) == "[system]Add<eos>\n[user]1+1<eos>\n[assistant]{2<eos>}"


async def test_of_a_pair_only_the_last_answers_are_learned(tmp_path: Path) -> None:
    other = [*TALK, {"role": "assistant", "content": "5"}]
    path = file(tmp_path / "d.jsonl", {"prompt": "ignored", "chosen": ANSWERED, "rejected": other})
    chat = ChatFormat(template=CHATML)
    batcher = PreferenceBatch(model=model(tmp_path), pairs=1, max_length=99, chat=chat)
    good, bad = await batched(PreferenceSource(path=path, epochs=1), batcher)
    before = "[user]1+1<eos>\n[assistant]2<eos>\n[user]2+2<eos>\n[assistant]"
    assert (shown(good), shown(bad)) == (f"{before}{{4<eos>}}", f"{before}{{5<eos>}}")
    judged = LabelledBatch(model=batcher.model, examples=2, max_length=99, mismatched=False, chat=chat)
    assert [shown(s) for s in await batched(LabelledSource(path=path, epochs=1), judged)] == [
        shown(good), shown(bad),
    ]  # fmt: skip


async def test_a_pair_that_answers_two_conversations_is_named(tmp_path: Path) -> None:
    other = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "5"}]
    path = file(tmp_path / "d.jsonl", {"chosen": ANSWERED, "rejected": other})
    with pytest.raises(UserError, match=r"d\.jsonl:1: 'chosen' and 'rejected' answer different"):
        await outputs(PreferenceSource(path=path, epochs=1).run())


async def test_messages_without_a_template_or_an_answer_are_refused(tmp_path: Path) -> None:
    source = ExampleSource(path=file(tmp_path / "d.jsonl", {"messages": ANSWERED}), epochs=1)
    plain = SupervisedBatch(model=model(tmp_path), examples=1, max_length=99)
    with pytest.raises(UserError, match=r"the data are chat messages; set chat\.template"):
        await batched(source, plain)
    asked = ExampleSource(path=file(tmp_path / "q.jsonl", {"messages": TALK}), epochs=1)
    with pytest.raises(UserError, match=r"q\.jsonl:1: field 'messages' ends with a message of the user"):
        await outputs(asked.run())


async def test_a_template_that_rewrites_earlier_turns_learns_single_ones_only(tmp_path: Path) -> None:
    batcher = SupervisedBatch(
        model=model(tmp_path), examples=1, max_length=99, chat=ChatFormat(template=FORGETFUL)
    )
    (sample,) = await batched(
        ExampleSource(path=file(tmp_path / "one.jsonl", {"prompt": ASKED, "response": "2"}), epochs=1),
        batcher,
    )
    assert shown(sample) == "[user]1+1<eos>[assistant]{2<eos>}"
    talk = ExampleSource(path=file(tmp_path / "talk.jsonl", {"messages": ANSWERED}), epochs=1)
    with pytest.raises(UserError, match="the chat template"):
        await batched(talk, batcher)


def test_what_a_response_says_ends_no_turn(tmp_path: Path) -> None:
    from arriero.components.text_ids import TextIds

    text = TextIds(model(tmp_path), ChatFormat(template=CHATML))
    sample = text.sample(Example(id="e", prompt="?", response="a<eos>b"), "?", "a<eos>b")
    assert shown(sample) == "[user]?<eos>\n[assistant]{a<<unk>eos>b<eos>}"


def test_a_template_that_is_not_there_is_a_problem_of_the_graph(tmp_path: Path) -> None:
    found = SupervisedBatch(
        model=model(tmp_path), examples=1, max_length=9, chat=ChatFormat(template="model")
    ).problems(Alone())
    assert "has no chat template" in next(iter(found))


def test_plain_text_without_turns_is_not_shown_by_a_template(tmp_path: Path) -> None:
    plain = ExampleSource(path=file(tmp_path / "d.jsonl", {"response": "2"}), prompt_field="")
    batcher = SupervisedBatch(model=model(tmp_path), examples=1, max_length=9, chat=CHAT)
    (said,) = batcher.problems(Alone(plain))
    assert "has no turns that a chat template could show" in said
    assert not list(batcher.problems(Alone(ExampleSource(path=plain.path))))
