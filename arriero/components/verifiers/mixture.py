"""How the scores of several rewards become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arriero.components.verifiers.reward import RolloutReward, Scorer, no_verdict, side_by_side
from arriero.schemas.messages import Outcome, Prompt, Rollout, Score


@dataclass(frozen=True, kw_only=True)
class Part:
    """One reward of a sum, opened."""

    reward: RolloutReward
    weight: float
    scorer: Scorer


@dataclass(frozen=True)
class SumScorer(Scorer):
    """Scores with all parts at once."""

    parts: Sequence[Part]

    async def score(self, prompt: Prompt, rollout: Rollout) -> Score:
        return (await self.scores(prompt, (rollout,)))[0]

    async def scores(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        parts = await side_by_side(p.scorer.scores(prompt, rollouts) for p in self.parts)
        return [
            combined([(p.reward, p.weight, s) for p, s in zip(self.parts, each, strict=True)])
            for each in zip(*parts, strict=True)
        ]

    async def unscorable(self, prompt: Prompt) -> str:
        """The first part's reason that has one."""
        for part in self.parts:
            if why := await part.scorer.unscorable(prompt):
                return why
        return ""


def combined(terms: Sequence[tuple[RolloutReward, float, Score]]) -> Score:
    """The weighted sum; `raw` leaves out shaping terms. Missing is never zero: without all, no verdict.

    `ok` if all terms that aren't shaping and have a positive weight are; if there are none, above 0.
    """
    for reward, weight, score in terms:
        if weight and score.outcome in (Outcome.ERROR, Outcome.TIMEOUT):
            return no_verdict(f"{reward.label}: {score.detail}", score.outcome)
    value = sum(weight * score.value for _, weight, score in terms)
    judging = [(weight, score) for reward, weight, score in terms if not reward.shaping]
    decisive = [score.outcome is Outcome.OK for weight, score in judging if weight > 0]
    right = all(decisive) if decisive else value > 0
    detail = ", ".join(f"{reward.label} {score.value:g}" for reward, _, score in terms)
    raw = sum(weight * score.value for weight, score in judging) if judging else None
    return Score(value=value, outcome=Outcome.OK if right else Outcome.WRONG, detail=detail[:300], raw=raw)
