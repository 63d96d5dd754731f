"""Forms and constraints: regular expressions, JSON schemas, IFEval's instructions, shaping, weighted sums."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
from pydantic import JsonValue, TypeAdapter, ValidationError

from arriero.components.rewards import (
    Constraint,
    Constraints,
    Contains,
    ExactMatch,
    Format,
    JsonSchema,
    Known,
    Length,
    Limits,
    Regex,
    Reward,
    RolloutReward,
    Term,
    WeightedSum,
)
from arriero.components.verifiers.instructions import INSTRUCTIONS, Refused, check
from arriero.components.verifiers.mixture import combined
from arriero.engine.errors import UserError
from arriero.engine.portable import from_json, to_json
from arriero.schemas.messages import Outcome, Prompt, Rollout, Score
from tests.verdicts import group, outcome, run, scores


def test_a_pattern_counts_where_it_occurs_or_as_the_whole() -> None:
    assert outcome(Regex(pattern=r"\d+ dogs"), "", "so 3 dogs ran") == "ok"
    assert outcome(Regex(pattern=r"\d+ dogs", whole=True), "", "so 3 dogs ran") == "wrong"
    assert outcome(Regex(pattern="dogs"), "", "DOGS") == "wrong"
    assert outcome(Regex(pattern="dogs", ignore_case=True), "", "DOGS") == "ok"


def test_a_group_of_a_pattern_is_compared_with_the_answer() -> None:
    reward = Regex(pattern=r"<answer>(?P<answer>.*?)</answer>")
    assert outcome(reward, "7", "<answer> 7 </answer>") == "ok"
    assert outcome(reward, "7", "<answer>7</answer> no: <answer>8</answer>") == "wrong"
    assert outcome(reward, "7", "7") == "wrong"
    assert "no answer" in reward.unscorable(Prompt(text="?"))


async def test_a_pattern_that_never_ends_is_a_timeout() -> None:
    reward = Regex(pattern=r"^(a+)+$", limits=Limits(time_s=3.0))
    first, second = await scores(reward, group("a" * 60 + "b", "aaa"))
    assert (first.outcome, second.outcome) == (Outcome.TIMEOUT, Outcome.OK)


async def test_a_pattern_that_takes_anything_is_refused() -> None:
    with pytest.raises(UserError, match="regex can't be trusted: it finds a known wrong response '' ok"):
        await run(Regex(pattern=".*"), group("a"))
    with pytest.raises(ValidationError, match="no regular expression"):
        Regex(pattern="(")


PERSON: dict[str, JsonValue] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ('{"name": "Ann", "age": 3}', "ok"),
        ('Here:\n```json\n{"name": "Ann"}\n```', "ok"),
        ('<think>{"age": 1}</think>{"name": "Ann"}', "ok"),
        ('{"name": "Ann", "age": -3}', "wrong"),
        ('{"age": 3}', "wrong"),
        ('Here: {"name": "Ann"}', "wrong"),
        ('{"name": "Ann", "name": "Bob"}', "wrong"),
        ('{"name": "Ann", "age": NaN}', "wrong"),
        ('{"name": "Ann"', "wrong"),
        ("[" * 100_000, "wrong"),
        ("", "wrong"),
    ],
)
def test_a_response_is_json_of_the_schema_or_wrong(text: str, want: str) -> None:
    pytest.importorskip("jsonschema")
    assert outcome(JsonSchema(schema=PERSON), "", text) == want


@pytest.mark.parametrize(
    ("answer", "text", "same"),
    [
        ("1", "true", False), ("true", "1", False), ("0", "false", False), ("1", "1.0", True),
        ('{"a": [1]}', '{"a": [true]}', False), ('{"a": 1, "b": 2}', '{"b": 2, "a": 1}', True),
        ("0.3", "0.30000000000000004", True), ("[1, 2]", "[2, 1]", False),
    ],
)  # fmt: skip
def test_values_are_the_same_as_json_has_them(answer: str, text: str, same: bool) -> None:
    """Python's == takes True for 1."""
    pytest.importorskip("jsonschema")
    assert outcome(JsonSchema(match_answer=True), answer, text) == ("ok" if same else "wrong")


def test_a_row_may_bring_its_own_schema_and_answer() -> None:
    pytest.importorskip("jsonschema")
    reward = JsonSchema(schema_field="form", match_answer=True)
    assert outcome(reward, '{"a": 1}', '{"a":1.0}', form=json.dumps({"type": "object"})) == "ok"
    assert outcome(reward, '{"a": 1}', '{"a": 2}', form={"type": "object"}) == "wrong"
    assert "has no schema" in reward.unscorable(Prompt(text="?", answer="1", metadata={}))
    assert "no JSON schema" in reward.unscorable(Prompt(text="?", answer="1", metadata={"form": {"type": 3}}))
    assert "answer is no JSON" in reward.unscorable(Prompt(text="?", answer="{", metadata={"form": {}}))


