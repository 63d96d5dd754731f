"""A whole graph of toy components that sleep instead of computing; records and rates are the real ones.

prompts -> generator (x2) -> reward -> collect -> trainer -> (back to the generator)
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.engine.errors import UserError
from arriero.engine.graph import Evaluation, Graph, PerRecord, Rates
from arriero.engine.runtime.context import current
from arriero.engine.stream import Stream
from arriero.schemas.graph import Capacity
from arriero.schemas.messages import (
    Batch,
    Outcome,
    Prompt,
    Rollout,
    RolloutGroup,
    Sample,
    Score,
    ScoredGroup,
    Weights,
)  # fmt: skip

Fault = Literal["", "raise", "user", "kill", "stop", "exit", "hang"]


@dataclass(frozen=True, kw_only=True)
class ToyPrompts:
    """`count` prompts, and `held_out` more for evaluation after every `every` versions."""

    count: PositiveInt = 1000
    held_out: NonNegativeInt = 0
    every: NonNegativeInt = 0

    async def evaluation(self) -> Evaluation | None:
        prompts = [Prompt(id=f"held-{k}", text=f"held out {k}", row=k) for k in range(self.held_out)]
        return Evaluation(prompts=prompts) if prompts else None

    def evaluates_every(self) -> int:
        return self.every

    async def run(self) -> AsyncIterator[Prompt]:
        for k in range(self.count):
            yield Prompt(id=f"prompt-{k}", text=f"question {k}", row=k)


@dataclass(frozen=True, kw_only=True)
class ToyGenerator:
    """`size` rollouts per prompt in `seconds`; commits `fault` at its prompt number `fault_at`.

    Replicas that join later commit `guests` before they take anything.
    """

    size: PositiveInt = 2
    text_bytes: PositiveInt = 3
    seconds: NonNegativeFloat = 0.0
    fault: Fault = ""
    fault_at: NonNegativeInt = 3
    guests: Fault = ""

    async def run(self, prompts: Stream[Prompt], weights: Stream[Weights]) -> AsyncIterator[RolloutGroup]:
        if current().replica >= current().replicas:
            _commit(self.guests)
        taken, newest = 0, await weights.next()
        async for prompt in prompts:
            while newest is not None and newest.version < prompt.min_version:
                newest = await weights.next()
            newest = weights.poll() or newest
            assert newest is not None
            if taken == self.fault_at:
                _commit(self.fault)
            taken += 1
            await asyncio.sleep(self.seconds)
            by = prompt.min_version if prompt.split == "eval" else newest.version
            yield RolloutGroup(
                prompt=prompt, rollouts=tuple(rollout(by, self.text_bytes) for _ in range(self.size))
            )


@dataclass(frozen=True, kw_only=True)
class ToyReward(PerRecord[RolloutGroup, ScoredGroup]):
    """The first rollout of a group is right; `bad_row` is the row of a prompt on which it raises."""

    bad_row: int = -1

    def apply(self, record: RolloutGroup) -> ScoredGroup:
        if record.prompt.row == self.bad_row:
            raise ValueError(f"row {self.bad_row} can't be scored")
        scores = [Score(value=1.0, outcome=Outcome.OK), *[Score(value=0.0, outcome=Outcome.WRONG)] * 9]
        return ScoredGroup(group=record, scores=tuple(scores[: len(record.rollouts)]))


@dataclass(frozen=True, kw_only=True)
class ToyCollect:
    """One batch of `groups` scored groups; with `rest` the last one may be smaller."""

    groups: PositiveInt = 4
    rest: bool = False

    def rates(self) -> Rates:
        return Rates(consumes={"scored": self.groups})

    async def run(self, scored: Stream[ScoredGroup]) -> AsyncIterator[Batch]:
        held: list[ScoredGroup] = []
        async for group in scored:
            held.append(group)
            if len(held) == self.groups:
                yield _batch(held)
                held = []
        if held and self.rest:
            yield _batch(held)


def _batch(held: Sequence[ScoredGroup]) -> Batch:
    return Batch(parents=tuple(g.id for g in held), samples=tuple(s for g in held for s in samples(g)))


@dataclass(frozen=True, kw_only=True)
class ToyTrainer:
    """`steps` versions, one per batch, each made in `seconds`; commits `fault` before version `fault_at`.

    With a file `until`, the version that is made when it appears is the last one.
    """

    steps: PositiveInt = 5
    seconds: NonNegativeFloat = 0.0
    until: str = ""
    fault: Fault = ""
    fault_at: PositiveInt = 2
    computes: ClassVar[bool] = True

    def limit(self) -> int | None:
        return self.steps

    def checkpoint_place(self, run_dir: Path, run_id: str, node: str) -> str:
        return ""

    async def run(self, batches: Stream[Batch]) -> AsyncIterator[Weights]:
        made = current().made
        version = made[-1].version if made else 0
        yield Weights(version=version)
        while version < self.steps and not self._told() and await batches.next() is not None:
            version += 1
            if version == self.fault_at:
                _commit(self.fault)
            await asyncio.sleep(self.seconds)
            yield Weights(version=version, metrics={"loss": 1.0 / version, "grad_norm": 0.5})

    def _told(self) -> bool:
        return self.until != "" and Path(self.until).exists()


def toy_graph(
    *,
    prompts: ToyPrompts | None = None,
    generator: ToyGenerator | None = None,
    reward: ToyReward | None = None,
    trainer: ToyTrainer | None = None,
    groups: int = 4,
    generators: int = 1,
    ranks: int = 1,
    staleness: int = 1,
    room: int = 0,
) -> Graph:
    """The graph of the module; `ranks` are those of the trainer, `room` is that of the scored groups."""
    g = Graph("toy")
    weights = g.loop(Weights, staleness=staleness)
    asked = g.add(prompts or ToyPrompts(), name="prompts")()
    rollouts = g.add(generator or ToyGenerator(), name="generator", replicas=generators)(asked, weights)
    capacity = Capacity(messages=room) if room else None
    scored = g.add(reward or ToyReward(), name="reward", capacity=capacity)(rollouts)
    batches = g.add(ToyCollect(groups=groups), name="collect")(scored)
    weights.close(g.add(trainer or ToyTrainer(), name="trainer", ranks=ranks)(batches))
    return g


def rollout(version: int, text_bytes: int = 3, tokens: Sequence[int] = (7, 8, 9, 2)) -> Rollout:
    """One prompt token, then sampled ones with log-probability -0.5; a text of any length."""
    mask = np.array([False, *[True] * (len(tokens) - 1)])
    return Rollout(
        tokens=np.array(tokens, np.int32),
        mask=mask,
        logprobs=np.where(mask, np.float32(-0.5), np.float32(np.nan)),
        versions=np.where(mask, version, -1).astype(np.int32),
        text="x" * text_bytes,
        finish="stop",
    )


def samples(scored: ScoredGroup) -> list[Sample]:
    """The rollouts of a group as samples; the advantage is the reward minus one half."""
    return [
        Sample(
            group=scored.id,
            tokens=r.tokens,
            mask=r.mask,
            advantages=np.full(len(r.tokens), s.value - 0.5, np.float32),
            logprobs=r.logprobs,
            versions=r.versions,
            reward=s.value,
            origin=scored.origins[0],
        )
        for r, s in zip(scored.group.rollouts, scored.scores, strict=True)
    ]


def _commit(fault: Fault) -> None:
    match fault:
        case "raise":
            raise ZeroDivisionError("the toy breaks as it was told to")
        case "user":
            raise UserError("the toy has no model; pass --model PATH")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(0)
        case "hang":
            time.sleep(3600)
        case "":
            pass


def main(how: str, path: Path, setting: dict[str, dict[str, Any]]) -> int:
    """Run a toy graph in `path`; the exit code of the launcher."""
    from arriero.launchers.launch import inline, launch
    from arriero.launchers.options import LaunchOptions
    from arriero.launchers.rundir import create, write_json
    from arriero.schemas.run import RunOptions

    kinds = {"prompts": ToyPrompts, "generator": ToyGenerator, "reward": ToyReward, "trainer": ToyTrainer}
    components: dict[str, Any] = {k: kind(**setting[k]) for k, kind in kinds.items() if k in setting}
    spec = toy_graph(**components, **setting.get("graph", {})).check()
    options = RunOptions(run_id=path.name, heartbeat_s=0.3, **setting.get("options", {}))
    run = create(path)
    write_json(run.graph, spec)
    write_json(run.options, options)
    start = {"launch": launch, "inline": inline}[how]
    return start(spec, options, run, LaunchOptions(**setting.get("launch", {})))


if __name__ == "__main__":
    from tests import toys  # the classes must be importable by the name of this module

    sys.exit(toys.main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])))
