"""The generator component on a real tiny model and real weight plane, driven without a broker."""

# pyright: reportUnknownMemberType=false
# torch is annotated only in part.

from __future__ import annotations

import asyncio
from collections.abc import Generator as Yields
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
import torch

from arriero.components.generator import Generator
from arriero.components.group_decoding import request_seed
from arriero.components.sampling import Sampling
from arriero.components.training import load_policy
from arriero.engine.runtime.context import Context, entered
from arriero.engine.stream import Stream
from arriero.engine.weights import WeightSender, destroy
from arriero.schemas.messages import Dropped, Prompt, RolloutGroup, Weights
from tests.drive import Alone, dropped, kept, stream
from tests.tiny_models import save_tiny_llama


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_llama(tmp_path / "tiny", hidden=16, layers=1, seed=2)


class Published:
    """A loop with its weight plane: `versions` of a model whose output layer is scaled, newest last."""

    def __init__(self, model: Path, context: Context) -> None:
        self.state = load_policy(model)[0].state_dict()
        self.sender = WeightSender(context.weights_url, self.state, slots=4)
        self.newest: list[Weights] = []
        self.scheduled: dict[int, int] = {}  # number of the poll -> version published in it
        self._polls = 0
        self._arrived = asyncio.Event()

    def publish(self, version: int, scale: float) -> None:
        changed = {n: t * scale if n == "lm_head.weight" else t for n, t in self.state.items()}
        manifest = self.sender.publish(version, changed)
        self.last = Weights(version=version, manifest=manifest)
        self.newest.append(self.last)
        self._arrived.set()

    def stream(self) -> Stream[Weights]:
        return Stream("weights", Weights, self)

    async def next(self) -> Weights | None:
        while not self.newest:
            self._arrived.clear()
            await self._arrived.wait()
        return self.poll()

    def poll(self) -> Weights | None:
        self._polls += 1
        if (version := self.scheduled.pop(self._polls, None)) is not None:
            self.publish(version, 0.5)
        newest, self.newest = self.newest[-1:], []
        return newest[0] if newest else None

    async def at(self, version: int) -> Weights:
        return next(w for w in self.newest if w.version == version)


@contextmanager
def running(model: Path, counted: dict[str, int] | None = None) -> Yields[Published, None, None]:
    """Inside, the generator's context is current, and its loop has version 0."""

    def count(name: str, number: int) -> None:
        if counted is not None:
            counted[name] = counted.get(name, 0) + number

    context = Context(
        run_id=f"test-{uuid4().hex[:8]}", run_dir=Path(), node="generator", replica=0, rank=0, ranks=1,
        seed=5, deterministic=False, staleness=1, loop="weights", count=count,
    )  # fmt: skip
    try:
        with entered(context):
            published = Published(model, context)
            published.publish(0, 1.0)
            yield published
            published.sender.close()
    finally:
        destroy(context.weights_url)


def prompts(*texts: str) -> list[Prompt]:
    return [Prompt(id=f"p{n}", text=text, origins=(n,)) for n, text in enumerate(texts)]


async def collect(
    generator: Generator, given: Sequence[Prompt], published: Published
) -> list[RolloutGroup | Dropped]:
    return [out async for out in generator.run(stream(given, Prompt), published.stream())]


def behaviour(model: Path, group: RolloutGroup, temperature: float) -> Iterator[np.ndarray]:
    """Log-probabilities of the sampled tokens under the model, by a plain forward pass per rollout."""
    policy, _ = load_policy(model)
    for rollout in group.rollouts:
        ids = torch.from_numpy(rollout.tokens.astype(np.int64))[None]
        with torch.no_grad():
            logits = policy(input_ids=ids).logits[0, :-1] / temperature
        own = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy()
        yield own[rollout.mask[1:]]


@pytest.mark.parametrize("temperature", [0.6, 1.0])
async def test_log_probabilities_are_those_of_the_trainers_forward(model: Path, temperature: float) -> None:
    generator = Generator(
        model=str(model), samples=3, slots=7, sampling=Sampling(max_new_tokens=9, temperature=temperature)
    )
    with running(model) as published:
        groups = kept(await collect(generator, prompts("12+3=", "7", "400*20=", "9-"), published))
    assert sorted(g.prompt.id for g in groups) == ["p0", "p1", "p2", "p3"]
    for group in groups:
        assert len(group.rollouts) == 3
        for rollout, want in zip(group.rollouts, behaviour(model, group, temperature), strict=True):
            assert np.abs(rollout.logprobs[rollout.mask] - want).max() < 1e-4
            assert (rollout.versions[rollout.mask] == 0).all()
            assert rollout.temperature == temperature


