"""Does the engine hide generation behind training? Step times of emulated components on real NATS edges.

    python -m benchmarks.overlap [--steps 50] [--groups 4] [--placed apart] [--awake] [--json]

The generator sleeps once per step's worth of prompts, the trainer once per batch; every role is a process of
its own. The asynchronous run (staleness 1) should take max(generate, train) a step, the synchronous one
(staleness 0) their sum. `over` is what the engine adds to a step: the time of all hops on the critical
path

    version -> ledger -> gate -> prompts -> generator -> reward -> batch -> trainer

With staleness 1 two batches go round the loop, so the asynchronous step can't be shorter than
(generate + train + hops) / 2 either: when both take equally long, half of the hops shows. Needs two idle
cores; on a busy machine every hop waits for a core.

`--placed together`: reward and batch component in one role, the edge between them in its process. `--awake`
asks the kernel not to let idle cores halt meanwhile (/dev/cpu_dma_latency, as low-latency servers are set
up; needs root). A virtual core that halts at once (guest_halt_poll_ns=0) may take longer to wake than a
message takes through the broker, and each hop wakes three processes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from dataclasses import dataclass as plain_dataclass
from pathlib import Path
from typing import ClassVar

import uvloop
from pydantic import NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.engine.graph import Graph
from arriero.engine.nats import NatsBroker
from arriero.engine.nats_server import start_server
from arriero.engine.runtime import run_role
from arriero.engine.stream import Stream
from arriero.launchers.hub import declare
from arriero.schemas.graph import GraphSpec
from arriero.schemas.messages import Batch, Prompt, RolloutGroup, Weights
from arriero.schemas.run import RunOptions
from tests.toys import ToyCollect, ToyPrompts, ToyReward, rollout

WARM_UP = 5
SPLITS_MS = ((100, 100), (60, 100), (100, 40))
LIMIT = 1.05
PLACED = {"apart": "collect", "together": "reward"}  # the role of the batch component


@dataclass(frozen=True, kw_only=True)
class SleepingGenerator:
    """Takes `groups` prompts, sleeps `seconds` for all of them, and gives their rollouts."""

    groups: PositiveInt
    seconds: NonNegativeFloat

    def want(self) -> int:
        return self.groups

    async def run(self, prompts: Stream[Prompt], weights: Stream[Weights]) -> AsyncIterator[RolloutGroup]:
        newest = await weights.next()
        while (first := await prompts.next()) is not None:
            held = [first]
            while len(held) < self.groups and (prompt := await prompts.next()) is not None:
                held.append(prompt)
            newest = weights.poll() or newest
            while newest is not None and newest.version < max(p.min_version for p in held):
                newest = await weights.next()
            assert newest is not None
            for group in await asyncio.to_thread(self._sample, held, newest.version, time.monotonic()):
                yield group

    def _sample(self, prompts: list[Prompt], version: int, began: float) -> list[RolloutGroup]:
        """Takes `seconds` from `began` on, its records included, as a computation would."""
        groups = [RolloutGroup(prompt=p, rollouts=(rollout(version), rollout(version))) for p in prompts]
        _sleep_until(began + self.seconds)
        return groups


@dataclass(frozen=True, kw_only=True)
class SleepingTrainer:
    """`steps` versions; each batch takes `seconds`. The time of a version stands in its metrics."""

    steps: PositiveInt
    seconds: NonNegativeFloat
    computes: ClassVar[bool] = True

    def limit(self) -> int | None:
        return self.steps

    async def run(self, batches: Stream[Batch]) -> AsyncIterator[Weights]:
        yield Weights(version=0)
        version = 0
        async for _ in batches:
            await asyncio.to_thread(_sleep_until, time.monotonic() + self.seconds)
            version += 1
            yield Weights(version=version, metrics={"at": time.monotonic()})
            if version == self.steps:
                return


def _sleep_until(moment: float) -> None:
    time.sleep(max(moment - time.monotonic(), 0.0))


@plain_dataclass(frozen=True, kw_only=True)
class Measured:
    """One run: means over the steps after the warm-up, in milliseconds."""

    placed: str
    staleness: int
    generate_ms: float
    train_ms: float
    step_ms: float
    ideal_ms: float

    @property
    def ratio(self) -> float:
        return self.step_ms / self.ideal_ms


def spec(
    placed: str, staleness: int, generate_s: float, train_s: float, steps: int, groups: int
) -> GraphSpec:
    """prompts -> generator -> reward -> collect -> trainer -> (weights)"""
    g = Graph("overlap")
    weights = g.loop(Weights, staleness=staleness)
    prompts = g.add(ToyPrompts(count=100_000), name="prompts")()
    rollouts = g.add(SleepingGenerator(groups=groups, seconds=generate_s), name="generator")(prompts, weights)
    scored = g.add(ToyReward(), name="reward")(rollouts)
    batches = g.add(ToyCollect(groups=groups), name="collect", role=PLACED[placed])(scored)
    weights.close(g.add(SleepingTrainer(steps=steps, seconds=train_s), name="trainer")(batches))
    return g.check()


def role(graph: str, options: str, name: str, url: str, token: str) -> None:
    """One role, in this process, to its end."""
    parsed, opts = GraphSpec.model_validate_json(graph), RunOptions.model_validate_json(options)

    async def run() -> None:
        broker = await NatsBroker.connect(url, token, run=opts.run_id)
        try:
            await run_role(parsed, opts, role=name, replica=0, run_dir=Path(), broker=broker)
        finally:
            await broker.close()

    uvloop.run(run())


def measure(
    placed: str, staleness: int, generate_s: float, train_s: float, steps: int, groups: int
) -> Measured:
    """Run the graph with one process for each role. Raises RuntimeError if one of them fails."""
    graph = spec(placed, staleness, generate_s, train_s, steps, groups)
    options = RunOptions(run_id="overlap", wait_bound_s=30)
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(Path(folder))
        try:
            asyncio.run(_declare(graph, options, server.url, server.token))
            spawn = multiprocessing.get_context("spawn")
            args = (graph.model_dump_json(), options.model_dump_json())
            roles = [
                spawn.Process(target=role, args=(*args, name, server.url, server.token), name=name)
                for name in graph.roles
            ]
            for process in roles:
                process.start()
            for process in roles:
                process.join(60 + steps * (generate_s + train_s) * 2)
            if failed := [p.name for p in roles if p.exitcode != 0]:
                raise RuntimeError(f"{', '.join(failed)} failed; see above")
            at = asyncio.run(_times(options, server.url, server.token, steps))
        finally:
            server.stop()
    step_s = (at[-1] - at[WARM_UP - 1]) / (steps - WARM_UP)
    ideal_s = max(generate_s, train_s) if staleness else generate_s + train_s
    return Measured(
        placed=placed,
        staleness=staleness,
        generate_ms=generate_s * 1e3,
        train_ms=train_s * 1e3,
        step_ms=step_s * 1e3,
        ideal_ms=ideal_s * 1e3,
    )


async def _declare(graph: GraphSpec, options: RunOptions, url: str, token: str) -> None:
    broker = await NatsBroker.connect(url, token, run=options.run_id)
    await declare(broker, graph, options)
    await broker.close()


async def _times(options: RunOptions, url: str, token: str, steps: int) -> list[float]:
    """The moment of every version, by the trainer's clock."""
    from arriero.engine.runtime.journal import follow_ledger
    from arriero.schemas.ledger import Trained

    broker = await NatsBroker.connect(url, token, run=options.run_id)
    at: list[float] = []
    async for event in follow_ledger(broker):
        if isinstance(event, Trained):
            at.append(event.metrics["at"])
        if len(at) == steps:
            break
    await broker.close()
    return at


