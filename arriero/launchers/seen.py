"""All that `arriero top` shows of a run at one moment.

Made from its files; or where it is conducted, for those who may only watch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeGuard

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from arriero.launchers.look import Lines, Now
from arriero.schemas.messages import ScoredGroup

CURVES = ("reward", "loss", "staleness_mean", "entropy", "grad_norm")
POINTS, ROLLOUTS = 48, 5
_TEXT = 100  # characters of a rollout


@dataclass(frozen=True, kw_only=True)
class RolloutSeen:
    """The first rollout of a group; `text`: the beginning of prompt and response, `tokens` as sampled."""

    reward: float
    outcome: str
    tokens: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A run at one moment; `curves` are the last values of some measures, `now` None before any heartbeat."""

    now: Now | None
    curves: dict[str, tuple[float, ...]]
    rollouts: tuple[RolloutSeen, ...]


SEEN: TypeAdapter[Seen] = TypeAdapter(Seen)


def curves(lines: Lines) -> dict[str, tuple[float, ...]]:
    """The last finite values of each of `CURVES` that has any, from lines of metrics.jsonl."""
    found = {key: [v for line in lines if _number(v := line.get(key))] for key in CURVES}
    return {key: tuple(float(v) for v in values[-POINTS:]) for key, values in found.items() if values}


def rollouts(groups: Iterable[ScoredGroup]) -> tuple[RolloutSeen, ...]:
    return tuple(_seen(group) for group in groups)


def _number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _seen(scored: ScoredGroup) -> RolloutSeen:
    rollout, score = scored.group.rollouts[0], scored.scores[0]
    text = " ".join(f"{scored.group.prompt.text} -> {rollout.text}".split())
    return RolloutSeen(
        reward=score.value, outcome=str(score.outcome), tokens=int(rollout.mask.sum()), text=text[:_TEXT]
    )
