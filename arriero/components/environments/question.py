"""`Question`: a prompt to answer, in one attempt or several, with tools or without; any reward judges it.

With `reasoning_gym:NAME` as data and `ReasoningGym` as reward it is the adapter to reasoning-gym.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import field
from typing import Annotated, Literal, TypeAlias

from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.environments.environment import Environment, Episode, Tool, Turn, Unscorable
from arriero.components.environments.tools import AnyTool, Python
from arriero.components.rewards import (
    Code,
    Constraints,
    Contains,
    ExactMatch,
    Function,
    Gsm8k,
    JsonSchema,
    Math,
    MultipleChoice,
    ReasoningGym,
    Regex,
)  # fmt: skip
from arriero.components.verifiers.canaries import refuse_blind, response
from arriero.components.verifiers.program import sandbox_problem
from arriero.components.verifiers.reward import InProcess, Isolated, RolloutReward
from arriero.engine.errors import UserError
from arriero.schemas.messages import Outcome, Prompt, Score

Judge: TypeAlias = Annotated[
    ExactMatch | Contains | MultipleChoice | Gsm8k | Math | Regex | JsonSchema | Constraints | ReasoningGym
    | Code | Function,
    Field(discriminator="kind"),
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Question(Environment):
    """The policy answers the prompt; a wrong answer is followed by `feedback`, until `attempts` are used up.

    `reward` judges the text of a turn, in a thread of the component: the episode's limit of time is its own,
    but nothing kills it. A right answer at attempt k is worth its reward times `discount` to the power k - 1.
    A turn that calls a tool is answered by the tool and is no attempt.
    """

    kind: Literal["question"] = "question"
    reward: Judge = field(default_factory=ExactMatch)
    attempts: PositiveInt = 1
    feedback: str = "That is not right. Try again."
    discount: NonNegativeFloat = 1.0
    use: tuple[AnyTool, ...] = ()

    def reset(self, prompt: Prompt, *, seed: int) -> Episode:
        if why := self.reward.unscorable(prompt):
            raise Unscorable(why)
        return _Asked(self, prompt)

    def tools(self) -> Sequence[Tool]:
        return self.use

    def screens(self) -> Sequence[RolloutReward]:
        return self.reward.screens()

    def prepare(self) -> None:
        if isinstance(self.reward, Isolated):
            self.reward.prepare()
        asyncio.run(refuse_blind(self.reward, InProcess(self.reward)))
        for tool in self.use:
            if isinstance(tool, Python) and (why := sandbox_problem(tool.limits)):
                raise UserError(f"tool {tool.name}: {why}")

    def problems(self) -> Iterable[str]:
        if self.attempts == 1 and (self.discount != 1.0 or self.feedback != Question.feedback):
            yield "discount and feedback belong to several attempts; set attempts above 1"
        names = [tool.name for tool in self.use]
        if len(set(names)) < len(names):
            yield f"two tools have one name: {', '.join(names)}; give each its own"


class _Asked(Episode):
    def __init__(self, task: Question, prompt: Prompt) -> None:
        self.opening, self.messages = prompt.text, prompt.messages
        self._task, self._prompt, self._used = task, prompt, 0

    def step(self, text: str) -> Turn:
        score = self._judged(text)
        if score.outcome not in (Outcome.OK, Outcome.WRONG):
            raise RuntimeError(f"no verdict: {score.outcome.value} {score.detail}")
        right = score.outcome is Outcome.OK
        reward = score.value * self._task.discount**self._used
        self._used += 1
        done = right or self._used == self._task.attempts
        return Turn(text="" if done else self._task.feedback, reward=reward, done=done, right=right)

    def _judged(self, text: str) -> Score:
        found = self._task.reward.score(self._prompt, response(text))
        return asyncio.run(_awaited(found)) if isinstance(found, Awaitable) else found


async def _awaited(found: Awaitable[Score]) -> Score:
    return await found
