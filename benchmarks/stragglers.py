"""What partial rollouts and straggler policies are worth on responses with a long tail.

    python -m benchmarks.stragglers [--steps 40] [--json]

The real runtime, prompt queue and group decoding run in virtual time; only the engine is emulated. A decoding
step takes 1 + rows / 16 units for all rows together, reading a token of a prompt or of a continued response
0.01. The longest response of a prompt has a log-normal length (median 60 tokens, up to 1024), which comes
again within 30 % in every epoch; its other responses are shorter. Four replicas of 64 slots, four samples a
prompt, 128 prompts a version. All ratios are to the run with every policy off.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from dataclasses import dataclass as plain_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.chat import Chat
from arriero.components.generator import Generator
from arriero.components.group_decoding import GroupDecoding
from arriero.components.prompt_queue import PromptQueue
from arriero.components.rollout_engine import Completion, Request
from arriero.components.sampling import Sampling
from arriero.components.stragglers import Stragglers
from arriero.engine.backlog import NO_BACKLOG, Backlog
from arriero.engine.graph import Graph, GraphView, PerRecord
from arriero.engine.memory import MemoryBroker
from arriero.engine.runtime import Ledger, current, run_role
from arriero.engine.runtime.context import Context
from arriero.engine.runtime.journal import follow_ledger
from arriero.engine.stream import Stream
from arriero.launchers.hub import declare
from arriero.schemas.continuations import Continuation, prompt_of
from arriero.schemas.graph import GraphSpec
from arriero.schemas.ledger import Trained
from arriero.schemas.messages import (
    Batch,
    Dropped,
    Outcome,
    Prompt,
    RolloutGroup,
    Score,
    ScoredGroup,
    Weights,
)
from arriero.schemas.run import RunOptions
from tests.tiny_models import tiny_tokenizer
from tests.toys import ToyCollect
from tests.virtual_time import VirtualLoop

SAMPLES, SLOTS, REPLICAS, GROUPS, ROWS, MOST = 4, 64, 4, 128, 256, 1024
SEGMENT = 256
UNIT_S = 1e-3
POLICIES = {
    "off": Stragglers(),
    "longest first": Stragglers(longest_first=True),
    "segments": Stragglers(segment_tokens=SEGMENT),
    "segments, longest first": Stragglers(segment_tokens=SEGMENT, longest_first=True),
    "segments, tail replica": Stragglers(segment_tokens=SEGMENT, tail_replicas=1),
    "all": Stragglers(segment_tokens=SEGMENT, longest_first=True, tail_replicas=1),
}


def length(row: int, epoch: int, sample: int) -> int:
    """Tokens of one response."""
    typical = np.random.default_rng([row, 7]).lognormal(math.log(60.0), 1.1)
    chance = np.random.default_rng([row, epoch, sample])
    share = 1.0 if sample == 0 else chance.uniform(0.2, 1.0)
    return min(max(int(typical * share * chance.uniform(0.7, 1.3)), 2), MOST)


class EmulatedEngine:
    """Gives each response its length; `owed_s` is the time that the last calls would have taken."""

    def __init__(self) -> None:
        self.version, self.max_length, self.vocabulary, self.receives_beside = 0, MOST + 64, None, False
        self.owed_s = 0.0
        self._left: dict[str, tuple[int, int, bool, list[int]]] = {}  # tokens to come, ends, versions so far

    @property
    def idle(self) -> bool:
        return not self._left

    def room(self) -> int:
        return SLOTS - len(self._left)

    def add(self, requests: Sequence[Request]) -> None:
        for request in requests:
            row, epoch = map(int, request.key.partition("/")[0].split("x"))
            left = length(row, epoch, int(request.key.rpartition("/")[2])) - request.sampled
            now = min(left, request.max_new_tokens or MOST)
            self._left[request.key] = (now, now, now == left, [])
            self.owed_s += 0.01 * len(request.prompt_ids) * UNIT_S

    def cancel(self, key: str) -> None:
        self._left.pop(key, None)

    def step(self) -> list[Completion]:
        self.owed_s += (1 + len(self._left) / 16) * UNIT_S
        done: list[Completion] = []
        for key, (left, size, stops, versions) in tuple(self._left.items()):
            versions.append(self.version)
            self._left[key] = (left - 1, size, stops, versions)
            if left == 1:
                del self._left[key]
                done.append(
                    Completion(
                        key=key,
                        token_ids=np.full(size, 5, np.int32),
                        logprobs=np.full(size, -0.5, np.float32),
                        versions=np.array(versions, np.int32),
                        finish="stop" if stops else "length",
                    )
                )
        return done

    def prepare(self, manifest: object) -> None:
        raise AssertionError("emulated weights have no manifest")

    def take(self, manifest: object) -> None:
        raise AssertionError("emulated weights have no manifest")

    def sleep(self, level: int) -> None:
        """It has no memory to give back."""

    def close(self) -> None:
        self._left.clear()


class EmulatedDecoding(GroupDecoding):
    """The real one on the emulated engine."""

    def __init__(self, config: Generator, context: Context) -> None:
        self.tokenizer: Any = tiny_tokenizer()
        self._config, self._context = config, context
        self._chat = Chat(self.tokenizer, config.chat, model=config.model)
        self._engine = self.emulated = EmulatedEngine()
        self._open = {}
        self._barren = 0


@dataclass(frozen=True, kw_only=True)
class EmulatedGenerator(Generator):
    """The loop of the real one; a step takes the time that the engine owes."""

    def problems(self, view: GraphView) -> list[str]:
        return []

    async def run(
        self, prompts: Stream[Prompt], weights: Stream[Weights], backlog: Backlog = NO_BACKLOG
    ) -> AsyncIterator[RolloutGroup | Dropped]:
        in_tail = current().replica >= current().replicas - self.stragglers.tail_replicas
        queue = PromptQueue(self, prompts, backlog, in_tail=in_tail)
        if in_tail:
            await backlog.refuse_prompts()
        work = EmulatedDecoding(self, current())
        engine = work.emulated
        newest = await weights.next()
        while True:
            newest = weights.poll() or newest
            while (record := queue.next(work.room)) is not None:
                if queue.to_tail(record) and await backlog.put(Continuation(prompt=prompt_of(record))):
                    continue
                while newest is not None and newest.version < prompt_of(record).min_version:
                    newest = await weights.next()
                engine.version = newest.version if newest else 0
                if (refused := work.add(record)) is not None:
                    yield refused
            if work.idle:
                if not await queue.wait():
                    return
                continue
            engine.version = newest.version if newest else 0
            outputs = work.step()
            owed_s, engine.owed_s = engine.owed_s, 0.0
            await asyncio.sleep(owed_s)
            for out in outputs:
                if not isinstance(out, Continuation):
                    yield out
                elif not await backlog.put(out) and (refused := work.add(out)) is not None:
                    yield refused


ADMITTED: dict[str, float] = {}
GENERATED: dict[str, float] = {}


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of the data set, epoch after epoch."""

    async def run(self) -> AsyncIterator[Prompt]:
        epoch = 0
        while True:
            for row in np.random.default_rng(epoch).permutation(ROWS).tolist():
                prompt = Prompt(id=f"{row}x{epoch}", text="12+3=", row=row, epoch=epoch)
                yield prompt
                ADMITTED[prompt.id] = asyncio.get_running_loop().time()
            epoch += 1