async def test_a_schema_that_is_none_ends_the_run() -> None:
    pytest.importorskip("jsonschema")
    with pytest.raises(UserError, match=r"json_schema can't run in a worker: .*no JSON schema"):
        await run(JsonSchema(schema={"type": "objekt"}), group("{}"))


async def test_references_outside_a_schema_are_not_followed() -> None:
    pytest.importorskip("jsonschema")
    reward = JsonSchema(schema={"$ref": "http://127.0.0.1:9/x.json"}, known=())
    with pytest.raises(UserError, match="json_schema"):  # no verdict on the canaries, or on all of them
        await run(reward, *(group("{}", "[]", id=str(k)) for k in range(200)))


# (id, arguments, a text that follows it, one that doesn't)
INSTRUCTED: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["cat", "dog"]}, "A dog and a Cat.", "A dog and a catalogue."),
    (
        "keywords:frequency",
        {"keyword": "go", "frequency": 2, "relation": "at least"},
        "Go, go!",
        "Go, gopher!",
    ),
    ("keywords:forbidden_words", {"forbidden_words": ["bad"]}, "Badly.", "Bad."),
    (
        "keywords:letter_frequency",
        {"letter": "e", "let_frequency": 2, "let_relation": "less than"},
        "the",
        "eel",
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        "A b. C d!",
        "Dr. No is.",
    ),
    (
        "language:response_language",
        {"language": "fr"},
        "Bonjour, je m'appelle Pierre et j'habite en France.",
        "Good morning, my name is Peter and I live in France.",
    ),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "don't go", "do not go"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        "One.\n\nThen two.",
        "Then one.\n\nTwo.",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] at [place]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye\nP.S. More", "Bye, cups. More"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n- b\n* c"),
    ("detectable_format:constrained_response", {}, "My answer is yes.", "Yes."),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        "*a b* and **c**",
        "*a b* and c",
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\na\nSection 2\nb",
        "Section 1\na",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<A title>>\ntext", "A title\ntext"),
    ("combination:two_responses", {}, "one\n******\ntwo", "one\n******\none"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "Say it. It.", "It."),
    ("startend:end_checker", {"end_phrase": "The end."}, "So. the end.", "The end. So."),
    ("startend:quotation", {}, '"All of it"', '"Part" of it'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "NO WAY out",
        "No WAY out",
    ),
    ("change_case:english_capital", {}, "ALL OF IT", "ALL OF it"),
    ("change_case:english_lowercase", {}, "all of it", "all of It"),
    ("punctuation:no_comma", {}, "one and two", "one, two"),
]


@pytest.mark.parametrize(("name", "arguments", "right", "wrong"), INSTRUCTED, ids=lambda v: str(v)[:40])
def test_an_instruction_is_followed_or_not(
    name: str, arguments: dict[str, Any], right: str, wrong: str
) -> None:
    assert check(name, right, arguments)
    assert not check(name, wrong, arguments)


@pytest.mark.parametrize("text", ["\n" * 100_000, " " * 100_000, "x" + " " * 99_000 + "x", "* " * 50_000])
def test_every_instruction_is_checked_in_a_moment(text: str) -> None:
    for name, arguments, *_ in INSTRUCTED:
        start = time.process_time()
        check(name, text, arguments)
        assert time.process_time() - start < 3, name


def test_every_instruction_has_a_case() -> None:
    assert {name for name, *_ in INSTRUCTED} == set(INSTRUCTIONS)


@pytest.mark.parametrize(("name", "arguments"), [(n, a) for n, a, *_ in INSTRUCTED if a])
def test_an_instruction_without_its_arguments_is_refused(name: str, arguments: dict[str, Any]) -> None:
    # tinker-cookbook #643: a misspelt key of IFEval's arguments fell back to a default.
    for missing in arguments:
        with pytest.raises(Refused, match=missing):
            check(name, "Then one.\n\nThen two.", {k: v for k, v in arguments.items() if k != missing})


def test_all_instructions_of_a_row_and_of_the_configuration_must_hold() -> None:
    row: dict[str, Any] = {
        "instruction_id_list": ["punctuation:no_comma", "startend:end_checker"],
        "kwargs": [{}, {"end_phrase": "Bye."}],
    }
    assert outcome(Constraints(), "", "Well then. Bye.", **row) == "ok"
    assert outcome(Constraints(), "", "Well, then. Bye.", **row) == "wrong"
    assert outcome(Constraints(), "", "", **row) == "wrong"
    lower = Constraint(id="change_case:english_lowercase")
    assert outcome(Constraints(always=(lower,)), "", "Well then. Bye.", **row) == "wrong"
    found = Constraints(partial=True).score(Prompt(text="?", metadata=row), group("Well, bye.").rollouts[0])
    assert (found.value, found.outcome, found.detail) == (0.5, Outcome.WRONG, "punctuation:no_comma")


