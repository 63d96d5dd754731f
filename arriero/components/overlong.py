"""`OverlongPenalty`: long responses are worth less, before they are cut off."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.advantages import Beyond, overlong_penalty
from arriero.engine.graph import GraphView, PerRecord
from arriero.schemas.messages import Outcome, Rollout, Score, ScoredGroup


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class OverlongPenalty(PerRecord[ScoredGroup, ScoredGroup]):
    """Takes a penalty off the reward of responses longer than `max_length - buffer` sampled tokens.

    See `overlong_penalty` for its shape. The reward before it stays in `raw`, so that a filter for groups
    without a signal doesn't take differences of length for one. Held-out groups and rollouts without a
    verdict stay as they are.
    """

    max_length: PositiveInt
    buffer: NonNegativeInt
    factor: PositiveFloat = 1.0
    beyond: Beyond = "held"

    def problems(self, view: GraphView) -> Iterable[str]:
        try:
            overlong_penalty([1], max_length=self.max_length, buffer=self.buffer, beyond=self.beyond)
        except ValueError as error:
            yield str(error)

    def apply(self, record: ScoredGroup) -> ScoredGroup:
        scores = record.scores
        if record.group.prompt.split != "eval":
            pairs = zip(record.group.rollouts, record.scores, strict=True)
            scores = tuple(self._penalised(rollout, score) for rollout, score in pairs)
        return record.model_copy(update={"scores": scores, "parents": (record.id,)})

    def _penalised(self, rollout: Rollout, score: Score) -> Score:
        if score.outcome not in (Outcome.OK, Outcome.WRONG):
            return score
        (penalty,) = overlong_penalty(
            [int(rollout.mask.sum())],
            max_length=self.max_length,
            buffer=self.buffer,
            factor=self.factor,
            beyond=self.beyond,
        )
        raw = score.value if score.raw is None else score.raw
        return score.model_copy(update={"value": score.value + float(penalty), "raw": raw})