@dataclass(frozen=True, kw_only=True)
class Clocked(PerRecord[RolloutGroup, ScoredGroup]):
    """Scores at once, and notes when a group came."""

    def apply(self, record: RolloutGroup) -> ScoredGroup:
        GENERATED[record.prompt.id] = asyncio.get_running_loop().time()
        score = Score(value=1.0, outcome=Outcome.OK)
        return ScoredGroup(group=record, scores=(score,) * len(record.rollouts))


@dataclass(frozen=True, kw_only=True)
class QuickTrainer:
    """A step takes 20 units."""

    steps: PositiveInt

    def limit(self) -> int | None:
        return self.steps

    async def run(self, batches: Stream[Batch]) -> AsyncIterator[Weights]:
        yield Weights(version=0)
        version = 0
        async for _ in batches:
            await asyncio.sleep(20 * UNIT_S)
            version += 1
            yield Weights(version=version)
            if version == self.steps:
                return


@plain_dataclass(frozen=True, kw_only=True)
class Measured:
    """One run after its first epoch: trained tokens and versions per second, and the time from the admission
    of a prompt to its rollouts. `stale`: groups that were dropped, of the whole run.
    """

    policy: str
    staleness: int
    tokens_per_s: float
    steps_per_s: float
    p99_s: float
    stale: int


