"""Rewards: one score per rollout, in the order of the rollouts, by construction.

A subclass of `RolloutReward` sees one rollout at a time and gives exactly one `Score`; it can't shift another
one's, and zero is a value like any other. `ok` and `wrong` are verdicts on the response. `error` says that
there is none: its value is 0.0 to have a number, and what trains on it leaves the rollout out.
"""

from __future__ import annotations

import asyncio
import json
import math
import numbers
import re
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from typing import Annotated, Literal, TypeAlias, cast

import numpy as np
from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from arriero.components.datasets import GYM, gym_scorer
from arriero.components.prompts import PromptSource
from arriero.engine.errors import UserError
from arriero.engine.graph import GraphView, PerRecord
from arriero.engine.portable import resolve
from arriero.schemas.messages import Outcome, Prompt, Rollout, RolloutGroup, Score, ScoredGroup

STRICT = ConfigDict(extra="forbid")


class RolloutReward(PerRecord[RolloutGroup, ScoredGroup]):
    """Scores every rollout of a group by itself.

    If one can't be scored, the whole group has no scores: `apply` raises UserError that names the reward, the
    prompt, the rollout and the cause; the runtime decides what becomes of the group.
    """

    @abstractmethod
    def score(self, prompt: Prompt, rollout: Rollout) -> Score | Awaitable[Score]:
        """The score of one rollout; several may be under way at once."""

    @property
    def label(self) -> str:
        """How error messages call this reward."""
        return type(self).__name__

    async def apply(self, record: RolloutGroup) -> ScoredGroup:
        running = [asyncio.create_task(self._one(record, i)) for i in range(len(record.rollouts))]
        try:
            scores = await asyncio.gather(*running)
        finally:
            for task in running:  # of no use once one has failed
                task.cancel()
        return ScoredGroup(group=record, scores=tuple(scores))

    async def _one(self, group: RolloutGroup, index: int) -> Score:
        try:
            found = self.score(group.prompt, group.rollouts[index])
            return await found if isinstance(found, Awaitable) else found
        except Exception as error:
            what = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            where = f"prompt {group.prompt.id or group.id}, rollout {index}"
            raise UserError(f"reward {self.label} failed on {where}: {' '.join(what.split())}") from error


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ExactMatch(RolloutReward):
    """1 if the response is the prompt's answer. An empty answer raises: an empty response would earn it."""

    kind: Literal["exact_match"] = "exact_match"
    strip: bool = True
    ignore_case: bool = False

    def score(self, prompt: Prompt, rollout: Rollout) -> Score:
        want, got = self._normal(prompt.answer), self._normal(rollout.text)
        if not want:
            raise UserError(
                "the prompt has no answer to match; set answer_field of its source, or another reward"
            )
        return _verdict(got == want)

    def _normal(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Contains(RolloutReward):
    """1 if `text` occurs in the response, also inside a word; the prompt doesn't count."""

    kind: Literal["contains"] = "contains"
    text: Annotated[str, Field(min_length=1)]
    ignore_case: bool = True

    def score(self, prompt: Prompt, rollout: Rollout) -> Score:
        if self.ignore_case:
            return _verdict(self.text.casefold() in rollout.text.casefold())
        return _verdict(self.text in rollout.text)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ReasoningGym(RolloutReward):
    """The data set's own scorer, for prompts from `reasoning_gym:NAME`.

    Full marks (1) are `ok`, anything less is `wrong` and worth 0; with `partial`, what the scorer gave, which
    several do for junk. A scorer that raises gives `error`. A data set whose scorer fails its trial
    (`gym_scorer`) raises UserError.
    """

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    partial: bool = False
    tag: str = (
        ""  # "answer": the last <answer>...</answer> is scored, a response without it is wrong; empty: all
    )

    def score(self, prompt: Prompt, rollout: Rollout) -> Score:
        name, options = prompt.metadata.get("dataset"), prompt.metadata.get("options")
        if not isinstance(name, str) or not isinstance(options, dict):
            raise UserError(f"the prompt doesn't come from {GYM}NAME; use another reward")
        scorer = gym_scorer(name, json.dumps(options, sort_keys=True))
        answer = self._answer(rollout.text)
        if answer is None:
            return Score(value=0.0, outcome=Outcome.WRONG, detail=f"no <{self.tag}>")
        try:
            value = scorer(answer, prompt.metadata)
        except Exception as error:  # noqa: BLE001  # foreign code on a model's text: counted by its outcome
            return _no_verdict(f"{type(error).__name__}: {error}")
        if not math.isfinite(value):
            return _no_verdict(f"the scorer gave {value}")
        if value >= 1.0:
            return _verdict(True)
        return Score(value=value if self.partial else 0.0, outcome=Outcome.WRONG)

    def _answer(self, text: str) -> str | None:
        if not self.tag:
            return text.strip()
        tag = re.escape(self.tag)
        found = re.findall(f"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)
        return found[-1].strip() if found else None

    def problems(self, view: GraphView) -> Iterable[str]:
        """Prompts of another kind, and data sets whose scorer fails its trial."""
        for source in view.upstream(PromptSource):
            if not source.gym:
                yield f"it scores prompts from {GYM}NAME, but gets those of {source.path}; use another reward"
                continue
            try:
                gym_scorer(source.gym, json.dumps(dict(source.options), sort_keys=True))
            except UserError as error:
                yield str(error)


Judged: TypeAlias = float | bool | Score
RewardFunction: TypeAlias = Callable[[Prompt, Rollout], Judged | Awaitable[Judged]]


def _imported(value: object) -> object:
    return resolve(value) if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Function(RolloutReward):
    """A function of prompt and rollout, sync or async (then for all rollouts of a group at once).

    A config names it as `package.module:name`. True is `ok` and 1, False `wrong` and 0; a number is the
    value, and `ok` if above 0; a `Score` is taken as it is. Anything else, and a number that isn't finite,
    raises UserError.
    """

    kind: Literal["function"] = "function"
    function: Annotated[RewardFunction, BeforeValidator(_imported)]

    @property
    def label(self) -> str:
        module, name = getattr(self.function, "__module__", ""), getattr(self.function, "__qualname__", "")
        return f"{module}:{name}" if name else repr(self.function)

    async def score(self, prompt: Prompt, rollout: Rollout) -> Score:
        found = self.function(prompt, rollout)
        return _judged(await found if isinstance(found, Awaitable) else found)


Reward: TypeAlias = Annotated[ExactMatch | Contains | ReasoningGym | Function, Field(discriminator="kind")]


def _judged(found: object) -> Score:
    if isinstance(found, Score):
        return found
    if isinstance(found, np.generic):
        return _judged(cast("object", found.item()))
    if isinstance(found, bool):
        return _verdict(found)
    if not isinstance(found, numbers.Real):
        raise UserError(
            f"it gave {found!r}, a {type(found).__name__}; a finite number, bool or Score is needed"
        )
    value = float(found)
    if not math.isfinite(value):
        raise UserError(f"it gave {value}; a finite number, bool or Score is needed")
    return Score(value=value, outcome=Outcome.OK if value > 0 else Outcome.WRONG)


def _verdict(right: bool) -> Score:
    return Score(value=1.0, outcome=Outcome.OK) if right else Score(value=0.0, outcome=Outcome.WRONG)


def _no_verdict(detail: str) -> Score:
    return Score(value=0.0, outcome=Outcome.ERROR, detail=detail[:200])
