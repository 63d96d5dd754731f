"""`GroupAdvantage`: scored groups gathered into the batch of one optimizer step."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.advantages import (
    Baseline,
    best_weights,
    group_advantage,
    is_constant,
    remax_advantage,
    whitened_tokens,
)
from arriero.components.batching import batch_of
from arriero.components.masked import on_mask
from arriero.components.waiting import Ready, Waiting
from arriero.engine.graph import GraphView, Rates
from arriero.engine.runtime.context import admission_order, count
from arriero.engine.stream import Stream
from arriero.schemas.messages import Batch, Dropped, Outcome, Rollout, Sample, Score, ScoredGroup

log = logging.getLogger(__name__)

_EPS = 1e-6  # verl's; TRL has 1e-4
_VERDICTS = (Outcome.OK, Outcome.WRONG)


@runtime_checkable
class HasSamples(Protocol):
    """A component that makes `samples` rollouts of each prompt."""

    @property
    def samples(self) -> int: ...


@runtime_checkable
class HasGreedy(Protocol):
    """A component that may add a greedy rollout to those of a prompt."""

    greedy_baseline: bool


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class BestSamples:
    """Imitate the `fraction` best samples of a batch, with weights `eps` nats from equal ones (V-MPO)."""

    eps: PositiveFloat = 0.1
    fraction: float = Field(default=0.5, gt=0, le=1)


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class GroupAdvantage:
    """Batches of `groups` scored groups, one sample per rollout, its advantage on every sampled token.

    Rollouts without a verdict (error, timeout) count neither in the baseline nor in the batch; a group that
    is then too small for its baseline is dropped as invalid. With rewards `reported` nothing is learned from
    them: every rollout is in the batch, verdict or not, with advantage 0. Held-out groups are dropped as
    filtered. The baseline `greedy` is the reward of the group's greedy rollout (ReMax, arXiv:2310.10505),
    which is never in the batch itself.

    filter_constant drops groups whose raw rewards, before penalties and shaping, are all equal: dynamic
    sampling (DAPO, arXiv:2503.14476, section 3.2). truncated: a response that ended at the limit of tokens is
    trained on, or has part in the `baseline_only` (DAPO's overlong filter, section 3.4). whiten: advantages
    of a batch have mean 0 and variance 1 over its tokens (REINFORCE++, arXiv:2501.03262). best: the advantage
    of a sample becomes `best_weights` of those of its batch times their number, so 1 on average. Deviations
    are over n - `ddof`; `eps` is added to that of `std`.

    In a deterministic run a batch holds the groups with the smallest admission numbers that weren't dropped,
    in that order, whatever the order of arrival. A missing number may still come, or was dropped elsewhere;
    it is known to be gone once (staleness + 1) * groups are held, since no more are ever admitted, not
    dropped and in no batch (as long as the trainer drops none). Under staleness 0 this costs nothing; above,
    a batch may wait for its slowest group, and the input must hold that many unacknowledged records.
    """

    groups: PositiveInt
    baseline: Baseline | Literal["greedy"] = "leave_one_out"
    std: bool = False
    whiten: bool = False
    ddof: Literal[0, 1] = 1
    eps: NonNegativeFloat = _EPS
    best: BestSamples | None = None
    filter_constant: bool = False
    truncated: Literal["train", "baseline_only"] = "train"
    rewards: Literal["learned", "reported"] = "learned"
    drop_last: bool = False  # the part of a batch at the end of the stream

    def rates(self) -> Rates:
        return Rates(consumes={"scored": self.groups})

    def problems(self, view: GraphView) -> Iterable[str]:
        for source in view.upstream(HasSamples):  # type: ignore[type-abstract]  # an instance check needs no class
            if why := self._too_small(source.samples):
                yield f"baseline={self.baseline}, std={self.std} with samples={source.samples}: {why}"
        if self.ddof != 1 and not (self.std or self.whiten):
            yield f"ddof={self.ddof} is of a deviation, but std and whiten are false; leave it out"
        if self.eps != _EPS and not self.std:
            yield f"eps={self.eps} is added to a deviation, but std is false; leave it out"
        if self.whiten and self.best:
            yield "whiten=True and best are two scales for one batch; leave one of them out"
        if self.rewards == "reported" and (read := self._reading_rewards()):
            yield f"rewards=reported are in no advantage, but {read} reads them; leave it out"
        yield from self._about_greedy(view)

    def _reading_rewards(self) -> str:
        """What is configured to look at rewards or advantages; empty for nothing."""
        options = {
            f"baseline={self.baseline}": self.baseline != "none",
            "std": self.std, "whiten": self.whiten, "filter_constant": self.filter_constant,
            f"best={self.best}": self.best is not None,
            f"truncated={self.truncated}": self.truncated != "train",
        }  # fmt: skip
        return ", ".join(name for name, used in options.items() if used)

    def _about_greedy(self, view: GraphView) -> Iterable[str]:
        """Greedy rollouts without a use, or a use without them."""
        wanted = self.baseline == "greedy"
        made = [s.greedy_baseline for s in view.upstream(HasGreedy)]  # type: ignore[type-abstract]  # as above
        if wanted and not any(made):
            yield "baseline=greedy needs a greedy rollout of each prompt; set greedy_baseline of Generator"
        if wanted and self.std:
            yield "baseline=greedy doesn't read std=True: there is no deviation in it; leave std out"
        if any(made) and not wanted:
            yield f"greedy_baseline of the generator isn't read by baseline={self.baseline}; set it to greedy"

    async def run(self, scored: Stream[ScoredGroup]) -> AsyncIterator[Batch | Dropped]:
        bound = admission_order()
        ordered = bound is not None
        waiting = Waiting(groups=self.groups, most=((bound or 0) + 1) * self.groups)
        async for record in scored:
            ready = self._samples(record)
            if isinstance(ready, Dropped):
                if ordered:
                    waiting.gone(_origin(record))
                yield ready
            else:
                waiting.add(_origin(record), Ready(id=record.id, samples=ready))
            while groups := waiting.next(ordered=ordered):
                yield self._batch(groups)
        for groups in waiting.rest(ordered=ordered):
            if len(groups) == self.groups or not self.drop_last:
                yield self._batch(groups)
            else:
                for group in groups:
                    yield Dropped(
                        parent=group.id,
                        reason="filtered",
                        detail=f"last {len(groups)} of {self.groups} groups",
                    )

    def _batch(self, groups: list[Ready]) -> Batch:
        samples = tuple(s for g in groups for s in g.samples)
        if self.whiten:
            samples = _whitened(samples, self.ddof)
        if self.best:
            samples = _weighed(samples, self.best)
        return batch_of(samples)

    def _samples(self, record: ScoredGroup) -> tuple[Sample, ...] | Dropped:
        if record.group.prompt.split == "eval":
            return Dropped(parent=record.id, reason="filtered", detail="held out: never trained on")
        usable, first = _with_verdict(record)
        if self.rewards == "reported":
            usable = list(zip(record.group.rollouts, record.scores, strict=True))
        greedy = [score.value for rollout, score in usable if rollout.greedy]
        usable = [(rollout, score) for rollout, score in usable if not rollout.greedy]
        if why := self._too_small(len(usable)):
            told = f" (the first without one: {first})" if first else ""
            detail = f"{len(usable)} rollouts with a verdict{told}: {why}"
            return Dropped(parent=record.id, reason="invalid", detail=detail)
        if self.baseline == "greedy" and not greedy:
            return Dropped(parent=record.id, reason="invalid", detail="no greedy rollout with a verdict")
        raw = [score.value if score.raw is None else score.raw for _, score in usable]
        if self.filter_constant and is_constant(raw):
            right = sum(score.outcome is Outcome.OK for _, score in usable) / len(usable)
            return Dropped(
                parent=record.id, reason="filtered", detail=f"all rewards are {raw[0]}", right_share=right
            )
        rewards = [score.value if self.rewards == "learned" else 0.0 for _, score in usable]
        if self.baseline == "greedy":
            # The reward comes with the last token, so all of it is still to come at every one.
            advantages = np.concatenate([remax_advantage([reward], greedy[0]) for reward in rewards])
        else:
            lengths = [int(rollout.mask.sum()) for rollout, _ in usable]
            advantages = group_advantage(
                rewards, baseline=self.baseline, std=self.std, ddof=self.ddof, eps=self.eps, lengths=lengths
            )
        samples = tuple(
            trained_sample(record, rollout, score, float(advantage))
            for (rollout, score), advantage in zip(usable, advantages, strict=True)
            if self.truncated == "train" or rollout.finish != "length"
        )
        if not samples:
            return Dropped(parent=record.id, reason="filtered", detail="every response is truncated")
        return samples

    def _too_small(self, size: int) -> str:
        """Why a group of `size` rewards has no such advantage; empty if it has."""
        if self.baseline == "greedy":
            return "" if size else "nothing is left to train on"
        try:
            group_advantage(np.zeros(size), baseline=self.baseline, std=self.std, lengths=np.ones(size))
        except ValueError as error:
            return str(error)
        return ""


def _with_verdict(record: ScoredGroup) -> tuple[list[tuple[Rollout, Score]], str]:
    """Rollouts with the scores that are verdicts, and what the first other score says; others are counted."""
    pairs = list(zip(record.group.rollouts, record.scores, strict=True))
    usable = [pair for pair in pairs if pair[1].outcome in _VERDICTS]
    others = [score for _, score in pairs if score.outcome not in _VERDICTS]
    if not others:
        return usable, ""
    count("rollouts_without_verdict", len(others))
    log.debug(
        "group %s: %d of %d rollouts left out: %s; the first: %s",
        record.id,
        len(others),
        len(pairs),
        dict(Counter(score.outcome.value for score in others)),
        others[0].detail,
    )
    return usable, others[0].detail


def trained_sample(record: ScoredGroup, rollout: Rollout, score: Score, advantage: float) -> Sample:
    """A scored rollout to be trained on, `advantage` on each of its sampled tokens."""
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
        judged=score.outcome in _VERDICTS,
        origin=_origin(record),
    )


def _origin(record: ScoredGroup) -> int:
    return record.origins[0] if record.origins else -1


def _weighed(samples: tuple[Sample, ...], best: BestSamples) -> tuple[Sample, ...]:
    values = [float(s.advantages[s.mask][0]) for s in samples]
    weights = len(samples) * best_weights(values, eps=best.eps, fraction=best.fraction)
    return tuple(
        s.model_copy(update={"advantages": np.where(s.mask, np.float32(weight), np.float32(0))})
        for s, weight in zip(samples, weights, strict=True)
    )


def _whitened(samples: tuple[Sample, ...], ddof: Literal[0, 1]) -> tuple[Sample, ...]:
    changed = whitened_tokens([s.advantages[s.mask] for s in samples], ddof=ddof)
    return tuple(
        s.model_copy(update={"advantages": on_mask(s.mask, values, elsewhere=0.0)})
        for s, values in zip(samples, changed, strict=True)
    )