def graph(policy: Stragglers, staleness: int, steps: int) -> GraphSpec:
    g = Graph("stragglers")
    weights = g.loop(Weights, staleness=staleness)
    prompts = g.add(Rows(), name="prompts")()
    generator = EmulatedGenerator(
        model="", samples=SAMPLES, slots=SLOTS, sampling=Sampling(max_new_tokens=MOST), stragglers=policy
    )
    rollouts = g.add(generator, name="generator", replicas=REPLICAS)(prompts, weights)
    scored = g.add(Clocked(), name="reward")(rollouts)
    batches = g.add(ToyCollect(groups=GROUPS), name="collect")(scored)
    weights.close(g.add(QuickTrainer(steps=steps), name="trainer")(batches))
    return g.check()


def measure(name: str, staleness: int, steps: int) -> Measured:
    """One run of `steps` versions in virtual time."""
    ADMITTED.clear()
    GENERATED.clear()
    loop = VirtualLoop()
    try:
        with tempfile.TemporaryDirectory() as folder:
            ledger, made = loop.run_until_complete(
                _run(graph(POLICIES[name], staleness, steps), Path(folder))
            )
    finally:
        loop.close()
    first = ROWS // GROUPS  # versions of the first epoch, in which nobody knows any length
    began, ended = made[first - 1][0], made[-1][0]
    took = [when - ADMITTED[k] for k, when in GENERATED.items() if k in ADMITTED and when > began]
    return Measured(
        policy=name,
        staleness=staleness,
        tokens_per_s=sum(tokens for _, tokens in made[first:]) / (ended - began),
        steps_per_s=(steps - first) / (ended - began),
        p99_s=float(np.quantile(took, 0.99)),
        stale=ledger.dropped["stale"],
    )


async def _run(spec: GraphSpec, path: Path) -> tuple[Ledger, list[tuple[float, int]]]:
    """The ledger, and of every version when it was made and the tokens it was trained on."""
    options, hub = RunOptions(run_id="stragglers"), MemoryBroker()
    await declare(hub, spec, options)
    ledger, made = Ledger(), list[tuple[float, int]]()

    async def watch() -> None:
        async for event in follow_ledger(hub):
            ledger.apply(event)
            if isinstance(event, Trained):
                made.append((asyncio.get_running_loop().time(), event.tokens))

    async def replica(role: str, number: int) -> None:
        broker: Any = hub.connect()
        try:
            await run_role(spec, options, role=role, replica=number, run_dir=path, broker=broker)
        finally:
            await broker.close()

    watching = asyncio.create_task(watch())
    async with asyncio.TaskGroup() as roles:
        for role, nodes in spec.roles.items():
            for number in range(nodes[0].replicas):
                roles.create_task(replica(role, number))
    watching.cancel()
    return ledger, made


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--staleness", type=int, nargs="*", default=[0, 1, 4])
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    print(
        f"{'staleness':>9} {'policy':<26} {'tokens/s':>9} {'steps/s':>8} {'p99':>7} {'stale':>6}"
        "  ratios to off"
    )
    found: list[Measured] = []
    for staleness in args.staleness:
        off = None
        for name in POLICIES:
            m = measure(name, staleness, args.steps)
            off = off or m
            found.append(m)
            print(
                f"{staleness:>9} {m.policy:<26} {m.tokens_per_s:>9.0f} {m.steps_per_s:>8.2f} "
                f"{m.p99_s:>5.2f} s {m.stale:>6}  {m.tokens_per_s / off.tokens_per_s:.3f} "
                f"{m.steps_per_s / off.steps_per_s:.3f} {m.p99_s / off.p99_s:.3f}",
                flush=True,
            )
    if args.json:
        print(json.dumps({"runs": [asdict(m) for m in found]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