def test_a_row_whose_instructions_cannot_be_checked_is_set_aside() -> None:
    def why(**row: Any) -> str:
        return Constraints().unscorable(Prompt(text="?", metadata=row, row=2))

    assert why(instruction_id_list=["language:response_tongue"], kwargs=[{}]) == (
        "row 2: instruction 'language:response_tongue' isn't known here"
    )
    assert "no lists of one length" in why(instruction_id_list=["punctuation:no_comma"], kwargs=[])
    assert "no instructions" in why()
    with pytest.raises(ValidationError, match="unknown instruction"):
        Constraint(id="punctuation:no_coma")


def sampled(num_tokens: int, text: str = "") -> Rollout:
    size = num_tokens + 2
    mask = np.arange(size) >= 2
    return Rollout(
        tokens=np.zeros(size, np.int32),
        mask=mask,
        logprobs=np.where(mask, -1.0, np.nan).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        text=text,
        finish="stop",
    )


@pytest.mark.parametrize(
    ("num_tokens", "value"), [(0, 0.0), (100, 0.0), (110, -0.5), (120, -1.0), (130, -1.0), (1000, -1.0)]
)
def test_the_length_penalty_falls_over_the_buffer_and_has_a_floor(num_tokens: int, value: float) -> None:
    # DAPO, equation 13; AReaL's has no floor and gives -1.5 at 130.
    reward = Length(longest=120, buffer=20)
    assert reward.score(Prompt(text="?"), sampled(num_tokens)).value == value


@pytest.mark.parametrize(
    ("text", "formed"),
    [
        (r"<think>hm</think> \boxed{1}", True),
        (r"<think>\boxed{2}</think> \boxed{1}", True),
        (r"hm \boxed{1}", False),
        (r"<think>hm \boxed{1}", False),
        (r"<think>hm</think> \boxed{1} \boxed{2}", False),
        (r"<think>hm</think> 1", False),
        (r"<think>a</think><think>b</think> \boxed{1}", False),
        (r"<think>hm</think> \boxed{}", False),
    ],
)
def test_a_format_is_there_exactly_once(text: str, formed: bool) -> None:
    assert Format(thought=True, box=True).formed(text) is formed


def test_a_tag_is_there_exactly_once_with_something_in_it() -> None:
    reward = Format(tag="answer")
    assert reward.formed("<answer>1</answer>")
    for text in (
        "",
        "<answer></answer>",
        "<answer>1",
        "<answer>1</answer><answer>2</answer>",
        "<answer><answer>1</answer>",
    ):
        assert not reward.formed(text)
    with pytest.raises(ValidationError, match="asks for nothing"):
        Format()


async def test_a_sum_keeps_the_raw_reward_apart_from_shaping() -> None:
    reward = WeightedSum(
        terms=(
            Term(reward=ExactMatch(), weight=2.0),
            Term(reward=Format(tag="a"), weight=0.5),
            Term(reward=Length(longest=1), weight=1.0),
        )
    )
    found = await scores(reward, group("7", "<a>7</a>", answer="7"))
    assert [(s.value, s.raw, s.outcome.value) for s in found] == [(2.0, 2.0, "ok"), (0.5, 0.0, "wrong")]
    assert found[0].detail == "exact_match 1, format 0, length 0"


def test_a_term_without_a_verdict_leaves_the_sum_without_one() -> None:
    right, lost = (
        Score(value=1.0, outcome=Outcome.OK),
        Score(value=0.0, outcome=Outcome.TIMEOUT, detail="late"),
    )
    exact, other = ExactMatch(), Contains(text="x")
    found = combined([(exact, 1.0, right), (other, 1.0, lost)])
    assert (found.value, found.outcome, found.detail) == (0.0, Outcome.TIMEOUT, "contains: late")
    assert combined([(exact, 1.0, right), (other, 0.0, lost)]).outcome is Outcome.OK  # only recorded


async def test_every_term_is_tried_on_its_own_canaries() -> None:
    blind = Regex(pattern=".", known=(Known(right="a", wrong="b"),))
    with pytest.raises(UserError, match="regex can't be trusted"):
        await run(WeightedSum(terms=(Term(reward=ExactMatch()), Term(reward=blind))), group("a", answer="a"))


def test_a_sum_is_read_from_a_configuration_and_survives_json() -> None:
    config = {
        "kind": "weighted_sum",
        "terms": [{"reward": {"kind": "math"}}, {"reward": {"kind": "length", "longest": 9}, "weight": 0.1}],
    }
    reward = TypeAdapter[RolloutReward](Reward).validate_python(config)
    assert isinstance(reward, WeightedSum)
    assert [t.weight for t in reward.terms] == [1.0, 0.1]
    assert from_json(json.loads(json.dumps(to_json(reward)))) == reward
