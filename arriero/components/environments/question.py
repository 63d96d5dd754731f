"""`Question`: a prompt to answer, in one attempt or several, with tools or without; any reward judges it.

With `reasoning_gym:NAME` as data and `ReasoningGym` as reward it is the adapter to reasoning-gym.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import field
from typing import Annotated, Literal, TypeAlias

from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.environments.environment import Environment, Episode, Tool, Turn, Unscorable
from arriero.components.environments.judging import Judge, judging
from arriero.components.environments.tools import AnyTool, Python
from arriero.components.rewards import (
    Code,
    Constraints,
    Contains,
    ExactMatch,
    Function,
    Gsm8k,
    JsonSchema,
    LlmJudge,
    Math,
    MultipleChoice,
    ReasoningGym,
    Regex,
    RewardModel,
)  # fmt: skip
from arriero.components.verifiers.canaries import response
from arriero.components.verifiers.program import sandbox_problem
from arriero.components.verifiers.reward import RolloutReward
from arriero.engine.errors import UserError
from arriero.schemas.messages import Outcome, Prompt

AnyJudge: TypeAlias = Annotated[
    ExactMatch | Contains | MultipleChoice | Gsm8k | Math | Regex | JsonSchema | Constraints | ReasoningGym
    | Code | Function | LlmJudge | RewardModel,
    Field(discriminator="kind"),
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Question(Environment):
    """The policy answers the prompt; a wrong answer is followed by `feedback`, until `attempts` are used up.

    `reward` judges the text of a turn, in workers of its own if it has some (`workers` and `limits` are its
    own fields). A right answer at attempt k is worth its reward times `discount` to the power k - 1.
    A turn that calls a tool is answered by the tool and is no attempt.
    """

    kind: Literal["question"] = "question"
    reward: AnyJudge = field(default_factory=ExactMatch)
    attempts: PositiveInt = 1
    feedback: str = "That is not right. Try again."
    discount: NonNegativeFloat = 1.0
    use: tuple[AnyTool, ...] = ()

    def reset(self, prompt: Prompt, *, seed: int) -> Episode:
        raise NotImplementedError("`opened` gives what begins episodes")

    def tools(self) -> Sequence[Tool]:
        return self.use

    def screens(self) -> Sequence[RolloutReward]:
        return self.reward.screens()

    @contextmanager
    def opened(self) -> Generator[Environment, None, None]:
        for tool in self.use:
            if isinstance(tool, Python) and (why := sandbox_problem(tool.limits)):
                raise UserError(f"tool {tool.name}: {why}")
        with judging(self.reward) as judge:
            yield _Asking(self, judge)

    def problems(self) -> Iterable[str]:
        if self.attempts == 1 and (self.discount != 1.0 or self.feedback != Question.feedback):
            yield "discount and feedback belong to several attempts; set attempts above 1"
        names = [tool.name for tool in self.use]
        if len(set(names)) < len(names):
            yield f"two tools have one name: {', '.join(names)}; give each its own"


class _Asking(Environment):
    """A `Question` with its judge at work."""

    def __init__(self, task: Question, judge: Judge) -> None:
        self._task, self._judge = task, judge

    def reset(self, prompt: Prompt, *, seed: int) -> Episode:
        if why := self._judge.unscorable(prompt):
            raise Unscorable(why)
        return _Asked(self._task, self._judge, prompt)


class _Asked(Episode):
    def __init__(self, task: Question, judge: Judge, prompt: Prompt) -> None:
        self.opening, self.messages = prompt.text, prompt.messages
        self._task, self._judge, self._prompt, self._used = task, judge, prompt, 0

    def step(self, text: str) -> Turn:
        score = self._judge.score(self._prompt, response(text))
        if score.outcome not in (Outcome.OK, Outcome.WRONG):
            raise RuntimeError(f"no verdict: {score.outcome.value} {score.detail}")
        right = score.outcome is Outcome.OK
        reward = score.value * self._task.discount**self._used
        self._used += 1
        done = right or self._used == self._task.attempts
        return Turn(text="" if done else self._task.feedback, reward=reward, done=done, right=right)
