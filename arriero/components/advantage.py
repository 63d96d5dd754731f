"""`GroupAdvantage`: scored groups gathered into the batch of one optimizer step."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.advantages import Baseline, group_advantage, is_constant, whitened_tokens
from arriero.engine.graph import GraphView, Rates
from arriero.engine.runtime.context import admission_order, count
from arriero.engine.stream import Stream
from arriero.schemas.messages import Batch, Dropped, Outcome, Rollout, Sample, Score, ScoredGroup

log = logging.getLogger(__name__)


@runtime_checkable
class HasSamples(Protocol):
    """A component that makes `samples` rollouts of each prompt."""

    @property
    def samples(self) -> int: ...


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class GroupAdvantage:
    """Batches of `groups` scored groups, one sample per rollout, its advantage on every sampled token.

    Rollouts without a verdict (error, timeout) count neither in the baseline nor in the batch; a group that
    is then too small for its baseline is dropped as invalid. Held-out groups are dropped as filtered.

    filter_constant drops groups whose raw rewards, before penalties and shaping, are all equal: dynamic
    sampling (DAPO, arXiv:2503.14476, section 3.2). truncated: a response that ended at the limit of tokens is
    trained on, or has part in the `baseline_only` (DAPO's overlong filter, section 3.4). whiten: advantages
    of a batch have mean 0 and variance 1 over its tokens (REINFORCE++, arXiv:2501.03262).

    In a deterministic run a batch holds the groups with the smallest admission numbers that weren't dropped,
    in that order, whatever the order of arrival. A missing number may still come, or was dropped elsewhere;
    it is known to be gone once (staleness + 1) * groups are held, since no more are ever admitted, not
    dropped and in no batch (as long as the trainer drops none). Under staleness 0 this costs nothing; above,
    a batch may wait for its slowest group, and the input must hold that many unacknowledged records.
    """

    groups: PositiveInt
    baseline: Baseline = "leave_one_out"
    std: bool = False
    whiten: bool = False
    filter_constant: bool = False
    truncated: Literal["train", "baseline_only"] = "train"
    drop_last: bool = False  # the part of a batch at the end of the stream

    def rates(self) -> Rates:
        return Rates(consumes={"scored": self.groups})

    def problems(self, view: GraphView) -> Iterable[str]:
        for source in view.upstream(HasSamples):  # type: ignore[type-abstract]  # an instance check needs no class
            if why := self._too_small(source.samples):
                yield f"baseline={self.baseline}, std={self.std} with samples={source.samples}: {why}"

    async def run(self, scored: Stream[ScoredGroup]) -> AsyncIterator[Batch | Dropped]:
        bound = admission_order()
        ordered = bound is not None
        waiting = _Waiting(groups=self.groups, most=((bound or 0) + 1) * self.groups)
        async for record in scored:
            ready = self._samples(record)
            if isinstance(ready, Dropped):
                waiting.gone(_origin(record))
                yield ready
            else:
                waiting.add(_origin(record), _Ready(id=record.id, samples=ready))
            while groups := waiting.next(ordered=ordered):
                yield _batch(groups, whiten=self.whiten)
        for groups in waiting.rest(ordered=ordered):
            if len(groups) == self.groups or not self.drop_last:
                yield _batch(groups, whiten=self.whiten)
            else:
                for group in groups:
                    yield Dropped(
                        parent=group.id,
                        reason="filtered",
                        detail=f"last {len(groups)} of {self.groups} groups",
                    )

    def _samples(self, record: ScoredGroup) -> tuple[Sample, ...] | Dropped:
        if record.group.prompt.split == "eval":
            return Dropped(parent=record.id, reason="filtered", detail="held out: never trained on")
        usable = [
            (rollout, score)
            for rollout, score in zip(record.group.rollouts, record.scores, strict=True)
            if score.outcome in (Outcome.OK, Outcome.WRONG)
        ]
        first = ""
        if left_out := len(record.scores) - len(usable):
            count("rollouts_without_verdict", left_out)
            kinds = Counter(
                s.outcome.value for s in record.scores if s.outcome not in (Outcome.OK, Outcome.WRONG)
            )
            first = next(s.detail for s in record.scores if s.outcome not in (Outcome.OK, Outcome.WRONG))
            log.warning(
                "group %s: %d of %d rollouts left out: %s; the first: %s",
                record.id,
                left_out,
                len(record.scores),
                dict(kinds),
                first,
            )
        if why := self._too_small(len(usable)):
            told = f" (the first without one: {first})" if left_out and first else ""
            detail = f"{len(usable)} rollouts with a verdict{told}: {why}"
            return Dropped(parent=record.id, reason="invalid", detail=detail)
        raw = [score.value if score.raw is None else score.raw for _, score in usable]
        if self.filter_constant and is_constant(raw):
            right = sum(score.outcome is Outcome.OK for _, score in usable) / len(usable)
            return Dropped(
                parent=record.id, reason="filtered", detail=f"all rewards are {raw[0]}", right_share=right
            )
        advantages = group_advantage(
            [score.value for _, score in usable],
            baseline=self.baseline,
            std=self.std,
            lengths=[int(rollout.mask.sum()) for rollout, _ in usable],
        )
        samples = tuple(
            _sample(record, rollout, score, float(advantage))
            for (rollout, score), advantage in zip(usable, advantages, strict=True)
            if self.truncated == "train" or rollout.finish != "length"
        )
        if not samples:
            return Dropped(parent=record.id, reason="filtered", detail="every response is truncated")
        return samples

    def _too_small(self, size: int) -> str:
        """Why a group of `size` rewards has no such advantage; empty if it has."""
        try:
            group_advantage(np.zeros(size), baseline=self.baseline, std=self.std, lengths=np.ones(size))
        except ValueError as error:
            return str(error)
        return ""


def _sample(record: ScoredGroup, rollout: Rollout, score: Score, advantage: float) -> Sample:
    return Sample(
        group=record.id,
        tokens=rollout.tokens,
        mask=rollout.mask,
        advantages=np.where(rollout.mask, np.float32(advantage), np.float32(0)),
        logprobs=rollout.logprobs,
        versions=rollout.versions,
        temperature=rollout.temperature,
        reward=score.value,
        turns=score.turns,
        truncated=rollout.finish == "length",
        right=score.outcome is Outcome.OK,
        origin=_origin(record),
    )


def _origin(record: ScoredGroup) -> int:
    return record.origins[0] if record.origins else -1


@plain_dataclass(frozen=True, kw_only=True)
class _Ready:
    id: str
    samples: tuple[Sample, ...]


def _batch(groups: list[_Ready], *, whiten: bool) -> Batch:
    samples = tuple(s for g in groups for s in g.samples)
    if whiten and sum(int(s.mask.sum()) for s in samples) > 1:
        samples = _whitened(samples)
    origins = tuple(sorted({s.origin for s in samples if s.origin >= 0}))
    return Batch(parents=tuple(g.id for g in groups), origins=origins, samples=samples)


def _whitened(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
    changed = whitened_tokens([s.advantages[s.mask] for s in samples])
    out: list[Sample] = []
    for sample, values in zip(samples, changed, strict=True):
        advantages = np.zeros(len(sample.mask), np.float32)
        advantages[sample.mask] = values
        out.append(sample.model_copy(update={"advantages": advantages}))
    return tuple(out)


@plain_dataclass(kw_only=True)
class _Waiting:
    """Groups that have arrived and are in no batch; `_next` is the smallest number that isn't settled."""

    groups: int
    most: int
    _held: list[tuple[int, _Ready]] = field(default_factory=list[tuple[int, _Ready]])
    _gone: set[int] = field(default_factory=set[int])
    _next: int = 0

    def add(self, origin: int, group: _Ready) -> None:
        self._held.append((origin, group))

    def gone(self, origin: int) -> None:
        self._gone.add(origin)

    def next(self, *, ordered: bool) -> list[_Ready]:
        """The groups of the next batch; empty while it isn't known."""
        if len(self._held) < self.groups:
            return []
        if ordered:
            self._held.sort(key=lambda item: item[0])
            if len(self._held) < self.most and not self._unbroken():
                return []
        return self._take()

    def rest(self, *, ordered: bool) -> Iterator[list[_Ready]]:
        """What is left at the end of the stream, when no missing number can come any more."""
        if ordered:
            self._held.sort(key=lambda item: item[0])
        while self._held:
            yield self._take()

    def _take(self) -> list[_Ready]:
        taken, self._held = self._held[: self.groups], self._held[self.groups :]
        self._next = max(self._next, taken[-1][0] + 1)
        self._gone = {origin for origin in self._gone if origin >= self._next}
        return [group for _, group in taken]

    def _unbroken(self) -> bool:
        """Whether every number from `_next` to the last of the next batch is held or gone."""
        first, last = self._next, self._held[self.groups - 1][0]
        known = {origin for origin, _ in self._held} | self._gone
        return all(origin in known for origin in range(first, last + 1))
