"""Evaluations while training goes on: each of exactly one version, and nobody waits for it."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch

from arriero.components.compute import ComputeThread
from arriero.components.evaluation_lane import EvaluationLane, beside
from arriero.components.generator import Generator
from arriero.components.group_decoding import GroupDecoding
from arriero.components.policy import load_model
from arriero.components.prompts import PromptSource
from arriero.components.rewards import Function
from arriero.components.vllm_options import VLLMOptions
from arriero.components.weight_intake import WeightIntake
from arriero.engine.codec import encode
from arriero.engine.memory import MemoryBroker
from arriero.engine.runtime.context import weights_url
from arriero.engine.runtime.role import run_role
from arriero.engine.runtime.versions import LoopSource
from arriero.engine.runtime.waits import NodeClock
from arriero.engine.stream import Stream
from arriero.engine.weights import WeightSender, destroy
from arriero.engine.weights.layout import StaleWeights
from arriero.pipelines.aipo import AIPOConfig, aipo
from arriero.schemas.ledger import DroppedEvent, Evaluated, Event, Trained
from arriero.schemas.messages import Dropped, Prompt, Rollout, Weights
from tests import places
from tests.brokers import Engine
from tests.engines import needs_vllm, state_of
from tests.inline_runs import peaked_model, policy_gradient_fields
from tests.runtime_runs import declare, options, read

torch.set_num_threads(1)
SAMPLED: defaultdict[str, list[tuple[Prompt, Rollout]]] = defaultdict(list)


def noted(prompt: Prompt, rollout: Rollout) -> float:
    """Keeps what was sampled of held-out prompts, by the folder of the run."""
    if prompt.split == "eval":
        SAMPLED[str(prompt.metadata["run"])].append((prompt, rollout))
    return rollout.text.count("3") / 5


def held_out(path: Path, number: int) -> str:
    """A file of `number` prompts."""
    file = path / "held_out.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": f"{a}*3=", "run": str(path)}) + "\n" for a in range(number))
    )
    return str(file)


async def play(path: Path, engine: Engine, /, *, wait_bound_s: float = 60.0, **fields: Any) -> list[Event]:
    """The ledger of a run of AIPO on real models, each role with a connection of its own."""
    fields = policy_gradient_fields(path, model=peaked_model(path / "peaked"), **fields)
    spec = aipo(AIPOConfig(**fields)).check()
    opts = options(engine.run, wait_bound_s=wait_bound_s, heartbeat_s=1.0)
    owner = await declare(spec, opts, engine)

    async def replica(role: str, number: int) -> None:
        broker = await engine.connect()
        try:
            await run_role(spec, opts, role=role, replica=number, run_dir=path, broker=broker)
        finally:
            await broker.close()

    try:
        async with asyncio.TaskGroup() as roles:
            for role, nodes in spec.roles.items():
                for k in range(nodes[0].replicas):
                    roles.create_task(replica(role, k))
    finally:
        destroy(weights_url(engine.run, "weights"))
    return (await read(owner)).events


def rounds(events: list[Event]) -> dict[int, list[int]]:
    """By version: where in the ledger its held-out prompts came back."""
    found: dict[int, list[int]] = {}
    for place, event in enumerate(events):
        if isinstance(event, Evaluated):
            found.setdefault(event.version, []).append(place)
    return found


@pytest.mark.parametrize(
    ("engine", "by", "transport"),
    [("memory", "own", "gloo"), ("nats", "auto", "shm"), ("nats", "same", "shm")],
    indirect=["engine"],
)
async def test_an_evaluation_is_of_one_version_while_training_goes_on(
    engine: Engine, by: str, transport: str, tmp_path: Path
) -> None:
    """Two steps take less time than the held-out prompts: sampled by the newest weights they would mix."""
    data = PromptSource(
        path=str(tmp_path / "sums.jsonl"), eval_path=held_out(tmp_path, 64), eval_every=2, overlap="allow"
    )
    judge = Function(function=noted, isolate=False)
    fields: dict[str, Any] = {
        "data": data,
        "reward": judge,
        "steps": 12,
        "staleness": 2,
        "groups_per_step": 2,
        "evaluation_engine": by,
        "weights": {"transport": transport},
    }
    events = await play(tmp_path, engine, **fields, samples=4, slots=16, generators=2)
    back = rounds(events)
    assert {*back} >= {0, 12}
    assert all(version % 2 == 0 for version in back)
    assert len(back) >= 3  # at least one of them during training
    assert {len(places) for places in back.values()} == {64}
    assert not [e for e in events if isinstance(e, DroppedEvent) and min(e.origins) < 0]
    if by != "same":
        steps = [place for place, e in enumerate(events) if isinstance(e, Trained)]
        during = [v for v, places in back.items() if any(min(places) < step < max(places) for step in steps)]
        assert during, "no step was taken while an evaluation went on"
    sampled = SAMPLED.pop(str(tmp_path))
    for prompt, rollout in sampled:
        assert {*rollout.versions[rollout.mask].tolist()} == {prompt.min_version}
    # That the label is true: the last version lies in the run's directory.
    last = [rollout for prompt, rollout in sampled if prompt.min_version == 12]
    assert len(last) == 64 * 4
    model = load_model(str(tmp_path / "model"))
    for rollout in last[::8]:
        tokens = torch.tensor(rollout.tokens.tolist())
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1].float().log_softmax(-1)
        own = logits.gather(1, tokens[1:, None])[:, 0].numpy()
        np.testing.assert_allclose(own[rollout.mask[1:]], rollout.logprobs[rollout.mask], atol=1e-4)


class Tokens:
    """Real bookkeeping in small: prompts under way, and the version of each of their tokens."""

    def __init__(self, *, gone: int = -1) -> None:
        self.version, self._gone = -1, gone
        self.held = False  # whether a change of weights would be wrong
        self._open: dict[str, list[int]] = {}
        self.done: list[tuple[str, list[int]]] = []

    @property
    def has_room(self) -> bool:
        return len(self._open) < 2

    @property
    def idle(self) -> bool:
        return not self._open

    def prepare(self, weights: Weights) -> None:
        """Everything is done by `load`."""

    def load(self, weights: Weights) -> None:
        assert not self.held, f"version {weights.version} in the middle of an evaluation"
        if weights.version == self._gone:
            self.version = -1
            raise StaleWeights("overwritten")
        self.version = weights.version

    def add(self, prompt: Prompt, /) -> None:
        self._open[prompt.id] = []

    def step(self) -> list[Dropped]:
        for versions in self._open.values():
            versions.append(self.version)
        ended = {name: v for name, v in self._open.items() if len(v) == 3}
        self.done += ended.items()
        for name in ended:
            del self._open[name]
        return []

    def close(self) -> None:
        self._open.clear()


class Announced:
    """A loop that has announced versions 0 to 9; version 0 is no longer kept."""

    async def next(self) -> Weights | None:
        raise AssertionError("nobody waits for a newer one")

    def poll(self) -> Weights | None:
        return Weights(version=9)

    async def at(self, version: int) -> Weights:
        if not version:
            raise LookupError("version 0 is no longer kept")
        return Weights(version=version)


async def played(work: Tokens, *asked: tuple[str, int]) -> list[Dropped]:
    """What a lane gives back of prompts, by name and version."""
    out: list[Dropped] = []
    with ComputeThread("test") as compute:
        loop = Stream("weights", Weights, Announced())
        lane: EvaluationLane[Dropped] = EvaluationLane(loop, compute, lambda: work)
        for name, version in asked:
            assert lane.takes(Prompt(id=name, text="?", split="eval", min_version=version))
        while lane.busy:
            out += await lane.step()
        await lane.close()
    return out


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["memory"], indirect=True)
async def test_two_engines_of_vllm_in_one_process_sample_each_its_version(
    engine: Engine, tmp_path: Path
) -> None:
    data = PromptSource(
        path=str(tmp_path / "sums.jsonl"), eval_path=held_out(tmp_path, 6), eval_every=2, overlap="allow"
    )
    fields: dict[str, Any] = {
        "data": data,
        "reward": Function(function=noted, isolate=False),
        "steps": 4,
        "staleness": 1,
        "groups_per_step": 2,
        "engine": "vllm",
        "evaluation_engine": "own",
        "vllm": VLLMOptions(kv_cache_bytes=32 << 20, memory_share=0.4),
        "kv_cache": "recompute",
    }
    events = await play(tmp_path, engine, **fields, samples=2, slots=8, wait_bound_s=500.0)
    assert {len(places) for places in rounds(events).values()} == {6}
    assert {*rounds(events)} >= {0, 4}
    sampled = SAMPLED.pop(str(tmp_path))
    for prompt, rollout in sampled:
        assert {*rollout.versions[rollout.mask].tolist()} == {prompt.min_version}


async def test_a_lane_takes_the_next_version_only_when_an_evaluation_is_over() -> None:
    work = Tokens()
    asked = [("a", 2), ("b", 2), ("c", 2), ("d", 4), ("e", 4)]
    assert await played(work, *asked) == []
    assert work.done == [(name, [version] * 3) for name, version in asked]


async def test_prompts_whose_version_is_gone_are_dropped_and_never_sampled_by_another() -> None:
    work = Tokens(gone=2)
    dropped = await played(work, ("a", 2), ("b", 2), ("c", 4))
    assert [(d.parent, d.reason) for d in dropped] == [("a", "stale"), ("b", "stale")]
    assert "version 2 can't be had any more: overwritten" in dropped[0].detail
    assert work.done == [("c", [4] * 3)]


async def followed(*versions: int) -> tuple[MemoryBroker, LoopSource, Stream[Weights]]:
    """A loop that has announced these."""
    broker = MemoryBroker()
    await broker.declare([], ["loop-weights"])
    for version in versions:
        announced = Weights(id=f"v{version}", version=version)
        await broker.append("loop-weights", announced.id, encode(announced))
    clock = NodeClock("generator", bound_s=5)
    source = LoopSource(broker, "loop-weights", Weights, name="loop weights", clock=clock, keep=3)
    source.start()
    return broker, source, Stream("weights", Weights, source)


async def test_after_an_evaluation_of_an_older_version_prompts_get_the_newest_again() -> None:
    """A generator that was started again while an evaluation was under way: the newest came before it."""
    _, source, loop = await followed(0, 1, 2, 3)
    work = Tokens()
    with ComputeThread("test") as compute:
        intake = WeightIntake(loop, work, compute, beside=False)
        await intake.reach(0)
        assert work.version == 3
        assert await intake.ready_for(Prompt(id="h", text="?", split="eval", min_version=1)) is None
        assert work.version == 1
        trained = Prompt(id="t", text="?", min_version=2)
        assert await asyncio.wait_for(intake.ready_for(trained), 2) is None
        assert work.version == 3
        await intake.hold(1)
        await intake.follow()
        assert work.version == 3
        await intake.close()
    await source.stop()


async def test_a_version_that_arrives_during_an_evaluation_waits_for_its_end() -> None:
    broker, source, loop = await followed(0, 1)
    work = Tokens()
    with ComputeThread("test") as compute:
        intake = WeightIntake(loop, work, compute, beside=True)
        await intake.reach(1)
        work.held = True
        await broker.append("loop-weights", "v2", encode(Weights(id="v2", version=2)))
        await asyncio.sleep(0.05)
        await intake.follow()  # begins to receive it
        for name in "ab":
            asked = Prompt(id=name, text="?", split="eval", min_version=1)
            assert await intake.ready_for(asked) is None
        work.held = False
        while work.version < 2:
            await intake.follow()
            await asyncio.sleep(0.01)
        await intake.close()
    await source.stop()


def test_the_second_engine_is_told_apart_by_who_sends_the_weights(tmp_path: Path) -> None:
    """Of two readers of one name the sender would know one lease only, and overwrite what the other reads."""
    directory = peaked_model(tmp_path / "peaked")
    tensors = state_of(load_model(directory))
    url, config = f"shm://test-{uuid4().hex}", Generator(model=directory, samples=1, slots=1)
    sender = WeightSender(url, tensors)
    try:
        weights = Weights(version=0, manifest=sender.publish(0, tensors))
        both = [
            GroupDecoding(config, places.place(run_dir=tmp_path)),
            GroupDecoding(config, beside(places.place(run_dir=tmp_path))),
        ]
        for work in both:
            work.load(weights)
        assert len(sender.shards.report(0, timeout_s=5).taken) == 2
        for work in both:
            work.close()
        sender.close()
    finally:
        destroy(url)


def test_a_lane_takes_nothing_but_evaluations_during_training() -> None:
    with ComputeThread("test") as compute:
        loop = Stream("weights", Weights, Announced())
        lane: EvaluationLane[Dropped] = EvaluationLane(loop, compute, Tokens)
        assert not lane.takes(Prompt(id="first", text="?", split="eval", min_version=0))
        assert not lane.takes(Prompt(id="trained", text="?", min_version=3))
        assert not lane.busy
