"""Episodes: conversations that only grow, on a real tiny model; environments that fail, hang, are late."""

# pyright: reportUnknownMemberType=false
# torch is annotated only in part.

from __future__ import annotations

import asyncio
import itertools
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from arriero.components.environments import (
    Calculator,
    Environment,
    Episode,
    Python,
    Question,
    Toolbox,
    Turn,
    UserEnvironment,
)
from arriero.components.environments.calls import Calls
from arriero.components.environments.episodes import Episodes
from arriero.components.environments.tools import Call
from arriero.components.generator import Generator
from arriero.components.losses import CrossEntropy
from arriero.components.optimizer import AdamW
from arriero.components.policy import load_policy
from arriero.components.prompts import PromptSource
from arriero.components.rewards import Function, Known, Limits, ReasoningGym
from arriero.components.sampling import Sampling
from arriero.components.training import TrainState
from arriero.components.verifiers.program import sandbox_problem
from arriero.components.verifiers.sandbox import SandboxLimits
from arriero.engine.errors import UserError
from arriero.schemas.messages import Batch, Dropped, Outcome, Prompt, Rollout, Sample, ScoredGroup
from tests.drive import Alone, dropped, kept, outputs, stream
from tests.test_generator import behaviour, running
from tests.tiny_models import save_tiny_llama, tiny_tokenizer

torch.set_num_threads(1)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_llama(tmp_path / "tiny", hidden=16, layers=1, seed=2)


@dataclass(frozen=True, kw_only=True)
class Counting(Environment):
    """Answers turn n with n, pays n, and ends after `turns`; late by up to `late_s`."""

    turns: int = 3
    late_s: float = 0.0

    def reset(self, prompt: Prompt, *, seed: int) -> Episode:
        if prompt.text == "2-1=" and seed % 2:
            raise RuntimeError("no such game")
        return Counted(self, prompt.text)


class Counted(Episode):
    closed = 0

    def __init__(self, task: Counting, opening: str) -> None:
        self.opening, self._task, self._turn = opening, task, 0

    def step(self, text: str) -> Turn:
        time.sleep(random.random() * self._task.late_s)
        self._turn += 1
        if self.opening == "9-9=":
            raise KeyError("lost")
        if self.opening == "8-8=":
            time.sleep(30)
        return Turn(text=str(self._turn), reward=float(self._turn), done=self._turn == self._task.turns)

    def close(self) -> None:
        Counted.closed += 1


def episodes(model: Path, environment: Environment, **fields: Any) -> Episodes:
    sampling = Sampling(max_new_tokens=fields.pop("max_new_tokens", 4))
    generator = Generator(model=str(model), samples=4, slots=8, sampling=sampling)
    return Episodes(generator=generator, environment=environment, **fields)


async def played(component: Episodes, model: Path, *texts: str) -> list[ScoredGroup | Dropped]:
    given = [Prompt(id=f"p{n}", text=text, origins=(n,)) for n, text in enumerate(texts)]
    with running(model) as published:
        return [out async for out in component.run(stream(given, Prompt), published.stream())]


