"""What a record costs, and how fast it answers.

    python -m benchmarks.lineage overhead [--steps 12] [--rounds 3]    step times with and without it
    python -m benchmarks.lineage queries [--rollouts 1000000]          questions to a large record
    python -m benchmarks.lineage compression RUN                       codecs on the arrays of a recorded run

`overhead` runs one graph of emulated components as processes, by turns with and without a record: a step of
one second on 16 groups of 8 rollouts of 512 tokens. The ratio of the medians is what counts; a busy machine
makes it vary by a few hundredths. `queries` writes its record once, below the system's temporary folder.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass

from arriero.components.advantage import GroupAdvantage
from arriero.engine.graph import Graph, PerRecord
from arriero.engine.lineage.index import Index
from arriero.engine.lineage.queries import Questions
from arriero.engine.lineage.reader import Lineage
from arriero.engine.lineage.writer import Item, LineageWriter, Seen
from arriero.engine.stream import Stream
from arriero.schemas.ledger import Admitted, Trained
from arriero.schemas.lineage import Opened
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
from tests.toys import ToyPrompts, ToyTrainer

GROUPS, SIZE, TOKENS = 16, 8, 512
STEP_S = 1.0


def made(rng: np.random.Generator, version: int, length: int) -> Rollout:
    """Tokens as frequent as words are, log-probabilities with the mantissas of real ones."""
    mask = np.arange(length) >= length // 4
    return Rollout(
        tokens=np.minimum(rng.zipf(1.3, length), 31_999).astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, -rng.exponential(0.7, length), np.nan).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        text="word " * (length // 4),
        finish="stop",
    )


@dataclass(frozen=True, kw_only=True)
class Emulated:
    """Groups of `SIZE` rollouts, `GROUPS` of them in `seconds`."""

    seconds: NonNegativeFloat

    def want(self) -> int:
        return GROUPS

    async def run(self, prompts: Stream[Prompt], weights: Stream[Weights]) -> AsyncIterator[RolloutGroup]:
        newest, rng = await weights.next(), np.random.default_rng(0)
        async for prompt in prompts:
            while newest is not None and newest.version < prompt.min_version:
                newest = await weights.next()
            newest = weights.poll() or newest
            assert newest is not None
            await asyncio.sleep(self.seconds / GROUPS)
            rollouts = tuple(made(rng, newest.version, TOKENS) for _ in range(SIZE))
            yield RolloutGroup(prompt=prompt, rollouts=rollouts)


@dataclass(frozen=True, kw_only=True)
class FirstIsRight(PerRecord[RolloutGroup, ScoredGroup]):
    """The reward of the emulation."""

    def apply(self, record: RolloutGroup) -> ScoredGroup:
        return ScoredGroup(group=record, scores=scores(len(record.rollouts)))


def scores(size: int) -> tuple[Score, ...]:
    return tuple(Score(value=float(k == 0), outcome=Outcome.WRONG if k else Outcome.OK) for k in range(size))


def graph(steps: int) -> Graph:
    g = Graph("emulated")
    weights = g.loop(Weights, staleness=1)
    rollouts = g.add(Emulated(seconds=0.8 * STEP_S), name="generator")(
        g.add(ToyPrompts(), name="prompts")(), weights
    )
    scored = g.add(FirstIsRight(), name="reward")(rollouts)
    batches = g.add(GroupAdvantage(groups=GROUPS), name="advantage")(scored)
    weights.close(g.add(ToyTrainer(steps=steps, seconds=STEP_S), name="trainer")(batches))
    return g


# --- overhead -----------------------------------------------------------------------------------------------


def child(folder: Path, steps: int, *, record: bool) -> None:
    """One run; says its median step, and what the launcher's process took."""
    from arriero.launchers.launch import launch
    from arriero.launchers.options import LaunchOptions
    from arriero.launchers.rundir import create
    from arriero.schemas.run import RunOptions

    spec = graph(steps).check()
    run = create(folder)
    options = RunOptions(run_id=folder.name, record=record)
    run.graph.write_text(spec.model_dump_json())
    run.options.write_text(options.model_dump_json())
    if launch(spec, options, run, LaunchOptions(quiet=True, result=False)):
        raise SystemExit(1)
    used = resource.getrusage(resource.RUSAGE_SELF)
    told = {
        "step_s": run.read_summary().step_s,
        "cpu_s": (used.ru_utime + used.ru_stime) / steps,
        "rss_mb": used.ru_maxrss / 1024,
    }
    print(json.dumps(told))


