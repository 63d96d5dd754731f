"""Whoever starts when training is over: its weights may be gone with the trainer, and all end well."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from arriero.components.compute import ComputeThread
from arriero.components.optimizer import AdamW
from arriero.components.weight_intake import WeightIntake
from arriero.engine.codec import encode
from arriero.engine.memory import MemoryBroker
from arriero.engine.runtime import run_role
from arriero.engine.runtime.versions import LoopSource
from arriero.engine.runtime.waits import NodeClock
from arriero.engine.stream import Stream
from arriero.engine.weights import SenderGone, WeightReceiver, WeightSender
from arriero.launchers.hub import declare
from arriero.launchers.launch import inline
from arriero.launchers.options import LaunchOptions
from arriero.launchers.resuming import fill_ledger, go_on
from arriero.launchers.rundir import RunDir, create
from arriero.pipelines.aipo import AIPOConfig, aipo
from arriero.schemas.graph import GraphSpec
from arriero.schemas.ledger import Trained
from arriero.schemas.messages import Prompt, Weights
from arriero.schemas.run import RunOptions
from tests.inline_runs import peaked_model, policy_gradient_fields
from tests.runtime_runs import read

torch.set_num_threads(1)
SECRET = b"of this run"
TENSORS = {"weight": torch.arange(6.0)}


def opened(transport: Any = "gloo") -> WeightSender:
    return WeightSender("", TENSORS, transport=transport, secret=SECRET, lease_timeout_s=0.3)


class Receives:
    """Takes weights as an engine does, in place and verified."""

    def __init__(self) -> None:
        self.version = -1
        self.receiver = WeightReceiver("generator-0", SECRET)

    def prepare(self, weights: Weights) -> None: ...

    def load(self, weights: Weights) -> None:
        assert weights.manifest is not None
        self.receiver.receive(weights.manifest, {"weight": torch.zeros(6)})
        self.version = weights.version


class Training:
    """A loop of weights, its sender and its end."""

    def __init__(self) -> None:
        self.broker, self.over = MemoryBroker(), asyncio.Event()
        self.source = LoopSource(
            self.broker, "loop-weights", Weights, name="loop weights",
            clock=NodeClock("generator", bound_s=20), keep=3, over=self.over,
        )  # fmt: skip
        self.stream: Stream[Weights] = Stream("weights", Weights, self.source)

    async def announce(self, sender: WeightSender, version: int, name: str) -> None:
        manifest = sender.publish(version, TENSORS)
        announced = Weights(id=name, version=version, manifest=manifest)
        await self.broker.append("loop-weights", name, encode(announced))


async def begun() -> Training:
    training = Training()
    await training.broker.declare([], ["loop-weights"])
    training.source.start()
    return training


async def test_without_weights_to_be_had_a_generator_that_comes_late_leaves() -> None:
    training, sender, work = await begun(), opened(), Receives()
    await training.announce(sender, 4, "v4")
    sender.close()
    with ComputeThread("test") as compute:
        intake = WeightIntake(training.stream, work, compute, beside=False)
        beginning = asyncio.create_task(intake.begin())
        await asyncio.sleep(0.1)
        assert not beginning.done()  # the trainer may have died, and come back
        training.over.set()
        assert not await asyncio.wait_for(beginning, 10)
        await intake.close()
    await training.source.stop()


async def test_a_generator_takes_the_weights_that_a_restarted_trainer_announces_anew() -> None:
    training, first, second, work = await begun(), opened(), opened(), Receives()
    await training.announce(first, 4, "v4")
    first.close()
    with ComputeThread("test") as compute:
        intake = WeightIntake(training.stream, work, compute, beside=False)
        beginning = asyncio.create_task(intake.begin())
        await asyncio.sleep(0.1)
        await training.announce(second, 4, "v4~1")
        assert await asyncio.wait_for(beginning, 10)
        assert work.version == 4
        await intake.close()
    work.receiver.close()
    second.close()
    await training.source.stop()


@pytest.mark.parametrize("exactly", [False, True])
async def test_a_prompt_of_a_version_that_is_gone_goes_no_further(exactly: bool) -> None:
    training, first, second, work = await begun(), opened(), opened(), Receives()
    await training.announce(first, 4, "v4")
    with ComputeThread("test") as compute:
        intake = WeightIntake(training.stream, work, compute, beside=False)
        assert await intake.begin()
        await training.announce(second, 5, "v5")
        second.close()
        training.over.set()
        ready = intake.exactly_for if exactly else intake.ready_for
        dropped = await asyncio.wait_for(ready(Prompt(id="p", text="?", min_version=5)), 10)
        assert dropped is not None
        assert (dropped.reason, work.version) == ("end_of_run", 4)
        for version, why in ((5, "can't be had any more"), (6, "was never made; the newest is 5")):
            asked = Prompt(id="h", text="?", split="eval", min_version=version)
            held_out = await asyncio.wait_for(intake.ready_for(asked), 10)
            assert held_out is not None
            assert held_out.reason == "stale"
            assert why in held_out.detail
        assert await intake.ready_for(Prompt(id="q", text="?", min_version=4)) is None
        await intake.close()
    work.receiver.close()
    first.close()
    await training.source.stop()


def test_who_made_no_step_waits_for_the_first_who_comes() -> None:
    sender = WeightSender("", TENSORS, transport="gloo", secret=SECRET, lease_timeout_s=30)
    manifest = sender.publish(4, TENSORS)
    closing = threading.Thread(target=lambda: sender.close(somebody_comes=True))
    closing.start()
    receiver, into = WeightReceiver("generator-0", SECRET), {"weight": torch.zeros(6)}
    receiver.receive(manifest, into)
    assert torch.equal(into["weight"], TENSORS["weight"])
    receiver.close()
    closing.join(10)
    assert not closing.is_alive()
    with pytest.raises(SenderGone):
        WeightReceiver("generator-1", SECRET).receive(manifest, into)


async def resumed(spec: GraphSpec, options: RunOptions, run: RunDir) -> list[int]:
    """Go on with the trainer alone, and then with all others; the versions that the ledger tells of."""
    go_on(spec, options, run)
    hub = MemoryBroker()
    await declare(hub, spec, options)
    await fill_ledger(hub, run)

    async def role(name: str) -> None:
        broker = hub.connect()
        await run_role(spec, options, role=name, replica=0, run_dir=run.path, broker=broker)
        await broker.close()

    async with asyncio.timeout(60):
        await role("trainer")
        async with asyncio.TaskGroup() as others:
            for name in spec.roles.keys() - {"trainer"}:
                others.create_task(role(name))
    return [e.version for e in (await read(hub)).events if isinstance(e, Trained)]


@pytest.mark.parametrize(("staleness", "deterministic"), [(1, False), (0, True)])
def test_a_job_that_starts_again_after_its_last_step_ends_well_though_its_weights_are_gone(
    staleness: int, deterministic: bool, tmp_path: Path
) -> None:
    """The trainer is first and has left when the others come, as when their node is slower."""
    fields = policy_gradient_fields(
        tmp_path,
        model=peaked_model(tmp_path / "peaked"),
        steps=2,
        optimizer=AdamW(lr=0.01),
        staleness=staleness,
        weights={"transport": "gloo", "lease_timeout_s": 0.5},
    )
    spec = aipo(AIPOConfig(**fields)).check()
    run = create(tmp_path / "run")
    options = RunOptions(run_id=tmp_path.name, seed=7, wait_bound_s=30, deterministic=deterministic)
    assert inline(spec, options, run, LaunchOptions(quiet=True)) == 0
    assert asyncio.run(resumed(spec, options, run)) == [1, 2]