def turns_of(rollout: Rollout) -> list[tuple[int, int]]:
    """Begin and end of each run of sampled tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], rollout.mask.astype(int), [0]])))
    return list(zip(edges[0::2].tolist(), edges[1::2].tolist(), strict=True))


async def test_a_conversation_is_the_turns_that_were_sampled_and_the_observations_between(
    model: Path,
) -> None:
    found = kept(await played(episodes(model, Counting()), model, "1+1=", "7-2=", "3*3="))
    assert {g.group.prompt.id for g in found} == {"p0", "p1", "p2"}
    assert all(g.parents == (g.group.prompt.id,) for g in found)
    tokenizer: Any = tiny_tokenizer()
    for scored in found:
        opening = tokenizer.encode(scored.group.prompt.text)
        assert [s.turns for s in scored.scores] == [(1.0, 2.0, 3.0)] * 4
        assert [(s.value, s.outcome) for s in scored.scores] == [(6.0, Outcome.OK)] * 4
        for rollout in scored.group.rollouts:
            turns = turns_of(rollout)
            assert len(turns) == 3
            assert rollout.tokens[: turns[0][0]].tolist() == opening
            for n, (before, after) in enumerate(itertools.pairwise(turns), start=1):
                between = rollout.tokens[before[1] : after[0]].tolist()
                assert between == tokenizer.encode(f"\n{n}\n", add_special_tokens=False)
            assert all(1 <= end - begin <= 4 for begin, end in turns)
            assert len(rollout.tokens) == turns[-1][1]
        for rollout, own in zip(scored.group.rollouts, behaviour(model, scored.group, 1.0), strict=True):
            np.testing.assert_allclose(rollout.logprobs[rollout.mask], own, atol=1e-5)


async def test_a_crash_is_an_outcome_of_its_episode_and_of_nothing_else(model: Path) -> None:
    found = kept(await played(episodes(model, Counting()), model, "1+1=", "9-9=", "2-1=", "7-2="))
    by_prompt = {g.group.prompt.text: g.scores for g in found}
    assert {s.outcome for s in by_prompt["1+1="] + by_prompt["7-2="]} == {Outcome.OK}
    assert len(by_prompt["9-9="]) == 4
    assert all(re.fullmatch(r"KeyError: 'lost' \(\w+\.py:\d+\)", s.detail) for s in by_prompt["9-9="])
    assert {s.outcome for s in by_prompt["9-9="]} == {Outcome.ERROR}
    begun = [s.outcome for s in by_prompt["2-1="]]
    assert {Outcome.ERROR, Outcome.OK} >= set(begun)
    assert any("no such game" in s.detail for s in by_prompt["2-1="])


async def test_an_environment_that_never_answers_is_a_timeout_and_holds_up_nobody(model: Path) -> None:
    began = time.monotonic()
    found = kept(await played(episodes(model, Counting(), seconds=1.0), model, "8-8=", "1+1=", "7-2="))
    assert time.monotonic() - began < 15
    by_prompt = {g.group.prompt.text: g.scores for g in found}
    assert {s.outcome for s in by_prompt["8-8="]} == {Outcome.TIMEOUT}
    assert "waiting for its environment" in by_prompt["8-8="][0].detail
    assert {s.outcome for s in by_prompt["1+1="] + by_prompt["7-2="]} == {Outcome.OK}


async def test_an_episode_ends_at_its_limit_of_turns_and_of_tokens(model: Path) -> None:
    (scored,) = kept(await played(episodes(model, Counting(turns=9), turns=2), model, "1+1="))
    assert {len(turns_of(r)) for r in scored.group.rollouts} == {2}
    assert {r.finish for r in scored.group.rollouts} == {"length"}
    assert {s.value for s in scored.scores} == {3.0}
    (scored,) = kept(await played(episodes(model, Counting(turns=9), turns=50, tokens=20), model, "1+1="))
    assert all(len(r.tokens) <= 20 for r in scored.group.rollouts)
    assert {r.finish for r in scored.group.rollouts} == {"length"}
    (refused,) = dropped(await played(episodes(model, Counting(), tokens=5), model, "111111+11111="))
    assert (refused.reason, refused.detail) == ("too_long", "an opening of 13 tokens, between 1 and 4 fit")


async def test_every_episode_is_closed_once(model: Path) -> None:
    Counted.closed = 0
    await played(episodes(model, Counting()), model, "1+1=", "9-9=")
    deadline = time.monotonic() + 5
    while Counted.closed < 8 and time.monotonic() < deadline:  # noqa: ASYNC110  # a thread's doing
        await asyncio.sleep(0.01)
    assert Counted.closed == 8


async def test_a_deterministic_run_doesnt_depend_on_when_environments_answer(model: Path) -> None:
    import dataclasses

    from arriero.engine.runtime.context import current, entered

    runs: list[list[list[int]]] = []
    for late_s in (0.0, 0.08):
        component = episodes(model, Counting(late_s=late_s))
        given = [Prompt(id=f"p{n}", text="1+1=", origins=(n,)) for n in range(2)]
        with running(model) as published, entered(dataclasses.replace(current(), deterministic=True)):
            found = kept([o async for o in component.run(stream(given, Prompt), published.stream())])
        runs.append(
            [[*r.tokens.tolist(), *r.logprobs[r.mask].tolist()] for g in found for r in g.group.rollouts]
        )
    assert runs[0] == runs[1]


# --- tools --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("-(7 - 9) ** 3", "8"),
        ("10 / 4", "2.5"),
        ("7 // 2 + 7 % 2", "4"),
        ("2**100", str(2**100)),
    ],
)
def test_the_calculator_knows_arithmetic(asked: str, value: str) -> None:
    assert Calculator().call(asked) == value


@pytest.mark.parametrize(
    "asked", ["__import__('os')", "a + 1", "9**9**9", "True", "1 +", "'a' * 9", "(-8) ** 0.5"]
)
def test_the_calculator_refuses_what_is_no_arithmetic(asked: str) -> None:
    with pytest.raises(ValueError, match=r"arithmetic|large|digits|real"):
        Calculator().call(asked)


def test_a_call_is_found_in_both_forms_and_a_wrong_one_is_told() -> None:
    base, chat = (Toolbox([Calculator()], chat=chat) for chat in (False, True))
    assert base.calls("so <calculator>1+1</calculator>") == [Call(name="calculator", text="1+1")]
    assert base.calls("<calculator>1+1</calculator> is two") == []
    assert (
        base.answer(base.calls("<calculator>1/0</calculator>")) == "<result>error: division by zero</result>"
    )
    said = '<tool_call>{"name": "calculator", "arguments": {"text": "6*7"}}</tool_call>'
    assert chat.answer(chat.calls(said)) == "42"
    assert "must be JSON" in chat.answer(chat.calls("<tool_call>6*7</tool_call>"))
    assert "no tool abacus" in chat.answer([Call(name="abacus", text="")])
    assert (base.stops, chat.stops) == (("</calculator>",), ("</tool_call>",))


def test_python_runs_in_the_sandbox() -> None:
    if why := sandbox_problem(SandboxLimits()):
        pytest.skip(why)
    assert Python().call("print(sum(range(10)))") == "45"
    assert Python().call("print('a')\n1/0").startswith("a\nerror: exit code 1")


def memorised(path: Path, *turns: str) -> Path:
    """A model that, asked `turns[0]`, says turns 1, 3, ... when it has read turns 0, 2, ... before."""
    save_tiny_llama(path, vocab_size=96, hidden=32, layers=2, seed=1)
    tokenizer: Any = tiny_tokenizer(96)
    ids: list[int] = tokenizer.encode(turns[0])
    mask = [False] * len(ids)
    for n, turn in enumerate(turns[1:], start=1):
        more: list[int] = tokenizer.encode(turn, add_special_tokens=False)
        ids, mask = ids + more, mask + [n % 2 == 1] * len(more)
    ids, mask = [*ids, 2], [*mask, True]
    state = TrainState(*load_policy(path), loss=CrossEntropy(), optimizer=AdamW(lr=1e-2), steps=80)
    sample = Sample(
        group="g",
        tokens=np.array(ids, np.int32),
        mask=np.array(mask),
        advantages=np.ones(len(ids), np.float32),
    )
    for _ in range(80):
        state.step(Batch(samples=(sample,)))
    state.save(path)
    return path


async def test_a_tool_is_called_within_a_turn_and_its_result_is_read(tmp_path: Path) -> None:
    use = (Calculator(name="c", describe="x"),)
    task = Question(use=use, reward=Function(function=is_five, isolate=False))
    opening = f"{Toolbox(use, chat=False).manual}\n2+3="
    model = memorised(tmp_path / "tiny", opening, "<c>2+3</c>", "\n<result>5</result>\n", "5")
    generator = Generator(
        model=str(model), samples=2, slots=2, sampling=Sampling(max_new_tokens=12, greedy=True)
    )
    (scored,) = kept(await played(Episodes(generator=generator, environment=task), model, "2+3="))
    for rollout, score in zip(scored.group.rollouts, scored.scores, strict=True):
        assert rollout.text == "<c>2+3</c>\n<result>5</result>\n5"
        assert len(turns_of(rollout)) == 2
        assert (score.outcome, score.turns) == (Outcome.OK, (0.0, 1.0))


def is_five(prompt: Prompt, rollout: Rollout) -> bool:
    return rollout.text == "5"


# --- questions --------------------------------------------------------------------------------------------


def test_a_wrong_answer_is_followed_by_feedback_until_attempts_are_used_up() -> None:
    task = Question(reward=Function(function=is_five, isolate=False), attempts=3, discount=0.5)
    with task.opened() as open_task:
        episode = open_task.reset(Prompt(text="2+3="), seed=0)
        assert episode.opening == "2+3="
        assert episode.step("6") == Turn(text="That is not right. Try again.", reward=0.0, right=False)
        assert episode.step("5") == Turn(reward=0.5, done=True, right=True)
        again = open_task.reset(Prompt(text="2+3="), seed=0)
        assert [again.step(t).done for t in ("1", "2", "3")] == [False, False, True]


def judged_for_ever(prompt: Prompt, rollout: Rollout) -> bool:
    while rollout.text == "7":
        pass
    return rollout.text == "5"


def test_a_verifier_that_hangs_is_killed_and_the_others_go_on() -> None:
    """In a thread it would hold the interpreter's lock of the generator for good."""
    others = psutil.Process().children()
    reward = Function(function=judged_for_ever, limits=Limits(time_s=1.0))
    with Question(reward=reward).opened() as task:
        with pytest.raises(RuntimeError, match="no verdict: timeout over 1 s"):
            task.reset(Prompt(text="?"), seed=0).step("7")
        assert task.reset(Prompt(text="?"), seed=0).step("5").right
        assert [p for p in psutil.Process().children() if p not in others]
    assert not [p for p in psutil.Process().children() if p not in others and p.status() != "zombie"]