def overhead(steps: int, rounds: int) -> None:
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        for k in range(rounds):
            for record in (False, True) if k % 2 else (True, False):
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.lineage",
                    "child",
                    f"{folder}/{k}-{record}",
                    str(steps),
                ]
                done = subprocess.run(
                    [*command, str(int(record))], check=True, capture_output=True, text=True
                )
                found[record].append(json.loads(done.stdout.splitlines()[-1]))
                print(f"record={record}: {found[record][-1]}")
        size = sum(p.stat().st_size for p in Path(f"{folder}/0-True/lineage").rglob("*") if p.is_file())
    median = {r: {k: statistics.median(x[k] for x in xs) for k in xs[0]} for r, xs in found.items()}
    pairs = [w["step_s"] / n["step_s"] for w, n in zip(found[True], found[False], strict=True)]
    cpu = (median[True]["cpu_s"] - median[False]["cpu_s"]) / median[False]["step_s"]
    memory = median[True]["rss_mb"] - median[False]["rss_mb"]
    tokens = GROUPS * SIZE * TOKENS
    spread = f"{min(pairs):.3f} to {max(pairs):.3f} in {rounds} pairs"
    print(f"step with / without a record: {statistics.median(pairs):.3f} in the median ({spread})")
    print(f"processor time of the recorder: {cpu:.1%} of a step, on one core")
    print(f"memory of the recorder: {memory:.0f} MB; {size / steps / tokens:.1f} bytes a token on disk")


# --- queries ------------------------------------------------------------------------------------------------


