"""Canaries: a reward is tried on known right and wrong responses before it is trusted with a run."""

from __future__ import annotations

import asyncio

import numpy as np

from arriero.components.verifiers.reward import RolloutReward, Scorer
from arriero.engine.errors import UserError
from arriero.schemas.messages import Finish, Outcome, Rollout

_SHOWN = 60


async def refuse_blind(reward: RolloutReward, scorer: Scorer) -> None:
    """Raises UserError for a reward that takes a known right response for wrong, or the other way round."""
    canaries = reward.canaries()
    scores = await asyncio.gather(*(scorer.score(c.prompt, response(c.text)) for c in canaries))
    for canary, score in zip(canaries, scores, strict=True):
        if (score.outcome is Outcome.OK) is not canary.right:
            known = "right" if canary.right else "wrong"
            why = f" ({score.detail})" if score.detail else ""
            raise UserError(
                f"reward {reward.label} can't be trusted: it finds a known {known} response "
                f"{canary.text[:_SHOWN]!r} {score.outcome.value}{why}"
            )


def response(text: str, *, finish: Finish = "stop") -> Rollout:
    """A rollout that is only its text: its one token wasn't sampled."""
    return Rollout(
        tokens=np.zeros(1, np.int32), mask=np.zeros(1, np.bool_), logprobs=np.full(1, np.nan, np.float32),
        versions=np.full(1, -1, np.int32), text=text, finish=finish,
    )  # fmt: skip
