"""Batches of scored groups: advantages against hand calculation, drops, and the order of admission."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arriero.components.advantage import BestSamples, GroupAdvantage
from arriero.components.overlong import OverlongPenalty
from arriero.engine.graph import Graph, Rates
from arriero.engine.stream import Stream
from arriero.schemas.messages import (
    Batch,
    Dropped,
    Outcome,
    Prompt,
    Rollout,
    RolloutGroup,
    Score,
    ScoredGroup,
    Split,
)
from tests.drive import Alone, dropped, in_admission_order, kept, outputs, stream

OK, WRONG, ERROR, TIMEOUT = Outcome.OK, Outcome.WRONG, Outcome.ERROR, Outcome.TIMEOUT


def rollout(first: int) -> Rollout:
    """Two tokens of prompt, then a sampled one, one of a tool, a sampled one."""
    nan = np.nan
    return Rollout(
        tokens=np.array([first, 2, 3, 4, 5], np.int32),
        mask=np.array([False, False, True, False, True]),
        logprobs=np.array([nan, nan, -0.5, nan, -1.5], np.float32),
        versions=np.array([-1, -1, 3, -1, 4], np.int32),
        text="text",
        finish="stop",
        temperature=0.5,
    )


def scored(origin: int, *scores: float | Outcome, split: Split = "train") -> ScoredGroup:
    """A number is the reward of a verdict; an outcome has none."""
    prompt = Prompt(id=f"e0-r{origin}", text="?", split=split)
    rollouts = tuple(rollout(i) for i in range(len(scores)))
    return ScoredGroup(
        id=f"s{origin}",
        origins=(origin,),
        group=RolloutGroup(id=f"g{origin}", origins=(origin,), prompt=prompt, rollouts=rollouts),
        scores=tuple(
            Score(value=0.0, outcome=s)
            if isinstance(s, Outcome)
            else Score(value=s, outcome=OK if s > 0 else WRONG)
            for s in scores
        ),
    )


async def run(component: GroupAdvantage, *records: ScoredGroup) -> list[Batch | Dropped]:
    return await outputs(component.run(stream(records, ScoredGroup)))


def order(records: list[Batch | Dropped]) -> list[list[int]]:
    return [[int(p.removeprefix("s")) for p in batch.parents] for batch in kept(records)]


async def test_a_sample_is_its_rollout_with_the_advantage_on_sampled_tokens() -> None:
    # Rewards 1, 0, 0; leave one out: 1 - 0, 0 - 1/2, 0 - 1/2.
    (batch,) = kept(await run(GroupAdvantage(groups=1), scored(6, 1, 0, 0)))
    assert (batch.parents, batch.origins) == (("s6",), (6,))
    for i, (sample, advantage) in enumerate(zip(batch.samples, [1, -0.5, -0.5], strict=True)):
        source = rollout(i)
        assert sample.advantages.tolist() == [0, 0, advantage, 0, advantage]
        assert sample.advantages.dtype == np.float32
        assert sample.logprobs is not None
        assert sample.versions is not None
        for name in ("tokens", "mask", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(sample, name), getattr(source, name))
        assert (sample.group, sample.origin, sample.temperature) == ("s6", 6, 0.5)
    assert [s.reward for s in batch.samples] == [1, 0, 0]


@pytest.mark.parametrize(
    ("component", "expected"),
    [
        (GroupAdvantage(groups=1, baseline="mean"), [0.75, -0.25, -0.25, -0.25]),
        # The deviation of 1, 0, 0, 0 over n - 1 is 1/2.
        (GroupAdvantage(groups=1, baseline="mean", std=True), [1.5, -0.5, -0.5, -0.5]),
        (GroupAdvantage(groups=1, baseline="none"), [1, 0, 0, 0]),
    ],
)
async def test_baselines_agree_with_hand_calculation(
    component: GroupAdvantage, expected: list[float]
) -> None:
    (batch,) = kept(await run(component, scored(0, 1, 0, 0, 0)))
    assert [s.advantages[2] for s in batch.samples] == pytest.approx(expected, abs=1e-5)


async def test_groups_are_gathered_in_order_of_arrival_and_the_rest_is_given_at_the_end() -> None:
    records = [scored(i, 1, 0) for i in (3, 0, 4, 1, 2)]
    found = await run(GroupAdvantage(groups=2), *records)
    assert order(found) == [[3, 0], [4, 1], [2]]
    assert [b.origins for b in kept(found)] == [(0, 3), (1, 4), (2,)]
    found = await run(GroupAdvantage(groups=2, drop_last=True), *records)
    assert order(found) == [[3, 0], [4, 1]]
    assert [(d.parent, d.reason, d.detail) for d in dropped(found)] == [
        ("s2", "filtered", "last 1 of 2 groups")
    ]


async def test_a_rollout_without_a_verdict_is_neither_trained_on_nor_in_the_baseline() -> None:
    # Without the two: rewards 1 and 0, so each one's baseline is the other.
    (batch,) = kept(await run(GroupAdvantage(groups=1), scored(0, 1, ERROR, 0, TIMEOUT)))
    assert [s.tokens[0] for s in batch.samples] == [0, 2]
    assert [s.advantages[2] for s in batch.samples] == [1, -1]


async def test_a_group_too_small_for_its_baseline_is_dropped() -> None:
    found = await run(
        GroupAdvantage(groups=1), scored(0, 1, ERROR), scored(1, 1, 0), scored(2, TIMEOUT, ERROR)
    )
    assert order(found) == [[1]]
    assert [(d.parent, d.reason) for d in dropped(found)] == [("s0", "invalid"), ("s2", "invalid")]
    assert dropped(found)[0].detail.startswith("1 rollouts with a verdict: ")
    found = await run(GroupAdvantage(groups=1, baseline="none"), scored(0, 1, ERROR), scored(1, ERROR))
    assert order(found) == [[0]]
    assert [d.parent for d in dropped(found)] == ["s1"]


async def test_constant_groups_have_no_advantage_or_are_filtered() -> None:
    records = scored(0, 1, 1, 1), scored(1, 0, 0), scored(2, 1, 0)
    found = await run(GroupAdvantage(groups=3, std=True, baseline="mean"), *records)
    assert [float(np.abs(s.advantages).max()) for s in kept(found)[0].samples[:5]] == [0] * 5
    found = await run(GroupAdvantage(groups=1, filter_constant=True), *records)
    assert order(found) == [[2]]
    assert [(d.parent, d.reason) for d in dropped(found)] == [("s0", "filtered"), ("s1", "filtered")]


async def test_held_out_groups_are_never_trained_on() -> None:
    found = await run(GroupAdvantage(groups=1), scored(-1, 1, 0, split="eval"), scored(0, 1, 0))
    assert order(found) == [[0]]
    assert dropped(found)[0].parent == "s-1"


@given(st.permutations(range(6)))
async def test_ordered_batches_at_staleness_zero_are_sorted_arrivals(arrival: list[int]) -> None:
    # Synchronous: the second three are admitted after the first batch is trained.
    first, second = [i for i in arrival if i < 3], [i for i in arrival if i >= 3]
    records = [scored(i, 1, 0) for i in first + second]
    with in_admission_order(staleness=0):
        found = await run(GroupAdvantage(groups=3), *records)
    assert order(found) == [[0, 1, 2], [3, 4, 5]]


@given(
    st.randoms(use_true_random=False),
    st.integers(0, 3),
    st.integers(1, 4),
    st.sets(st.integers(0, 40)),
    st.integers(0, 9),
)
async def test_ordered_batches_hold_the_next_admitted_groups_whatever_arrives_when(
    chance: random.Random, staleness: int, groups: int, lost: set[int], start: int
) -> None:
    """Admission as the runtime does it; `lost` are dropped elsewhere; arrivals in any order; also resumed."""
    component = GroupAdvantage(groups=groups, drop_last=True)
    source = Arrivals(chance, window=(staleness + 1) * groups, lost={start + i for i in lost}, start=start)
    run = component.run(source.stream())
    wanted = (i for i in range(start, start + 1000) if i not in source.lost)
    with in_admission_order(staleness):
        for _ in range(6):
            batch = await anext(run)
            assert isinstance(batch, Batch)
            assert batch.parents == tuple(f"s{next(wanted)}" for _ in range(groups))
            source.in_flight -= groups


class Arrivals:
    """A stream that never ends: `window` groups are in flight, of which a random one arrives next."""

    def __init__(self, chance: random.Random, window: int, lost: set[int], start: int) -> None:
        self.chance, self.window, self.lost = chance, window, lost
        self.admitted, self.in_flight = start, 0
        self.under_way: list[int] = []

    def stream(self) -> Stream[ScoredGroup]:
        return Stream("test", ScoredGroup, self)

    async def next(self) -> ScoredGroup | None:
        while self.in_flight < self.window:
            if self.admitted not in self.lost:
                self.under_way.append(self.admitted)
                self.in_flight += 1
            self.admitted += 1
        assert self.under_way, "it waits for a group although all in flight have arrived"
        return scored(self.under_way.pop(self.chance.randrange(len(self.under_way))), 1, 0)

    def poll(self) -> ScoredGroup | None:
        return None

    async def at(self, version: int) -> ScoredGroup:
        raise LookupError(version)


async def test_an_ordered_batch_passes_over_what_it_dropped_itself() -> None:
    # At staleness 2 nothing but the known drop of 1 tells that 0 and 2 are the next two.
    component = GroupAdvantage(groups=2, filter_constant=True)
    source = stream([scored(2, 1, 0), scored(1, 1, 1), scored(0, 1, 0)], ScoredGroup)
    with in_admission_order(staleness=2):
        found = await outputs(component.run(source), first=2)
    assert order(found) == [[0, 2]]


async def test_at_the_end_of_the_stream_the_rest_is_ordered_too() -> None:
    with in_admission_order(staleness=3):
        found = await run(GroupAdvantage(groups=2), *(scored(i, 1, 0) for i in (9, 4, 7, 5, 6)))
    assert order(found) == [[4, 5], [6, 7], [9]]


class Four:
    samples = 4


class One:
    samples = 1


def test_check_refuses_groups_too_small_for_the_baseline() -> None:
    assert list(GroupAdvantage(groups=2).problems(Alone(Four(), object()))) == []
    assert "samples=1" in next(iter(GroupAdvantage(groups=2).problems(Alone(One()))))
    assert list(GroupAdvantage(groups=2, baseline="none").problems(Alone(One()))) == []
    assert "samples=1" in next(
        iter(GroupAdvantage(groups=2, baseline="none", std=True).problems(Alone(One())))
    )


def test_a_firing_takes_as_many_groups_as_a_batch_holds() -> None:
    assert GroupAdvantage(groups=5).rates() == Rates(consumes={"scored": 5})
    Graph("g").add(GroupAdvantage(groups=5))


def with_raw(record: ScoredGroup, *raw: float) -> ScoredGroup:
    scores = tuple(
        score.model_copy(update={"raw": value}) for score, value in zip(record.scores, raw, strict=True)
    )
    return record.model_copy(update={"scores": scores})


async def test_a_group_without_a_signal_is_judged_by_its_rewards_before_shaping() -> None:
    component = GroupAdvantage(groups=1, filter_constant=True)
    shaped = with_raw(scored(0, 1.0, 0.5), 1.0, 1.0)
    levelled = with_raw(scored(1, 0.5, 0.5), 1.0, 0.5)
    found = await run(component, shaped, levelled)
    assert [(d.parent, d.detail) for d in dropped(found)] == [("s0", "all rewards are 1.0")]
    assert [b.parents for b in kept(found)] == [("s1",)]


def truncated(record: ScoredGroup, *which: int) -> ScoredGroup:
    rollouts = tuple(
        r.model_copy(update={"finish": "length"}) if i in which else r
        for i, r in enumerate(record.group.rollouts)
    )
    return record.model_copy(update={"group": record.group.model_copy(update={"rollouts": rollouts})})


async def test_a_truncated_response_has_part_in_the_baseline_only() -> None:
    component = GroupAdvantage(groups=1, baseline="mean", truncated="baseline_only")
    found = await run(component, truncated(scored(0, 1, 0, 0, 0), 1, 2), truncated(scored(1, 1, 0), 0, 1))
    (batch,) = kept(found)
    assert [s.advantages[2] for s in batch.samples] == [0.75, -0.25]
    (batch,) = kept(await run(GroupAdvantage(groups=1), truncated(scored(0, 1, 0, 0), 1)))
    assert [s.truncated for s in batch.samples] == [False, True, False]
    assert [(d.parent, d.detail) for d in dropped(found)] == [("s1", "every response is truncated")]


async def test_whitening_is_over_the_tokens_of_a_batch() -> None:
    # Advantages 1/2, -1/2, 1/4, -1/4 on two tokens each: mean 0, sum of squares 1.25, over 7.
    component = GroupAdvantage(groups=2, baseline="mean", whiten=True)
    (batch,) = kept(await run(component, scored(0, 1.0, 0.0), scored(1, 1.0, 0.5)))
    deviation = (1.25 / 7) ** 0.5
    expected = [a / deviation for a in (0.5, -0.5, 0.25, -0.25)]
    assert [s.advantages[4] for s in batch.samples] == pytest.approx(expected, abs=1e-5)
    assert [s.advantages[3] for s in batch.samples] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("component", "expected"),
    [
        # Rewards 1, 0, 0, 1: 0.5 over n and 0.57735 over n - 1, and what is added to it.
        (GroupAdvantage(groups=1, baseline="mean", std=True, ddof=0, eps=0), 1.0),
        (GroupAdvantage(groups=1, baseline="mean", std=True, eps=0.1), 0.5 / (3**-0.5 + 0.1)),
        (GroupAdvantage(groups=1, baseline="mean", whiten=True, ddof=0), 1.0),
    ],
)
async def test_the_deviation_is_the_one_that_was_named(component: GroupAdvantage, expected: float) -> None:
    (batch,) = kept(await run(component, scored(0, 1, 0, 0, 1)))
    assert [s.advantages[2] for s in batch.samples] == pytest.approx(
        [expected, -expected, -expected, expected], abs=1e-5
    )


def test_options_of_a_deviation_that_nobody_divides_by_are_refused() -> None:
    (line,) = GroupAdvantage(groups=1, ddof=0).problems(Alone(Four()))
    assert line == "ddof=0 is of a deviation, but std and whiten are false; leave it out"
    (line,) = GroupAdvantage(groups=1, whiten=True, eps=1e-4).problems(Alone(Four()))
    assert line == "eps=0.0001 is added to a deviation, but std is false; leave it out"


async def test_the_length_weighted_baseline_weighs_by_sampled_tokens() -> None:
    (batch,) = kept(await run(GroupAdvantage(groups=1, baseline="length_weighted"), scored(0, 1, 0, 0, 0)))
    assert [s.advantages[2] for s in batch.samples] == [0.75, -0.25, -0.25, -0.25]


async def test_the_penalty_for_length_keeps_the_reward_before_it() -> None:
    # Every response has two sampled tokens: half of the way from 1 to 3.
    component = OverlongPenalty(max_length=3, buffer=2)
    records = [scored(0, 1.0, 0.0, ERROR), scored(1, 1.0, 1.0, split="eval")]
    shaped, held_out = kept(await outputs(component.run(stream(records, ScoredGroup))))
    assert [s.value for s in shaped.scores] == [0.5, -0.5, 0.0]
    assert [s.raw for s in shaped.scores] == [1.0, 0.0, None]
    assert shaped.parents == ("s0",)
    assert held_out.scores == records[1].scores
    found = await run(GroupAdvantage(groups=1, filter_constant=True), shaped)
    assert [s.advantages[2] for s in kept(found)[0].samples] == [1, -1]
    assert list(OverlongPenalty(max_length=3, buffer=4).problems(Alone()))


def with_greedy(record: ScoredGroup) -> ScoredGroup:
    """The same, its last rollout the greedy one."""
    *sampled, last = record.group.rollouts
    rollouts = (*sampled, last.model_copy(update={"greedy": True}))
    return record.model_copy(update={"group": record.group.model_copy(update={"rollouts": rollouts})})


async def test_the_greedy_rollout_is_a_baseline_and_is_not_trained_on() -> None:
    component = GroupAdvantage(groups=1, baseline="greedy")
    (batch,) = kept(await run(component, with_greedy(scored(0, 1, 0, 0.25))))
    # Rewards 1 and 0, the greedy response's 0.25.
    assert [s.advantages.tolist() for s in batch.samples] == [[0, 0, a, 0, a] for a in (0.75, -0.25)]
    assert [int(s.tokens[0]) for s in batch.samples] == [0, 1]


async def test_rewards_that_are_only_reported_drop_nothing() -> None:
    component = GroupAdvantage(groups=2, baseline="none", rewards="reported")
    groups = [scored(0, 1.0, ERROR, 0.0), scored(1, TIMEOUT, TIMEOUT)]
    (batch,) = kept(await outputs(component.run(stream(groups, ScoredGroup))))
    assert isinstance(batch, Batch)
    assert [s.judged for s in batch.samples] == [True, False, True, False, False]
    assert [s.reward for s in batch.samples if s.judged] == [1.0, 0.0]
    assert not any(s.advantages.any() for s in batch.samples)
    (problem,) = GroupAdvantage(groups=2, rewards="reported", whiten=True).problems(Alone())
    assert "baseline=leave_one_out, whiten reads them; leave it out" in problem


@pytest.mark.parametrize(
    ("scores", "said"),
    [((1, 0, ERROR), "no greedy rollout with a verdict"), ((ERROR, 1), "nothing is left to train on")],
)
async def test_a_group_without_a_greedy_verdict_or_without_another_is_dropped(
    scores: tuple[float | Outcome, ...], said: str
) -> None:
    component = GroupAdvantage(groups=1, baseline="greedy")
    (record,) = dropped(await run(component, with_greedy(scored(0, *scores))))
    assert record.reason == "invalid"
    assert said in record.detail


class Likeliest:
    samples = 2
    greedy_baseline = True


def test_a_greedy_baseline_and_greedy_rollouts_need_each_other() -> None:
    def problems(component: GroupAdvantage, *upstream: object) -> str:
        return "\n".join(component.problems(Alone(*upstream)))

    greedy = GroupAdvantage(groups=2, baseline="greedy")
    assert problems(greedy, Likeliest()) == ""
    assert "set greedy_baseline of Generator" in problems(greedy, Four())
    assert "isn't read by baseline=mean" in problems(GroupAdvantage(groups=2, baseline="mean"), Likeliest())
    deviation = GroupAdvantage(groups=2, baseline="greedy", std=True)
    assert "leave std out" in problems(deviation, Likeliest())
    both = GroupAdvantage(groups=2, whiten=True, best=BestSamples())
    assert "leave one of them out" in problems(both, Four())


async def test_the_better_half_of_a_batch_is_imitated() -> None:
    component = GroupAdvantage(groups=2, baseline="none", best=BestSamples(eps=9.0))
    (batch,) = kept(await run(component, scored(0, 1, 0), scored(1, 3, 2)))
    # Of four samples the one with reward 3 takes everything, and the mean weight is 1.
    assert [float(s.advantages.max()) for s in batch.samples] == [0, 0, 4, 0]
