"""`RolloutReward`: a component that gives each rollout of a group one score, in the order of the rollouts.

| state       | moved by                                                                    |
|-------------|-----------------------------------------------------------------------------|
| opened      | `run`: the scorer (this process, or workers of its own) stands               |
| trusted     | the canaries: right ones told from wrong ones, or UserError ends the run      |
| scored      | the scorer: exactly one `Score` for each rollout, whatever happened to it     |
| quarantined | `unscorable`: the prompt's answer is of no use; the group is dropped and told |

`ok` and `wrong` are verdicts on the response. `error` and `timeout` say that there is none: their value is
0.0 to have a number, and what trains on it leaves the rollout out.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from typing import Any, ClassVar, TypeVar

from pydantic import ConfigDict, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.engine.errors import describe
from arriero.engine.stream import Stream
from arriero.schemas.messages import Dropped, Outcome, Prompt, Rollout, RolloutGroup, Score, ScoredGroup

log = logging.getLogger(__name__)

STRICT = ConfigDict(extra="forbid")
T = TypeVar("T")
_DETAIL = 300


@plain_dataclass(frozen=True, kw_only=True)
class Canary:
    """A response whose verdict is known: `right` must be `ok`, anything else must not be."""

    text: str
    right: bool
    prompt: Prompt


class Scorer(ABC):
    """Where `score` and `unscorable` of a reward are computed."""

    @abstractmethod
    async def score(self, prompt: Prompt, rollout: Rollout) -> Score:
        """Never raises for what a response or the reward's code does: that is an outcome."""

    async def scores(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        """Those of several rollouts of one prompt, in their order."""
        return await side_by_side(self.score(prompt, rollout) for rollout in rollouts)

    @abstractmethod
    async def unscorable(self, prompt: Prompt) -> str: ...


class RolloutReward(ABC):
    """Scores every rollout of a group by itself; see the module.

    A subclass is a frozen pydantic dataclass: its fields are its configuration. Raises UserError from `run`
    if the canaries can't be told apart, if no prompt can be scored, or after many scores without a verdict.
    """

    shaping: ClassVar[bool] = False  # no verdict on the answer: left out of the raw reward of a sum
    ranked: ClassVar[bool] = False  # canaries are compared by value, not by outcome

    @abstractmethod
    def score(self, prompt: Prompt, rollout: Rollout) -> Score | Awaitable[Score]:
        """The score of one rollout; several may be under way at once."""

    def unscorable(self, prompt: Prompt) -> str:
        """Why no response to this prompt can be scored (its answer can't be read, say); empty if it can."""
        return ""

    def screens(self) -> Sequence[RolloutReward]:
        """The rewards whose `unscorable` tells rows of no use apart before anything is sampled."""
        return (self,) if type(self).unscorable is not RolloutReward.unscorable else ()

    def canaries(self) -> Sequence[Canary]:
        """Responses with known verdicts, tried before the first rollout."""
        return ()

    def want(self) -> int:
        """Groups that are scored at once."""
        return 1

    @property
    def label(self) -> str:
        """How messages call this reward."""
        return str(getattr(self, "kind", type(self).__name__))

    def opened(self) -> AbstractAsyncContextManager[Scorer]:
        """Where this reward is computed, ready for work inside the context."""
        return _here(self)

    async def run(self, records: Stream[RolloutGroup]) -> AsyncIterator[ScoredGroup | Dropped]:
        from arriero.components.verifiers.scoring import scored

        async with aclosing(scored(self, records)) as outputs:
            async for out in outputs:
                yield out


async def side_by_side(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all; the first error ends the others. One alone costs no task."""
    if len(coroutines := list(work)) == 1:
        return [await coroutines[0]]
    tasks = [asyncio.create_task(one) for one in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


@asynccontextmanager
async def _here(reward: RolloutReward) -> AsyncGenerator[Scorer, None]:
    yield InProcess(reward)


@plain_dataclass(frozen=True)
class InProcess(Scorer):
    """Computes in this process: for code that is known to end soon, or waits for others."""

    reward: RolloutReward

    async def score(self, prompt: Prompt, rollout: Rollout) -> Score:
        try:
            found = self.reward.score(prompt, rollout)
            return found if isinstance(found, Score) else await found
        except Exception as error:  # one response's fault is its own: counted by its outcome
            log.debug("reward %s: no verdict", self.reward.label, exc_info=True)
            return no_verdict(describe(error))

    async def unscorable(self, prompt: Prompt) -> str:
        return self.reward.unscorable(prompt)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Limits:
    """Hard limits on one worker, kept by killing it; not on what its imports take."""

    time_s: PositiveFloat = 10.0  # for one response, by the clock on the wall
    memory_mb: PositiveInt = 2048  # address space on top of what the worker takes when it is ready
    start_s: PositiveFloat = 120.0  # for the imports


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Isolated(RolloutReward):
    """A reward computed in killable processes of its own."""

    workers: PositiveInt = 1  # processes of each replica
    limits: Limits = field(default_factory=Limits)

    slow_start: ClassVar[bool] = False  # the first prompt of each worker may take as long as its start
    text_only: ClassVar[bool] = True  # `score` reads of the rollout its text and its finish alone

    def prepare(self) -> None:
        """Heavy imports, before the limits count."""

    @property
    def width(self) -> int:
        """Responses under way in one worker; above 1 only where `score` is a coroutine."""
        return 1

    def opened(self) -> AbstractAsyncContextManager[Scorer]:
        from arriero.components.verifiers.pool import Pool

        return Pool(self)


def verdict(right: bool, detail: str = "") -> Score:
    """1 and `ok`, or 0 and `wrong`."""
    if right:
        return Score(value=1.0, outcome=Outcome.OK, detail=detail[:_DETAIL])
    return Score(value=0.0, outcome=Outcome.WRONG, detail=detail[:_DETAIL])


def no_verdict(detail: str, outcome: Outcome = Outcome.ERROR) -> Score:
    """0.0 to have a number, and why it means nothing."""
    return Score(value=0.0, outcome=outcome, detail=" ".join(detail.split())[:_DETAIL])
