"""Canaries: a reward is tried on known right and wrong responses before it is trusted with a run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from arriero.components.verifiers.reward import Canary, RolloutReward, Scorer
from arriero.engine.errors import UserError
from arriero.schemas.messages import Finish, Outcome, Rollout, Score

_SHOWN = 60


async def refuse_blind(reward: RolloutReward, scorer: Scorer) -> None:
    """Raises UserError for a reward that takes a known right response for wrong, or the other way round.

    Of a `ranked` one, if a right response isn't worth more than a wrong one.
    """
    canaries = reward.canaries()
    scores = await asyncio.gather(*(scorer.score(c.prompt, response(c.text)) for c in canaries))
    if reward.ranked:
        _refuse_unranked(reward, list(zip(canaries, scores, strict=True)))
        return
    for canary, score in zip(canaries, scores, strict=True):
        if (score.outcome is Outcome.OK) is not canary.right:
            known = "right" if canary.right else "wrong"
            why = f" ({score.detail})" if score.detail else ""
            raise UserError(
                f"reward {reward.label} can't be trusted: it finds a known {known} response "
                f"{canary.text[:_SHOWN]!r} {score.outcome.value}{why}"
            )


def _refuse_unranked(reward: RolloutReward, tried: Sequence[tuple[Canary, Score]]) -> None:
    lost = next((s for _, s in tried if s.outcome in (Outcome.ERROR, Outcome.TIMEOUT)), None)
    if lost is not None:
        raise UserError(f"reward {reward.label} can't be tried: {lost.outcome.value}: {lost.detail}")
    right = [s.value for c, s in tried if c.right]
    wrong = [s.value for c, s in tried if not c.right]
    if right and wrong and min(right) <= max(wrong):
        raise UserError(
            f"reward {reward.label} can't be trusted: a known right response is worth {min(right):g}, "
            f"a known wrong one {max(wrong):g}"
        )


def response(text: str, *, finish: Finish = "stop") -> Rollout:
    """A rollout that is only its text: its one token wasn't sampled."""
    return Rollout(
        tokens=np.zeros(1, np.int32), mask=np.zeros(1, np.bool_), logprobs=np.full(1, np.nan, np.float32),
        versions=np.full(1, -1, np.int32), text=text, finish=finish,
    )  # fmt: skip
