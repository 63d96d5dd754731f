"""A toy generator that works in segments of one token, and its graph."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator

import numpy as np
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.engine.backlog import NO_BACKLOG, Backlog, either
from arriero.engine.graph import Graph
from arriero.engine.runtime import current
from arriero.engine.stream import Stream
from arriero.schemas.continuations import Continuation, Response
from arriero.schemas.graph import GraphSpec
from arriero.schemas.messages import Dropped, Prompt, Rollout, RolloutGroup, Weights
from tests.runtime_runs import (
    Moody,
    Noting,
    Prompts,
)
from tests.toys import ToyCollect

# By run: which replicas worked on a prompt, segment by segment.
WORKERS: defaultdict[str, defaultdict[str, list[int]]] = defaultdict(lambda: defaultdict(list))


@dataclass(frozen=True, kw_only=True)
class Segmented:
    """Samples `row % most + 1` tokens for a prompt, and offers it to all replicas after each of them.

    Every `drop_every`-th row is dropped after its first token. The last `tail` replicas take no prompts.
    """

    most: PositiveInt = 3
    seconds: NonNegativeFloat = 0.0
    drop_every: NonNegativeInt = 0
    replicas: PositiveInt = 1
    tail: NonNegativeInt = 0

    def puts_back(self) -> int:
        return 100

    async def run(
        self, prompts: Stream[Prompt], weights: Stream[Weights], backlog: Backlog = NO_BACKLOG
    ) -> AsyncIterator[RolloutGroup | Dropped]:
        version = (await weights.next() or Weights(version=0)).version
        if current().replica >= self.replicas - self.tail:
            await backlog.refuse_prompts()
        while records := await either(prompts, backlog):
            for record in records:
                last = await self._segment(record, version)
                version = (weights.poll() or Weights(version=version)).version
                while version < last.prompt.min_version:
                    version = (await weights.next() or Weights(version=version)).version
                tokens = last.prompt.row % self.most + 1
                if self.drop_every and last.prompt.row % self.drop_every == 2:
                    yield Dropped(parent=last.prompt.id, reason="invalid", detail="as told")
                    continue
                while last.num_tokens < tokens and not await backlog.put(last):
                    last = await self._segment(last, version)
                if last.num_tokens >= tokens:
                    yield group(last)

    async def _segment(self, record: Prompt | Continuation, version: int) -> Continuation:
        last = record if isinstance(record, Continuation) else Continuation(prompt=record)
        WORKERS[current().run_id][last.prompt.id].append(current().replica)
        await asyncio.sleep(random.uniform(0, self.seconds))
        before: list[int] = last.responses[0].versions.tolist() if last.responses else []
        versions = np.array([*before, max(version, last.prompt.min_version)], np.int32)
        size = len(versions)
        response = Response(
            tokens=np.arange(size, dtype=np.int32),
            logprobs=np.full(size, -0.5, np.float32),
            versions=versions,
        )
        return Continuation(prompt=last.prompt, responses=(response,))


def group(last: Continuation) -> RolloutGroup:
    (response,) = last.responses
    size = response.tokens.size
    rollout = Rollout(
        tokens=np.append(np.int32(7), response.tokens),
        mask=np.arange(size + 1) > 0,
        logprobs=np.append(np.float32(np.nan), response.logprobs),
        versions=np.append(np.int32(-1), response.versions),
        text="",
        finish="stop",
    )
    return RolloutGroup(prompt=last.prompt, rollouts=(rollout,))


SEGMENTED, EIGHT = Segmented(), Noting(steps=8)


def graph(
    generator: Segmented = SEGMENTED,
    *,
    staleness: int = 1,
    groups: int = 4,
    prompts: Prompts = Prompts(),  # noqa: B008  # frozen
    trainer: Noting = EIGHT,
) -> GraphSpec:
    g = Graph("segments")
    weights = g.loop(Weights, staleness=staleness)
    asked = g.add(prompts, name="prompts")()
    rollouts = g.add(generator, name="generator", replicas=generator.replicas)(asked, weights)
    scored = g.add(Moody(), name="reward")(rollouts)
    batches = g.add(ToyCollect(groups=groups), name="collect")(scored)
    weights.close(g.add(trainer, name="trainer")(batches))
    return g.check()