def test_a_judge_that_cannot_tell_right_from_wrong_ends_the_run() -> None:
    reward = Function(function=is_five, isolate=False, known=(Known(right="6"),))
    with pytest.raises(UserError, match="can't be trusted"), Question(reward=reward).opened():
        pass


async def test_a_prompt_that_cannot_be_judged_is_quarantined_and_not_an_error_of_its_episodes(
    model: Path, tmp_path: Path
) -> None:
    """Prompts without an answer: in front of the generator they are screened, behind it they are dropped."""
    (out,) = await played(episodes(model, Question()), model, "1+1=")
    assert isinstance(out, Dropped)
    assert (out.reason, out.detail) == ("invalid", "quarantined: row 0: the prompt has no answer to match")
    data = tmp_path / "d.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": ""}\n')
    source = PromptSource(path=str(data), epochs=1).screened(Question())
    assert [p.answer for p in kept(await outputs(source.run()))] == ["2"]


async def test_reasoning_gym_is_played_in_several_turns() -> None:
    pytest.importorskip("reasoning_gym")
    source = PromptSource(path="reasoning_gym:basic_arithmetic", size=3, epochs=1)
    (first, *_) = kept(await outputs(source.run()))
    task = Question(reward=ReasoningGym(), attempts=2)
    with task.opened() as open_task:
        episode = open_task.reset(first, seed=0)
        assert episode.step("no idea").text == "That is not right. Try again."
        assert episode.step(first.answer) == Turn(reward=1.0, done=True, right=True)


