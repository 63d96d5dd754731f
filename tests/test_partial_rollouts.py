"""Responses cut into segments and continued by other replicas: the same as if they had never been cut."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arriero.components.generator import Generator
from arriero.components.prompt_queue import PromptQueue
from arriero.components.sampling import Sampling
from arriero.components.stragglers import Stragglers
from arriero.engine.backlog import Backlog
from arriero.engine.runtime.context import current, entered
from arriero.launchers.launch import inline
from arriero.launchers.options import LaunchOptions
from arriero.launchers.rundir import create
from arriero.pipelines.aipo import AIPOConfig, aipo
from arriero.schemas.continuations import Continuation, Response, prompt_of
from arriero.schemas.messages import Dropped, Prompt, RolloutGroup
from arriero.schemas.run import RunOptions
from tests.drive import Alone, dropped, kept, stream
from tests.engines import needs_vllm
from tests.inline_runs import policy_gradient_fields
from tests.test_generator import Published, collect, prompts, running
from tests.tiny_models import save_tiny_llama


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_llama(tmp_path / "tiny", hidden=16, layers=1, seed=2)


class Shelf:
    """A backlog in memory that takes up to `room` continuations; `lengths` by row."""

    def __init__(
        self, *waiting: Continuation, room: int = 1000, lengths: dict[int, int] | None = None
    ) -> None:
        self.waiting, self.room, self.lengths = deque(waiting), room, lengths or {}
        self.put_back: list[Continuation] = []
        self.refused = 0
        self.no_prompts = False

    def expected_tokens(self, prompt: Prompt) -> int:
        return self.lengths.get(prompt.row, 0)

    async def refuse_prompts(self) -> None:
        self.no_prompts = True

    async def put(self, record: Continuation) -> bool:
        if len(self.put_back) >= self.room:
            self.refused += 1
            return False
        self.put_back.append(record)
        return True

    async def next(self) -> Continuation | None:
        return self.poll()

    def poll(self) -> Continuation | None:
        return self.ready()

    def ready(self) -> Continuation | None:
        return self.waiting.popleft() if self.waiting else None


def generator(model: Path, most: int = 24, **more: Any) -> Generator:
    stragglers = Stragglers(**{k: more.pop(k) for k in tuple(more) if k in Stragglers.__annotations__})
    sampling = Sampling(max_new_tokens=most, stop=more.pop("stop", ()))
    return Generator(
        model=str(model),
        samples=3,
        slots=more.pop("slots", 6),
        sampling=sampling,
        stragglers=stragglers,
        **more,
    )


async def one_replica(
    config: Generator, given: Sequence[Prompt], published: Published, shelf: Shelf
) -> list[RolloutGroup | Dropped]:
    published.newest = [published.last]
    run = config.run(stream(given, Prompt), published.stream(), Backlog(shelf))
    return [out async for out in run]


async def whole(
    config: Generator, given: Sequence[Prompt], published: Published
) -> list[RolloutGroup | Dropped]:
    published.newest = [published.last]
    return await collect(config, given, published)


async def in_segments(
    config: Generator, given: Sequence[Prompt], published: Published
) -> tuple[list[RolloutGroup | Dropped], int]:
    """Every segment on a replica that is started for it; what came out, and the number of hand-overs."""
    shelf = Shelf()
    found = await one_replica(config, given, published, shelf)
    hops = 0
    while shelf.put_back:
        hops += len(shelf.put_back)
        shelf = Shelf(*shelf.put_back)
        found += await one_replica(config, (), published, shelf)
    return found, hops


def by_prompt(found: Sequence[RolloutGroup | Dropped]) -> list[RolloutGroup]:
    return sorted(kept(found), key=lambda g: g.prompt.id)


@pytest.mark.parametrize("segment", [1, 5, 8, 23])
async def test_a_response_cut_into_segments_equals_the_uncut_one_token_for_token(
    model: Path, segment: int
) -> None:
    asked = prompts("12+3=", "7", "400*20=")
    with running(model) as published:
        uncut = by_prompt(await whole(generator(model), asked, published))
        found, hops = await in_segments(generator(model, segment_tokens=segment), asked, published)
    assert hops >= 3
    for left, right in zip(uncut, by_prompt(found), strict=True):
        for one, other in zip(left.rollouts, right.rollouts, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert one.text == other.text
            assert one.finish == other.finish
            assert one.seed == other.seed
            assert np.abs(one.logprobs - other.logprobs)[one.mask].max() < 1e-5


async def test_what_is_left_of_the_length_is_sampled_and_not_the_whole_again(model: Path) -> None:
    with running(model) as published:
        found, _ = await in_segments(generator(model, most=10, segment_tokens=7), prompts("1+1="), published)
    (group,) = kept(found)
    assert max(int(r.mask.sum()) for r in group.rollouts) == 10
    assert {r.finish for r in group.rollouts if r.mask.sum() == 10} <= {"length", "stop"}


async def test_a_stop_string_across_the_seam_is_found(model: Path) -> None:
    asked = prompts("12+3=", "7", "400*20=", "5")
    with running(model) as published:
        texts = [
            r.text for g in by_prompt(await whole(generator(model), asked, published)) for r in g.rollouts
        ]
        # Two characters that stand next to each other exactly at the end of a segment of six.
        stop = next(text[5:7] for text in texts if len(text) > 8 and text.find(text[5:7]) == 5)
        config = generator(model, stop=(stop,))
        uncut = by_prompt(await whole(config, asked, published))
        cut = by_prompt(
            (await in_segments(generator(model, stop=(stop,), segment_tokens=6), asked, published))[0]
        )
    ended = [r.text for g in cut for r in g.rollouts]
    assert ended == [r.text for g in uncut for r in g.rollouts]
    assert any(text.endswith(stop) and len(text) == 7 for text in ended)


@needs_vllm
@pytest.mark.timeout(300)
async def test_on_vllm_a_response_in_segments_ends_at_the_first_stop_string_wherever_it_begins(
    model: Path,
) -> None:
    asked = prompts("12+3=", "7", "400*20=", "5")
    stop = ("00", "1", "+-")
    config = generator(model, most=12, stop=stop, segment_tokens=3, slots=12, engine="vllm")
    with running(model) as published:
        found, hops = await in_segments(config, asked, published)
    rollouts = [r for g in kept(found) for r in g.rollouts]
    assert (len(rollouts), hops > 0) == (12, True)
    for rollout in rollouts:
        ends = [rollout.text.find(each) + len(each) for each in stop if each in rollout.text]
        assert ends == [len(rollout.text)] * len(ends)
        assert int(rollout.mask.sum()) <= 12
        if rollout.finish == "length":
            assert (ends, int(rollout.mask.sum())) == ([], 12)
    # Some go on after the first segment, and end there at a stop string.
    assert any(r.finish == "stop" and len(r.text) > 3 and r.text.endswith(stop) for r in rollouts)


@needs_vllm
@pytest.mark.timeout(300)
def test_on_vllm_a_tail_replica_goes_on_with_what_others_put_back(tmp_path: Path) -> None:
    tail = {"segment_tokens": 2, "tail_replicas": 1, "longest_first": True}
    fields = policy_gradient_fields(
        tmp_path, engine="vllm", kv_cache="recompute", generators=2, staleness=1, steps=3,
        stragglers=tail, slots=32, groups_per_step=4, samples=4, vllm={"kv_cache_bytes": 64 << 20},
    )  # fmt: skip
    record = create(tmp_path / "run")
    options = RunOptions(run_id=f"{tmp_path.name}-{os.getpid()}", seed=7, wait_bound_s=100)
    assert inline(aipo(AIPOConfig(**fields)).check(), options, record, LaunchOptions(quiet=True)) == 0
    steps = [json.loads(line) for line in record.metrics.read_text().splitlines()]
    assert [s["step"] for s in steps] == [1, 2, 3]
    assert all(s["fresh_mismatch_max"] < 1e-4 for s in steps if s.get("fresh_tokens"))
    assert record.read_summary().counts["continuations"] >= 8  # five tokens are three segments


async def test_every_token_keeps_the_version_that_sampled_it(model: Path) -> None:
    shelf = Shelf()
    with running(model) as published:
        config = generator(model, segment_tokens=4)
        await one_replica(config, prompts("1+1="), published, shelf)
        published.publish(1, 0.5)
        found = await one_replica(config, (), published, second := Shelf(*shelf.put_back))
    put = [r for c in second.put_back for r in c.responses if r.tokens.size == 8]
    assert put or by_prompt(found)
    for one in put:
        assert one.versions.tolist() == [0] * 4 + [1] * 4
    assert all(c.oldest_version == 0 for c in second.put_back)


async def test_a_group_that_is_too_old_to_be_trained_gets_no_more_tokens(model: Path) -> None:
    shelf = Shelf()
    with running(model) as published:
        config = generator(model, segment_tokens=4)
        held_out = Prompt(id="e", text="2+2=", split="eval", origins=(-1,))
        await one_replica(config, [*prompts("1+1="), held_out], published, shelf)
        published.publish(2, 0.5)  # the bound of this context is 1
        found = await one_replica(config, (), published, Shelf(*shelf.put_back))
    (drop,) = dropped(found)
    assert (drop.parent, drop.reason) == ("p0", "stale")
    assert "begun by version 0, version 2 came" in drop.detail


async def test_without_room_on_the_backlog_a_replica_goes_on_by_itself(model: Path) -> None:
    asked = prompts("12+3=", "7")
    with running(model) as published:
        uncut = by_prompt(await whole(generator(model), asked, published))
        shelf = Shelf(room=0)
        found = by_prompt(await one_replica(generator(model, segment_tokens=5), asked, published, shelf))
    assert shelf.refused > 2
    assert [r.tokens.tolist() for g in found for r in g.rollouts] == [
        r.tokens.tolist() for g in uncut for r in g.rollouts
    ]


async def test_a_group_that_runs_out_of_time_is_resubmitted_so_often_and_then_dropped(model: Path) -> None:
    counted: dict[str, int] = {}
    with running(model, counted) as published:
        config = generator(model, most=200, group_timeout_s=1e-6, on_timeout="resubmit", resubmissions=2)
        shelf = Shelf()
        found = await one_replica(config, prompts("1+1="), published, shelf)
        for timeouts in (1, 2):
            assert not found
            assert [c.timeouts for c in shelf.put_back] == [timeouts]
            shelf = Shelf(*shelf.put_back)
            found = await one_replica(config, (), published, shelf)
    (drop,) = dropped(found)
    assert drop.reason == "group_timeout"
    assert "resubmitted 2 times" in drop.detail
    assert counted["resubmitted_groups"] == 2


async def test_time_on_other_replicas_counts_for_the_time_out(model: Path) -> None:
    with running(model) as published:
        config = generator(model, most=200, group_timeout_s=50.0, segment_tokens=4)
        late = Continuation(prompt=prompts("1+1=")[0], spent_s=51.0)
        found = await one_replica(config, (), published, Shelf(late))
    assert [d.reason for d in dropped(found)] == ["group_timeout"]


async def test_the_longest_of_the_prompts_at_hand_is_started_first(model: Path) -> None:
    asked = [p.model_copy(update={"row": n}) for n, p in enumerate(prompts("1", "2", "3", "4", "5", "6"))]
    shelf = Shelf(lengths={0: 5, 1: 9, 2: 7, 4: 30})
    for longest_first, order in ((True, [1, 2, 4, 0, 3, 5]), (False, [0, 1, 2, 3, 4, 5])):
        config = generator(model, slots=9, longest_first=longest_first)  # three groups at hand
        queue = PromptQueue(config, stream(asked, Prompt), Backlog(shelf), in_tail=False)
        begun: list[int] = []
        assert queue.next(room=2) is None
        while (record := queue.next(room=3)) is not None:
            begun.append(prompt_of(record).row)
        assert begun == order


async def test_a_prompt_expected_to_be_long_goes_to_the_tail_unbegun(model: Path) -> None:
    asked = [p.model_copy(update={"row": n}) for n, p in enumerate(prompts("1+1=", "2+2="))]
    with running(model) as published:
        config = generator(model, segment_tokens=20, tail_replicas=1)
        context = current()
        shelf = Shelf(lengths={1: 21})
        two = [replace(context, replicas=2, replica=k) for k in range(2)]
        with entered(two[0]):
            await one_replica(config, asked, published, shelf)
        assert [(c.prompt.id, c.responses) for c in shelf.put_back if not c.responses] == [("p1", ())]
        assert not shelf.no_prompts
        tail = Shelf(*shelf.put_back)
        with entered(two[1]):
            found = await one_replica(config, (), published, tail)
    assert tail.no_prompts
    assert "p1" in {g.prompt.id for g in kept(found)} | {c.prompt.id for c in tail.put_back}


@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        (Stragglers(segment_tokens=24), "segment_tokens=24 is never reached with sampling.max_new_tokens=24"),
        (Stragglers(tail_replicas=1), "tail_replicas=1 would have nothing to do"),
        (Stragglers(segment_tokens=8, tail_replicas=1), "tail_replicas=1 of 1 replicas leave none"),
    ],
)
def test_check_refuses_policies_that_can_do_nothing(model: Path, policy: Stragglers, problem: str) -> None:
    config = Generator(model=str(model), sampling=Sampling(max_new_tokens=24), stragglers=policy)
    assert any(problem in line for line in config.problems(Alone()))


def response(*, tokens: int = 1, version: int = 0, logprob: float = -0.5) -> Response:
    return Response(
        tokens=np.zeros(tokens, np.int32),
        logprobs=np.full(1, logprob, np.float32),
        versions=np.full(1, version, np.int32),
    )


def test_a_response_needs_a_version_and_a_finite_log_probability_for_every_token() -> None:
    assert response().finish is None
    with pytest.raises(ValueError, match="needs a finite log-probability and a version"):
        response(logprob=float("nan"))
    with pytest.raises(ValueError, match="needs a finite log-probability and a version"):
        response(version=-1)
    with pytest.raises(ValueError, match="unequal lengths: tokens 2"):
        response(tokens=2)


def test_the_backlog_holds_what_the_tail_works_on_and_as_much_again(model: Path) -> None:
    assert generator(model).puts_back() == 0
    assert generator(model, slots=12, segment_tokens=8, tail_replicas=2).puts_back() == 2 * 2 * 4
    assert generator(model, segment_tokens=8).puts_back() > 10_000  # the graph limits it
