"""Records to write down, and a process that writes until it is killed."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic.dataclasses import dataclass

from arriero.components.advantage import GroupAdvantage
from arriero.components.rewards import ExactMatch
from arriero.engine.graph import Evaluation, Graph
from arriero.engine.lineage.spaces import Spaces
from arriero.engine.lineage.writer import LineageWriter, Seen
from arriero.engine.stream import Stream
from arriero.launchers.launch import inline
from arriero.launchers.options import LaunchOptions
from arriero.launchers.rundir import RunDir, create
from arriero.schemas.lineage import Opened, Place
from arriero.schemas.manifest import Hardware, PipelineSource, RunManifest
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
)
from arriero.schemas.run import RunOptions
from tests.toys import ToyTrainer, rollout

OPENED = Opened(run_id="run", graph_digest="graph")


def scored_group(
    number: int, *, size: int = 2, length: int = 12, version: int = 0, same: bool = False
) -> ScoredGroup:
    """Group `number`, always the same: random tokens and log-probabilities, the first rollout right."""
    rng = np.random.default_rng(number)
    prompt = Prompt(
        id=f"p-{number}", origins=(number,), text=f"question {number}", answer="42",
        metadata={"level": number % 3, "tags": ["é", "\n"]}, row=number, min_version=version,
    )  # fmt: skip
    rollouts: list[Rollout] = []
    for k in range(size):
        if same and rollouts:
            rollouts.append(rollouts[0])
            continue
        mask = np.arange(length + k) >= 3
        rollouts.append(
            Rollout(
                tokens=rng.integers(0, 50_000, length + k).astype(np.int32),
                mask=mask,
                logprobs=np.where(mask, -rng.exponential(1, length + k), np.nan).astype(np.float32),
                versions=np.where(mask, version, -1).astype(np.int32),
                text=f"answer {k} of {number}",
                finish="stop" if k else "length",
                temperature=0.7,
                seed=number * 100 + k,
            )
        )
    name = f"p-{number}>generator"
    group = RolloutGroup(
        id=name, parents=(prompt.id,), origins=(number,), prompt=prompt, rollouts=tuple(rollouts)
    )
    scores = [Score(value=float(k == 0), outcome=Outcome.WRONG if k else Outcome.OK) for k in range(size)]
    return ScoredGroup(
        id=f"{name}>reward", parents=(name,), origins=(number,), group=group, scores=tuple(scores),
        reward_version="0123456789abcdef",
    )  # fmt: skip


def batch_of_groups(groups: Sequence[ScoredGroup]) -> Batch:
    """All rollouts of `groups`, with an advantage of their reward minus one half on sampled tokens."""
    samples = tuple(
        Sample(
            group=g.id, tokens=r.tokens, mask=r.mask, logprobs=r.logprobs, versions=r.versions,
            advantages=np.where(r.mask, np.float32(s.value - 0.5), np.float32(0)), temperature=r.temperature,
            reward=s.value, truncated=r.finish == "length", origin=g.origins[0],
        )
        for g in groups
        for r, s in zip(g.group.rollouts, g.scores, strict=True)
    )  # fmt: skip
    return Batch(
        id=f"advantage-{groups[0].id}", parents=tuple(g.id for g in groups),
        origins=tuple(sorted(g.origins[0] for g in groups)), samples=samples,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Talker:
    """Three answers to each prompt, in the toys' way; of prompt k, k % 3 + 1 are right."""

    async def run(self, prompts: Stream[Prompt], weights: Stream[Weights]) -> AsyncIterator[RolloutGroup]:
        newest = await weights.next()
        async for prompt in prompts:
            while newest is not None and newest.version < prompt.min_version:
                newest = await weights.next()
            newest = weights.poll() or newest
            assert newest is not None
            by = prompt.min_version if prompt.split == "eval" else newest.version
            made = [rollout(by, tokens=(7, 8 + prompt.row, 9 + k, 2)) for k in range(3)]
            texts = ["4" if k <= prompt.row % 3 else "5" for k in range(3)]
            yield RolloutGroup(
                prompt=prompt,
                rollouts=tuple(r.model_copy(update={"text": t}) for r, t in zip(made, texts, strict=True)),
            )


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Prompts whose answer is 4, and two held-out ones."""

    async def run(self) -> AsyncIterator[Prompt]:
        for k in range(1000):
            yield Prompt(id=f"e0-r{k}", text=f"2 + 2, for the {k}th time", answer="4", row=k)

    async def evaluation(self) -> Evaluation | None:
        return Evaluation(prompts=[Prompt(id=f"held-{k}", text="1 + 3", answer="4", row=k) for k in range(2)])


def sums_graph(*, steps: int = 4, staleness: int = 1) -> Graph:
    """A graph whose rewards and advantages can be computed again."""
    g = Graph("sums")
    weights = g.loop(Weights, staleness=staleness)
    rollouts = g.add(Talker(), name="talker")(g.add(Sums(), name="sums")(), weights)
    scored = g.add(ExactMatch(), name="reward")(rollouts)
    batches = g.add(GroupAdvantage(groups=4), name="advantage")(scored)
    weights.close(g.add(ToyTrainer(steps=steps), name="trainer")(batches))
    return g


def recorded_run(path: Path, *, seed: int = 0) -> RunDir:
    """A finished run of `sums_graph`, in this process, with its lineage."""
    run, spec = create(path), sums_graph().check()
    options = RunOptions(run_id=path.name, seed=seed, wait_bound_s=60, record=True)
    pipeline = PipelineSource(function="tests.lineage_runs:sums", file=__file__, sha256="0" * 64)
    manifest = RunManifest(
        run_id=path.name, pipeline=pipeline, graph_digest=spec.digest,
        config={"steps": 4, "optimizer": {"lr": 0.1 * (seed + 1)}}, sources={}, seed=seed, python="3",
        platform="linux", hardware=Hardware(cpus=1, memory_mb=1), host="here", pid=1,
        started=datetime(2026, 1, 1, tzinfo=UTC), argv=(),
    )  # fmt: skip
    run.begin(spec, options, manifest)
    assert inline(spec, options, run, LaunchOptions(quiet=True)) == 0
    return run


def overwrite(url: str, space: str, place: Place, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Put other values where some stand in a record."""
    for name, values in arrays.items():

        def made(before: npt.NDArray[Any], values: npt.NDArray[Any] = values) -> npt.NDArray[Any]:
            return values

        Spaces(url).rewrite(f"{space}/{place.part}/{name}", [place], made)


def main(url: str, first: int) -> None:
    """Commit one group after the other, and say its id when it is there for good."""
    writer = LineageWriter(url, OPENED)
    number = first
    while True:
        group = scored_group(number, size=3)
        if not writer.knows("reward", group.id):
            writer.commit([Seen("reward", group)])
            print(group.id, flush=True)
        number += 1


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