def test_what_cant_work_is_said_before_anything_starts(model: Path) -> None:
    assert list(episodes(model, Counting()).problems(Alone())) == []
    task = Question(discount=0.5, use=(Calculator(), Calculator()))
    lines = list(episodes(model, task, observation="x", tokens=4, seconds=700).problems(Alone()))
    assert [line.split(";")[-1].strip() for line in lines] == [
        "set attempts above 1",
        "give each its own",
        "put it where the text belongs",
        "raise it",
        "lower the first",
    ]


def test_an_environment_of_ones_own_is_named_by_its_path() -> None:
    named = UserEnvironment(make="tests.test_environments:Counting", options={"turns": 2})  # type: ignore[arg-type]
    assert named.made() == Counting(turns=2)
    with pytest.raises(UserError, match="unexpected keyword argument 'turn'"):
        UserEnvironment(make=Counting, options={"turn": 2}).made()
    with pytest.raises(UserError, match="gave a dict, which is no Environment"):
        UserEnvironment(make=dict).made()  # type: ignore[arg-type]


def late() -> int:
    time.sleep(0.3)
    return 3


def test_calls_are_answered_by_key_and_forgotten_ones_never() -> None:
    calls: Calls[int] = Calls("test")
    calls.submit("b", lambda: 1)
    calls.submit("a", lambda: 2)
    assert [(a.key, a.value) for a in calls.answers(wait_s=5, whole=True)] == [("a", 2), ("b", 1)]
    calls.submit("late", late)
    calls.forget("late")
    assert calls.abandoned == 1
    calls.submit("late", lambda: 4)
    assert [a.value for a in calls.answers(wait_s=5)] == [4]
    time.sleep(0.4)
    assert (calls.answers(), calls.abandoned, len(calls)) == ([], 0, 0)


def test_the_environment_of_the_documentation_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[1] / "docs" / "environments.md").read_text(encoding="utf-8")
    code = next(
        part for part in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "class Guessing" in part
    )
    assert len(code.splitlines()) < 60
    (tmp_path / "guess_number_task.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    named = UserEnvironment(make="guess_number_task:GuessNumber", options={"guesses": 3})  # type: ignore[arg-type]
    episode = named.reset(Prompt(text="?"), seed=14)  # the secret is 4
    assert episode.opening == "A number from 0 to 9:"
    assert episode.step("2") == Turn(text="too small", right=False)
    assert episode.step("x") == Turn(text="a number, please", reward=-0.1, right=False)
    assert episode.step(" 4") == Turn(reward=1 / 3, done=True, right=True)
