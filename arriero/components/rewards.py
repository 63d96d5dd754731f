"""All rewards, told apart by `kind`; what each one does stands in `verifiers`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, FiniteFloat
from pydantic.dataclasses import dataclass

from arriero.components.verifiers.canaries import refuse_blind
from arriero.components.verifiers.constraints import Constraint, Constraints
from arriero.components.verifiers.function import Function, Judged, RewardFunction
from arriero.components.verifiers.gsm8k import Gsm8k
from arriero.components.verifiers.gym import ReasoningGym
from arriero.components.verifiers.judge import Endpoint, LlmJudge, RewardModel
from arriero.components.verifiers.known import Known
from arriero.components.verifiers.mathematics import Math
from arriero.components.verifiers.mixture import Part, SumScorer
from arriero.components.verifiers.pattern import Regex
from arriero.components.verifiers.plain import Contains, ExactMatch, MultipleChoice
from arriero.components.verifiers.program import Code
from arriero.components.verifiers.reward import STRICT, Limits, RolloutReward, Scorer
from arriero.components.verifiers.sandbox import SandboxLimits
from arriero.components.verifiers.schema import JsonSchema
from arriero.components.verifiers.shaping import Format, Length
from arriero.components.verifiers.version import reward_version
from arriero.schemas.messages import Prompt, Rollout, Score

__all__ = [
    "Code", "Constraint", "Constraints", "Contains", "Endpoint", "ExactMatch", "Format", "Function", "Gsm8k",
    "JsonSchema", "Judged", "Known", "Length", "Limits", "LlmJudge", "Math", "MultipleChoice",
    "ReasoningGym", "Regex", "Reward", "RewardFunction", "RewardModel", "RolloutReward", "SandboxLimits",
    "SingleReward", "Term", "WeightedSum", "reward_version",
]  # fmt: skip

SingleReward: TypeAlias = Annotated[
    ExactMatch | Contains | MultipleChoice | Gsm8k | Math | Regex | JsonSchema | Constraints | ReasoningGym
    | Code | Function | LlmJudge | RewardModel | Length | Format,
    Field(discriminator="kind"),
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Term:
    """One reward of a sum."""

    reward: SingleReward
    weight: FiniteFloat = 1.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class WeightedSum(RolloutReward):
    """The weighted sum of several rewards, each with workers of its own; `mixture.combined` says how.

    A term without a verdict leaves the sum without one. A weight of 0 only records the term's value.
    """

    kind: Literal["weighted_sum"] = "weighted_sum"
    terms: Annotated[tuple[Term, ...], Field(min_length=1)]

    def score(self, prompt: Prompt, rollout: Rollout) -> Score:
        raise NotImplementedError("a sum is scored by the scorers of its terms")

    def opened(self) -> AbstractAsyncContextManager[Scorer]:
        return _opened(self.terms)

    def remarks(self) -> Iterable[str]:
        for term in self.terms:
            if isinstance(term.reward, Function):
                yield from term.reward.remarks()

    def screens(self) -> Sequence[RolloutReward]:
        return [part for t in self.terms for part in t.reward.screens()]

    def want(self) -> int:
        return max(t.reward.want() for t in self.terms)


@asynccontextmanager
async def _opened(terms: tuple[Term, ...]) -> AsyncGenerator[Scorer, None]:
    async with AsyncExitStack() as stack:
        parts = [
            Part(reward=t.reward, weight=t.weight, scorer=await stack.enter_async_context(t.reward.opened()))
            for t in terms
        ]
        for part in parts:
            await refuse_blind(part.reward, part.scorer)
        yield SumScorer(parts)


Reward: TypeAlias = Annotated[
    ExactMatch | Contains | MultipleChoice | Gsm8k | Math | Regex | JsonSchema | Constraints | ReasoningGym
    | Code | Function | LlmJudge | RewardModel | Length | Format | WeightedSum,
    Field(discriminator="kind"),
]  # fmt: skip