async def test_new_weights_are_taken_between_decoding_steps(model: Path) -> None:
    generator = Generator(
        model=str(model), samples=2, slots=2, sampling=Sampling(max_new_tokens=300, stop=())
    )
    with running(model) as published:
        published.scheduled = {6: 1}
        groups = kept(await collect(generator, prompts("1+1=", "2+2="), published))
    spans = [r.versions[r.mask] for g in groups for r in g.rollouts]
    assert all((np.diff(span) >= 0).all() for span in spans)
    # The first two sequences began under version 0; what went on after the sixth poll did so under version 1.
    assert any({0, 1} == set(span.tolist()) for span in spans)
    assert set(spans[-1].tolist()) == {1}


async def publish_soon(published: Published) -> None:
    await asyncio.sleep(0.3)
    await asyncio.to_thread(published.publish, 1, 0.5)


async def test_a_prompt_waits_for_the_version_it_was_admitted_for(model: Path) -> None:
    generator = Generator(model=str(model), samples=2, slots=2, sampling=Sampling(max_new_tokens=4))
    late = Prompt(id="late", text="1+1=", min_version=1)
    with running(model) as published:
        publishing = asyncio.create_task(publish_soon(published))
        (group,) = kept(await collect(generator, [late], published))
        await publishing
    assert all((r.versions[r.mask] == 1).all() for r in group.rollouts)


async def test_a_prompt_longer_than_the_context_is_dropped_and_the_others_go_on(model: Path) -> None:
    generator = Generator(
        model=str(model), samples=2, slots=4, context=16, sampling=Sampling(max_new_tokens=4)
    )
    with running(model) as published:
        out = await collect(generator, prompts("1+1=", "1" * 13, "1" * 12, ""), published)
    assert [(d.parent, d.reason) for d in dropped(out)] == [("p1", "too_long"), ("p3", "invalid")]
    assert "13 prompt tokens" in dropped(out)[0].detail
    assert sorted(g.prompt.id for g in kept(out)) == ["p0", "p2"]


async def test_a_group_that_takes_too_long_is_dropped_and_its_slots_are_free_again(model: Path) -> None:
    generator = Generator(
        model=str(model), samples=2, slots=2, sampling=Sampling(max_new_tokens=400), group_timeout_s=1e-6
    )
    with running(model) as published:
        out = await collect(generator, prompts("1+1=", "2+2="), published)
    assert [(d.parent, d.reason) for d in dropped(out)] == [("p0", "group_timeout"), ("p1", "group_timeout")]


async def test_rollouts_without_finite_log_probabilities_are_counted_and_never_zero(model: Path) -> None:
    counted: dict[str, int] = {}
    generator = Generator(model=str(model), samples=3, slots=3, sampling=Sampling(max_new_tokens=4))
    with running(model, counted) as published:
        published.publish(1, float("nan"))
        (out,) = await collect(generator, prompts("1+1="), published)
    assert isinstance(out, Dropped)
    assert out.reason == "invalid"
    assert counted["invalid_rollouts"] == 3


def test_seeds_of_requests_depend_on_run_prompt_and_sample_only() -> None:
    seeds = {request_seed(run, prompt, n) for run in range(3) for prompt in ("a", "b") for n in range(4)}
    assert len(seeds) == 24
    assert request_seed(1, "a", 2) == request_seed(1, "a", 2)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_check_refuses_what_the_model_cannot_hold(model: Path, tmp_path: Path) -> None:
    def problems(generator: Generator) -> str:
        return "\n".join(generator.problems(Alone()))

    assert problems(Generator(model=str(model))) == ""
    assert "no room for a prompt" in problems(
        Generator(model=str(model), sampling=Sampling(max_new_tokens=512))
    )
    assert "samples=8" in problems(Generator(model=str(model), slots=4))
    assert "made for 512 tokens; use at most 512" in problems(Generator(model=str(model), context=513))
    assert "is not a model directory" in problems(Generator(model=str(tmp_path / "missing")))
    (tmp_path / "empty").mkdir()
    assert "config.json is missing" in problems(Generator(model=str(tmp_path / "empty")))


async def test_a_prompt_that_is_trained_on_has_a_greedy_rollout_besides(model: Path) -> None:
    generator = Generator(
        model=str(model), samples=2, slots=3, greedy_baseline=True, sampling=Sampling(max_new_tokens=4)
    )
    asked = prompts("12+3=", "7")
    held_out = asked[1].model_copy(update={"split": "eval"})
    with running(model) as published:
        groups = {g.prompt.id: g for g in kept(await collect(generator, [asked[0], held_out], published))}
    assert [r.greedy for r in groups["p0"].rollouts] == [False, False, True]
    assert [r.greedy for r in groups["p1"].rollouts] == [False, False]
    greedy, policy = groups["p0"].rollouts[2], load_policy(model)[0]
    with torch.no_grad():
        likeliest = (
            policy(input_ids=torch.from_numpy(greedy.tokens.astype(np.int64))[None]).logits[0].argmax(-1)
        )
    assert likeliest[:-1].numpy()[greedy.mask[1:]].tolist() == greedy.tokens[greedy.mask].tolist()
