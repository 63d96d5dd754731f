"""Prompts from files and from reasoning-gym: order, hold-out, and every fault of the input in one line."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from arriero.components.generator import Generator
from arriero.components.prompts import PromptSource
from arriero.components.row_order import permutation
from arriero.components.sampling import Sampling
from arriero.engine.codec import decode, encode
from arriero.engine.errors import UserError
from arriero.engine.graph import Graph
from arriero.schemas.messages import Prompt
from tests.drive import Alone, outputs
from tests.inline_runs import saved
from tests.tiny_models import tiny_llama


def write(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def numbered(path: Path, count: int) -> str:
    return write(path, [{"prompt": f"p{i}", "answer": i} for i in range(count)])


async def prompts(source: PromptSource, first: int | None = None) -> list[Prompt]:
    return [p for p in await outputs(source.run(), first) if isinstance(p, Prompt)]


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


@given(st.integers(0, 2**40), st.integers(0, 1000), st.integers(0, 200))
def test_a_permutation_has_every_row_once(seed: int, epoch: int, size: int) -> None:
    assert sorted(permutation(seed, epoch, size)) == list(range(size))


@given(st.integers(0, 2**40), st.integers(0, 1000))
def test_a_permutation_is_a_function_of_seed_and_epoch(seed: int, epoch: int) -> None:
    order = permutation(seed, epoch, 50).tolist()
    assert order == permutation(seed, epoch, 50).tolist()
    assert order != permutation(seed, epoch + 1, 50).tolist()
    assert order != permutation(seed + 1, epoch, 50).tolist()


@pytest.mark.parametrize("shuffle", [False, True])
async def test_every_row_comes_once_per_epoch(tmp_path: Path, shuffle: bool) -> None:
    source = PromptSource(path=numbered(tmp_path / "d.jsonl", 7), shuffle=shuffle, epochs=3)
    found = await prompts(source)
    assert len(found) == 21
    for epoch in range(3):
        rows = [p.row for p in found if p.epoch == epoch]
        assert sorted(rows) == list(range(7))
        assert (rows == list(range(7))) is not shuffle
    assert len({p.id for p in found}) == 21
    assert all(p.id == f"e{p.epoch}-r{p.row}" and p.text == f"p{p.row}" for p in found)
    assert all(p.answer == str(p.row) and p.split == "train" for p in found)


async def test_without_epochs_the_source_has_no_end(tmp_path: Path) -> None:
    found = await prompts(PromptSource(path=numbered(tmp_path / "d.jsonl", 2)), first=9)
    assert [p.epoch for p in found] == [0, 0, 1, 1, 2, 2, 3, 3, 4]


@settings(max_examples=30)
@given(
    rows=st.integers(2, 12),
    held=st.integers(1, 11),
    limit=st.none() | st.integers(1, 12),
    seed=st.integers(0, 9),
)
async def test_held_out_rows_are_never_trained_on(
    tmp_path_factory: pytest.TempPathFactory, rows: int, held: int, limit: int | None, seed: int
) -> None:
    held = min(held, rows - 1)
    path = numbered(tmp_path_factory.mktemp("held") / "d.jsonl", rows)
    source = PromptSource(path=path, held_out=held, limit=limit, seed=seed, epochs=2)
    evaluation = await source.evaluation()
    assert evaluation is not None
    assert [p.row for p in evaluation.prompts] == list(range(rows - held, rows))
    assert {p.row for p in await prompts(source)} == set(range(min(rows - held, limit or rows)))
    assert all(p.split == "eval" for p in evaluation.prompts)


async def test_evaluation_may_come_from_its_own_file(tmp_path: Path) -> None:
    train, test = numbered(tmp_path / "train.jsonl", 3), numbered(tmp_path / "test.jsonl", 5)
    evaluation = await PromptSource(path=train, eval_path=test, eval_limit=2, eval_every=10).evaluation()
    assert evaluation is not None
    assert [(p.id, p.text) for p in evaluation.prompts] == [("eval-r0", "p0"), ("eval-r1", "p1")]
    assert await PromptSource(path=train).evaluation() is None


async def test_holding_out_everything_is_refused(tmp_path: Path) -> None:
    path = numbered(tmp_path / "d.jsonl", 4)
    with pytest.raises(UserError) as error:
        await PromptSource(path=path, held_out=4).evaluation()
    assert one_line(error) == f"{path}: held_out=4 leaves nothing of 4 rows to train on"


async def test_the_template_leaves_other_braces_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"prompt": "{x}: 1+1?"}])
    found = await prompts(PromptSource(path=path, template="{prompt} Use \\boxed{}.", epochs=1))
    assert found[0].text == "{x}: 1+1? Use \\boxed{}."
    assert found[0].answer == ""
    with pytest.raises(ValidationError, match=r"has no \{prompt\}"):
        PromptSource(path=path, template="Question:")


async def test_rows_keep_their_other_fields(tmp_path: Path) -> None:
    row: dict[str, object] = {
        "question": "q",
        "answer": "a",
        "level": 3,
        "tags": ["x", None],
        "more": {"k": 1.5},
    }
    found = await prompts(PromptSource(path=write(tmp_path / "d.jsonl", [row]), epochs=1))
    assert (found[0].text, found[0].answer) == ("q", "a")
    assert found[0].metadata == row


async def test_parquet_and_compressed_files_hold_the_same_prompts(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    rows: list[dict[str, object]] = [{"prompt": f"p{i} é\u2028", "answer": str(i)} for i in range(3)]
    plain = write(tmp_path / "d.jsonl", rows)
    packed = tmp_path / "d.jsonl.gz"
    packed.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    expected = await prompts(PromptSource(path=plain, epochs=1))
    assert len(expected) == 3
    for path in (packed, tmp_path / "d.parquet", f"file://{plain}"):
        assert await prompts(PromptSource(path=str(path), epochs=1)) == expected


async def test_the_largest_numbers_of_a_message_are_kept(tmp_path: Path) -> None:
    row: dict[str, object] = {"prompt": "p", "low": -(2**63), "high": 2**63 - 1, "real": 1e300}
    (found,) = await prompts(PromptSource(path=write(tmp_path / "d.jsonl", [row]), epochs=1))
    assert decode(encode(found), Prompt).metadata == row


async def test_a_url_is_read_through_fsspec(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    with fsspec.open("memory://prompts/d.jsonl", "wt") as file:
        file.write('{"prompt": "hello"}\n')
    source = PromptSource(path="memory://prompts/d.jsonl", epochs=1)
    assert [p.text for p in await prompts(source)] == ["hello"]
    assert list(PromptSource(path="memory://nothing/there.jsonl").problems(Alone())) == []


async def refused(text: str, tmp_path: Path, answer_field: str = "") -> str:
    path = tmp_path / "d.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as error:
        await prompts(PromptSource(path=str(path), answer_field=answer_field))
    return one_line(error).removeprefix(str(path))


SAID = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "2+2?"}]


async def test_a_prompt_may_be_a_list_of_chat_messages(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"prompt": SAID, "answer": "4"}]
    path = write(tmp_path / "d.jsonl", rows)
    (found,) = await prompts(PromptSource(path=path, template="{prompt} In a box.", epochs=1))
    assert [(m.role, m.content) for m in found.messages] == [
        ("system", "Be brief"), ("user", "2+2? In a box."),
    ]  # fmt: skip
    assert (found.text, found.answer) == ("2+2? In a box.", "4")
    assert decode(encode(found), Prompt) == found
    turns = [*SAID, {"role": "assistant", "content": "4"}, {"role": "user", "content": "3+3?"}]
    (longer,) = await prompts(PromptSource(path=write(tmp_path / "e.jsonl", [{"prompt": turns}]), epochs=1))
    assert longer.text == "user: 2+2?\n\nassistant: 4\n\nuser: 3+3?"


async def test_messages_come_out_of_tables_as_out_of_lines(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parts = [{"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]}]
    parquet.write_table(pa.Table.from_pylist([{"prompt": SAID, "name": None}]), tmp_path / "d.parquet")
    (table,) = await prompts(PromptSource(path=str(tmp_path / "d.parquet"), epochs=1))
    (line,) = await prompts(PromptSource(path=write(tmp_path / "d.jsonl", [{"prompt": parts}]), epochs=1))
    assert [m.content for m in table.messages] == ["Be brief", "2+2?"]
    assert [m.content for m in line.messages] == ["2+2?"]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            '[{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]',
            "leave the answer out",
        ),
        ('[{"role": "boss", "content": "2+2?"}]', "role 'boss'; known are system, user, assistant, tool"),
        ('[{"role": "user", "content": [{"type": "image_url"}]}]', "a part of type 'image_url'; only text"),
        ('[{"role": "user", "content": "?", "tool_calls": [1]}]', "with tool_calls; only role and content"),
        ('[{"role": "user", "content": 4}]', "whose content is a int; text is needed"),
        ('["2+2?"]', "field 'prompt' is list; text or a number is needed (prompt_field)"),
    ],
)
async def test_messages_that_cannot_be_shown_are_refused_by_file_and_line(
    tmp_path: Path, said: str, told: str
) -> None:
    found = await refused(f'{{"prompt": {said}, "answer": "4"}}\n', tmp_path)
    assert found.startswith(":1: field 'prompt'")
    assert told in found


async def test_a_question_is_held_out_as_text_and_as_messages(tmp_path: Path) -> None:
    train = write(tmp_path / "t.jsonl", [{"prompt": SAID}, {"prompt": "3+3?"}])
    test = write(tmp_path / "e.jsonl", [{"prompt": "2+2?"}])
    assert [p.text for p in await prompts(PromptSource(path=train, eval_path=test, epochs=1))] == ["3+3?"]


def test_check_looks_at_the_first_row(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"q": "2+2?", "level": 3}])
    (told,) = PromptSource(path=path).problems(Alone())
    assert told == f"{path}:1: no field 'prompt'; the row has 'q', 'level'; set prompt_field to one of these"
    assert list(PromptSource(path=path, prompt_field="q").problems(Alone())) == []
    (where,) = PromptSource(path=path, prompt_field="q", where="levle > 2").problems(Alone())
    assert where.endswith("the row has no field 'levle'; did you mean level?")
    (other,) = PromptSource(
        path=path, prompt_field="q", eval_path=numbered(tmp_path / "e.jsonl", 2)
    ).problems(Alone())
    assert "e.jsonl:1: no field 'q'" in other


def test_check_asks_for_a_template_where_prompts_are_messages(tmp_path: Path) -> None:
    source = PromptSource(path=write(tmp_path / "d.jsonl", [{"prompt": SAID}]))
    model = saved(tiny_llama(seed=1), tmp_path / "model")
    told = list(Generator(model=model, sampling=Sampling(max_new_tokens=2)).problems(Alone(source)))
    assert told == [f"{source.path}: its prompts are chat messages; set chat.template, to `model` say"]


async def test_bad_rows_are_named_by_file_and_line(tmp_path: Path) -> None:
    good = '{"prompt": "a", "answer": "b"}\n'
    assert await refused("\n\n", tmp_path) == ": no rows; give a file that has some"
    assert (await refused(good + "\n{'prompt': 1}\n", tmp_path)).startswith(":3: invalid JSON at column 2: ")
    large = await refused(good + '{"prompt": "a", "n": ' + "9" * 20 + "}\n", tmp_path)
    assert large == f":2: {'9' * 20} has more than 64 bits; write the number as text, in quotes"
    assert await refused(good + "[1]\n", tmp_path) == ":2: a list where a JSON object is needed"
    assert (
        await refused(good + '{"promt": "a", "answer": "b"}\n', tmp_path)
        == ":2: no field 'prompt'; the row has 'promt', 'answer'; did you mean prompt_field='promt'?"
    )
    assert (
        await refused(good, tmp_path, answer_field="gold")
        == ":1: no field 'gold'; the row has 'prompt', 'answer'; set answer_field to one of these"
    )
    assert (
        await refused(good + '{"prompt": "a"}\n', tmp_path)
        == ":2: no field 'answer'; the row has 'prompt'; set answer_field to one of these"
    )
    assert (
        await refused('{"prompt": ["a"]}\n', tmp_path)
        == ":1: field 'prompt' is list; text or a number is needed (prompt_field)"
    )


async def test_unreadable_files_are_refused_in_one_line(tmp_path: Path) -> None:
    bad = {
        "missing.jsonl": (None, "no such file"),
        "latin.jsonl": (b'{"prompt": "\xe9"}\n', "not UTF-8 text"),
        "text.jsonl.gz": (b"not gzip", "can't be read"),
        "text.parquet": (b"not parquet", "not a file of Parquet"),
        "table.xlsx": (b"a,b\n", "must end in .jsonl"),
    }
    for name, (content, why) in bad.items():
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UserError, match=why) as error:
            await prompts(PromptSource(path=str(path)))
        assert one_line(error).startswith(str(path))
    with pytest.raises(UserError, match="can't be opened") as error:
        await prompts(PromptSource(path="nowhere9://x/d.jsonl"))
    assert "nowhere9" in one_line(error)


def test_check_refuses_a_missing_local_file(tmp_path: Path) -> None:
    graph = Graph("g")
    graph.add(PromptSource(path=str(tmp_path / "no.jsonl")))()
    with pytest.raises(UserError, match=r"promptsource: .*no\.jsonl: no such file"):
        graph.check()
    (tmp_path / "yes.jsonl").touch()
    assert list(PromptSource(path=str(tmp_path / "yes.jsonl")).problems(Alone())) == []
    assert "nothing is held out" in next(
        iter(PromptSource(path=str(tmp_path / "yes.jsonl"), eval_every=5).problems(Alone()))
    )


def test_a_string_is_a_path_and_unknown_fields_are_refused() -> None:
    read = TypeAdapter(PromptSource).validate_python
    assert read("gsm8k.jsonl") == PromptSource(path="gsm8k.jsonl")
    with pytest.raises(ValidationError, match="pathh"):
        read({"pathh": "gsm8k.jsonl"})


@pytest.mark.parametrize(
    "fields",
    [
        {"path": "a.jsonl", "size": 5},
        {"path": "a.jsonl", "options": {"x": 1}},
        {"path": "a.jsonl", "held_out": 2, "eval_path": "b.jsonl"},
        {"path": "reasoning_gym:chain_sum", "prompt_field": "question"},
        {"path": "reasoning_gym:chain_sum", "options": {"size": 3}},
        # Another seed of a reasoning-gym set shares most of its items: 99 of 100 for seeds 42 and 43.
        {"path": "reasoning_gym:chain_sum", "eval_path": "reasoning_gym:chain_sum"},
    ],
)
def test_a_field_that_would_be_ignored_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(PromptSource).validate_python(fields)


async def test_reasoning_gym_prompts_are_its_own_items() -> None:
    gym = pytest.importorskip("reasoning_gym")
    source = PromptSource(
        path="reasoning_gym:chain_sum",
        size=20,
        held_out=5,
        epochs=1,
        options={"min_terms": 2, "max_terms": 3, "seed": 7},
    )
    items = gym.create_dataset("chain_sum", seed=7, size=20, min_terms=2, max_terms=3)
    found, evaluation = await prompts(source), await source.evaluation()
    assert evaluation is not None
    assert sorted(p.row for p in found) == list(range(15))
    assert [p.row for p in evaluation.prompts] == list(range(15, 20))
    for p in [*found, *evaluation.prompts]:
        assert (p.text, p.answer) == (items[p.row]["question"], items[p.row]["answer"])
    assert list(source.problems(Alone())) == []


async def test_a_set_with_many_right_answers_has_none_in_its_prompts() -> None:
    pytest.importorskip("reasoning_gym")
    found = await prompts(PromptSource(path="reasoning_gym:graph_color", size=2, epochs=1))
    assert [p.answer for p in found] == ["", ""]
    assert found[0].metadata["answer"] is None


async def test_reasoning_gym_mistakes_are_named() -> None:
    pytest.importorskip("reasoning_gym")
    for source, why in [
        (PromptSource(path="reasoning_gym:chainsum"), "did you mean reasoning_gym:chain_sum?"),
        (PromptSource(path="reasoning_gym:chain_sum", options={"terms": 2}), "terms"),
        (PromptSource(path="reasoning_gym:chain_sum", options={"min_terms": 9, "max_terms": 2}), "max_terms"),
    ]:
        with pytest.raises(UserError) as error:
            await prompts(source)
        assert why in one_line(error)
        assert list(source.problems(Alone())) == [str(error.value)]


async def test_without_reasoning_gym_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError) as error:
        await prompts(PromptSource(path="reasoning_gym:chain_sum"))
    assert "arriero[reasoning-gym]" in one_line(error)


def test_a_source_survives_the_graph_s_json() -> None:
    graph = Graph("g")
    graph.add(PromptSource(path="reasoning_gym:x", options={"levels": [1, {"deep": [2]}]}))()
    assert Graph.from_spec(graph.spec()).spec() == graph.spec()
