"""Recorded rollouts turned into supervision: the best of each group, or its best beside its worst."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import chain

from pydantic import ConfigDict, FiniteFloat, NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.advantage import trained_sample
from arriero.components.batching import batch_of
from arriero.engine.graph import Rates
from arriero.engine.stream import Stream
from arriero.schemas.messages import Batch, Dropped, Outcome, Rollout, Sample, Score, ScoredGroup

STRICT = ConfigDict(extra="forbid")
Scored = tuple[Rollout, Score]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BestResponses:
    """Batches of the `keep` responses with the highest rewards of each of `groups` groups, to be imitated.

    All sampled tokens have advantage 1. A response with a reward below `at_least` isn't taken, nor one that
    ended at the limit of tokens unless `truncated`; of equal rewards the first is. Where nothing is
    taken, the group is dropped as filtered. The last batch may be smaller.
    Source: best-of-n and rejection sampling as data, RAFT, arXiv:2304.06767.
    """

    groups: PositiveInt
    keep: PositiveInt = 1
    at_least: FiniteFloat = 0.0
    truncated: bool = False

    def rates(self) -> Rates:
        return Rates(consumes={"scored": self.groups})

    async def run(self, scored: Stream[ScoredGroup]) -> AsyncIterator[Batch | Dropped]:
        waiting: list[list[Sample]] = []
        async for group in scored:
            ranked = [
                pair for pair in _ranked(group)
                if pair[1].value >= self.at_least and (self.truncated or pair[0].finish != "length")
            ]  # fmt: skip
            if not ranked:
                detail = f"no response with a reward of at least {self.at_least}"
                yield Dropped(parent=group.id, reason="filtered", detail=detail)
                continue
            waiting.append([trained_sample(group, *pair, advantage=1.0) for pair in ranked[: self.keep]])
            if len(waiting) == self.groups:
                yield batch_of(chain(*waiting))
                waiting = []
        if waiting:
            yield batch_of(chain(*waiting))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RankedPairs:
    """Batches of `pairs` pairs: the best response of a group (advantage 1), then its worst (advantage -1).

    A group whose rewards differ by no more than `margin` is dropped as filtered. The last batch may be
    smaller.
    """

    pairs: PositiveInt
    margin: NonNegativeFloat = 0.0

    def rates(self) -> Rates:
        return Rates(consumes={"scored": self.pairs})

    async def run(self, scored: Stream[ScoredGroup]) -> AsyncIterator[Batch | Dropped]:
        waiting: list[Sample] = []
        async for group in scored:
            ranked = _ranked(group)
            if len(ranked) < 2 or ranked[0][1].value - ranked[-1][1].value <= self.margin:
                detail = f"no two of {len(ranked)} rewards differ by more than {self.margin}"
                yield Dropped(parent=group.id, reason="filtered", detail=detail)
                continue
            waiting += [
                trained_sample(group, *ranked[0], advantage=1.0),
                trained_sample(group, *ranked[-1], advantage=-1.0),
            ]
            if len(waiting) == 2 * self.pairs:
                yield batch_of(waiting)
                waiting = []
        if waiting:
            yield batch_of(waiting)


def _ranked(group: ScoredGroup) -> list[Scored]:
    """Its sampled responses with a verdict, from the highest reward to the lowest."""
    found = [
        (rollout, score)
        for rollout, score in zip(group.group.rollouts, group.scores, strict=True)
        if score.outcome in (Outcome.OK, Outcome.WRONG) and not rollout.greedy and rollout.mask.any()
    ]
    return sorted(found, key=lambda pair: -pair[1].value)