def main() -> int:
    """Exit code 1 if a run is slower than 1.05 times its ideal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--groups", type=int, default=4, help="of one batch; each is a message on every edge")
    parser.add_argument("--placed", choices=PLACED, help="default: both")
    parser.add_argument("--awake", action="store_true", help="don't let idle cores halt")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    columns = ("staleness", "generate", "train", "step", "ideal", "over")
    print(f"{'placed':9}{' '.join(f'{c:>9}' for c in columns)} {'ratio':>6}")
    found: list[Measured] = []
    placements = [args.placed] if args.placed else [*PLACED]
    with awake() if args.awake else nullcontext():
        for generate_ms, train_ms in SPLITS_MS:
            for placed, staleness in itertools.product(placements, (1, 0)):
                times = generate_ms / 1e3, train_ms / 1e3
                m = measure(placed, staleness, *times, args.steps + WARM_UP, args.groups)
                found.append(m)
                over_ms = m.step_ms - m.ideal_ms
                print(
                    f"{m.placed:9}{m.staleness:>9} {m.generate_ms:>6.0f} ms {m.train_ms:>6.0f} ms "
                    f"{m.step_ms:>6.1f} ms {m.ideal_ms:>6.0f} ms {over_ms:>6.1f} ms {m.ratio:>6.3f}",
                    flush=True,
                )
    worst = max(m.ratio for m in found)
    print(f"worst ratio {worst:.3f}, limit {LIMIT}; load average {os.getloadavg()[0]:.1f}")
    if args.json:
        print(json.dumps({"runs": [asdict(m) | {"ratio": m.ratio} for m in found], "worst_ratio": worst}))
    return int(worst > LIMIT)


def awake() -> AbstractContextManager[object]:
    """Idle cores poll instead of halting while this is open. Raises PermissionError for who isn't root."""
    request = Path("/dev/cpu_dma_latency").open("wb", buffering=0)  # noqa: SIM115  # held by the caller
    request.write((0).to_bytes(4, sys.byteorder))  # microseconds
    return request


if __name__ == "__main__":
    sys.exit(main())