def written(folder: Path, rollouts: int) -> None:
    """A record of `rollouts` short rollouts, 1024 a step."""
    writer = LineageWriter(str(folder), Opened(run_id="large", graph_digest=""))
    rng, per_step = np.random.default_rng(0), 128
    pool = [made(rng, 0, 16) for _ in range(64)]
    for step in range(1, max(1, rollouts // (per_step * SIZE)) + 1):
        items: list[Item] = []
        groups: list[ScoredGroup] = []
        for k in range((step - 1) * per_step, step * per_step):
            epoch, row = divmod(k, 10_000)
            prompt = Prompt(id=f"e{epoch}-r{row}", origins=(k,), text="q", row=row, epoch=epoch)
            picked = tuple(pool[int(i)] for i in rng.integers(0, len(pool), SIZE).tolist())
            group = RolloutGroup(
                id=f"{prompt.id}>g", parents=(prompt.id,), origins=(k,), prompt=prompt, rollouts=picked
            )
            scored = ScoredGroup(
                id=f"{group.id}>r", parents=(group.id,), origins=(k,), group=group, scores=scores(SIZE)
            )
            groups.append(scored)
            items += [
                Admitted(id=prompt.id, origin=k, split="train", epoch=epoch, row=row, min_version=0),
                Seen("reward", scored),
            ]
        batch = Batch(
            id=f"b-{step}", parents=tuple(g.id for g in groups), origins=tuple(g.origins[0] for g in groups),
            samples=tuple(_samples(groups)),
        )  # fmt: skip
        trained = Trained(
            node="trainer", version=step, batch=batch.id, origins=batch.origins, tokens=1, staleness_max=0,
            staleness_mean=0, reward_mean=0.125, metrics={"loss": 1 / step},
        )  # fmt: skip
        weights = Weights(id=f"{batch.id}>trainer", parents=(batch.id,), version=step)
        writer.commit([*items, Seen("advantage", batch), trained, Seen("weights", weights)])
    writer.close("finished")


def _samples(groups: list[ScoredGroup]) -> Iterator[Sample]:
    for g in groups:
        for r, s in zip(g.group.rollouts, g.scores, strict=True):
            yield Sample(
                group=g.id, tokens=r.tokens, mask=r.mask, logprobs=r.logprobs, versions=r.versions,
                advantages=np.where(r.mask, np.float32(s.value), np.float32(0)), reward=s.value,
                origin=g.origins[0],
            )  # fmt: skip


def queries(rollouts: int) -> None:
    folder = Path(tempfile.gettempdir()) / f"arriero-benchmark-lineage-{rollouts}"
    if not (folder / "chain").exists():
        print(f"write {rollouts} rollouts to {folder}: {_seconds(lambda: written(folder, rollouts)):.1f} s")
    kept: list[Any] = []
    shutil.rmtree(folder / "index", ignore_errors=True)
    _said("the first question without an index, which makes it", lambda: Index(str(folder)))
    newest = max((folder / "index").glob("*.json"))
    for file in (folder / "index").glob(f"{newest.stem}.*"):
        file.unlink()
    _said("a question to a run that goes on, or was closed now", lambda: Index(str(folder)))
    _said("open a record with its index", lambda: kept.append(Index(str(folder))))
    index: Index = kept[0]
    ask = Questions(index)
    last = index.overview.versions[-1]
    for name, question in {
        "--step": lambda: ask.step(last // 2),
        "--rollout": lambda: ask.rollout("e0-r77>g/3"),
        "--prompt": lambda: ask.prompt("e0-r77"),
        "--row (all epochs)": lambda: ask.row(77),
        "--weights": lambda: ask.weights(str(last)),
        "SQL over rollouts": lambda: index.sql(
            "select row, avg(reward) from rollouts group by row order by 2"
        ),
    }.items():
        _said(name, question)
    print(f"memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


def _said(what: str, call: Callable[[], object]) -> None:
    """Time by the clock and of the processor, in seconds."""
    began, used = time.perf_counter(), time.process_time()
    call()
    print(
        f"{what}: {time.perf_counter() - began:.2f} s, {time.process_time() - used:.2f} s of processor time"
    )


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


# --- compression --------------------------------------------------------------------------------------------


def compression(run: str) -> None:
    """Size and time of each codec on the arrays of each step of a run, as shares of the raw bytes."""
    record = Lineage(run)
    arrays: dict[str, list[bytes]] = {}
    for step in record.steps:
        batch = record.trained_batch(step)
        for name in ("tokens", "mask", "logprobs", "versions", "advantages"):
            arrays.setdefault(name, []).append(b"".join(getattr(s, name).tobytes() for s in batch.samples))
    codecs: Any = import_module("numcodecs")
    known: dict[str, Any] = {f"zstd {k}": codecs.Zstd(level=k) for k in (1, 3, 9)}
    known |= {
        f"blosc {c} {s}": codecs.Blosc(c, clevel=k, shuffle=getattr(codecs.Blosc, s))
        for c, k, s in (
            ("lz4", 1, "SHUFFLE"),
            ("zstd", 1, "SHUFFLE"),
            ("zstd", 1, "BITSHUFFLE"),
            ("zstd", 5, "SHUFFLE"),
        )
    }
    print(f"{'codec':<24}" + "".join(f"{name:>12}" for name in arrays) + f"{'all':>10}{'ms/MB':>8}")
    for name, codec in known.items():
        row, packed, raw, seconds = "", 0, 0, 0.0
        for values in arrays.values():
            began = time.perf_counter()
            sizes = [len(codec.encode(_typed(v))) for v in values]
            seconds += time.perf_counter() - began
            row += f"{sum(sizes) / sum(map(len, values)):>12.3f}"
            packed, raw = packed + sum(sizes), raw + sum(map(len, values))
        print(f"{name:<24}{row}{packed / raw:>10.3f}{seconds * 1e3 / (raw / 1e6):>8.1f}")


def _typed(data: bytes) -> Any:
    """Four bytes an element where that is possible, for the codecs that shuffle."""
    return np.frombuffer(data, np.int32) if len(data) % 4 == 0 else np.frombuffer(data, np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a record costs, and how fast it answers.")
    kinds = parser.add_subparsers(dest="kind")
    one = kinds.add_parser("overhead")
    one.add_argument("--steps", type=int, default=12)
    one.add_argument("--rounds", type=int, default=3)
    kinds.add_parser("queries").add_argument("--rollouts", type=int, default=1_000_000)
    kinds.add_parser("compression").add_argument("run")
    inner = kinds.add_parser("child")
    for name in ("folder", "steps", "record"):
        inner.add_argument(name)
    args = parser.parse_args()
    match args.kind:
        case None | "overhead":
            overhead(getattr(args, "steps", 12), getattr(args, "rounds", 3))
        case "queries":
            queries(args.rollouts)
        case "compression":
            compression(args.run)
        case _:
            from benchmarks import lineage  # the components must be importable by the name of this module

            lineage.child(Path(args.folder), int(args.steps), record=bool(int(args.record)))


if __name__ == "__main__":
    main()
