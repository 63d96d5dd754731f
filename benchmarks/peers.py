"""arriero beside TRL and a plain loop: the same work on this machine, by turns, in one run.

    python -m benchmarks.peers [--loads uniform,tailed,slow] [--only NAME,...] [--rounds 2] [--steps 8]
                               [--quick] [--json FILE] [--fixture DIR]
    python -m benchmarks.peers --learn [--seeds 3] [--steps 150]      reward at equal samples
    python -m benchmarks.peers --profile                              where arriero's processor time goes

Work (`benchmarks/peer/work.py`): GRPO on two-digit additions, a Llama of a million parameters, 16 prompts x 8
samples, float32, AdamW. Loads: `uniform`, 32 tokens each; `tailed`, lengths log-normal from 5 to 100; `slow`,
uniform with a judge who takes 0.3 s for each group, all groups at once. Contenders run one after the other,
round after round, each with several numbers of threads, of which its best counts: by its median step on the
clock. Processor seconds are those of all its processes, without imports and warm-up; so is the memory (peak,
shared pages once). TRL needs the extra `peers` and is left out without it.

Not here: TRL's experimental AsyncGRPO, whose attention is a CUDA kernel and whose weights go over NCCL
(`docs/performance.md`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from arriero.launchers.rundir import RunDir
from benchmarks.peer.meter import Meter, per_step
from benchmarks.peer.work import GROUPS, LOADS, SAMPLES, Load, Work

WARM_UP, TAIL = 4, 3  # steps that aren't measured: the first, and the last, when a generator has no more work
TIMING_LR = 1e-9


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A program and a number of threads; `staleness` is arriero's."""

    name: str
    module: str
    threads: tuple[int, ...]
    staleness: int = 0

    @property
    def label(self) -> str:
        return f"{self.name} {'+'.join(map(str, self.threads))}"


CONTENDERS = (
    Contender(name="plain", module="plain", threads=(1,)),
    Contender(name="plain", module="plain", threads=(2,)),
    Contender(name="trl", module="trl_sync", threads=(1,)),
    Contender(name="trl", module="trl_sync", threads=(2,)),
    Contender(name="sync", module="ours", threads=(1, 1)),
    Contender(name="sync", module="ours", threads=(2, 2)),
    Contender(name="async", module="ours", threads=(1, 1), staleness=1),
    Contender(name="async", module="ours", threads=(1, 2), staleness=1),
)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One run of a contender. `spent`: processor seconds a step by process, all threads and the main one.

    `over_bound`: arriero's step over its own bound, the maximum cycle mean of its components' times,
    both of the whole run.
    """

    seconds: tuple[float, ...]
    spent: dict[str, tuple[float, float]]
    peak_bytes: int
    rewards: tuple[float, ...]
    over_bound: float | None = None


def turn(c: Contender, work: Work, place: Path) -> Turn:
    """Run one contender to its end. Raises RuntimeError with what it printed if it fails."""
    place.mkdir(parents=True)
    args = place / "work.json"
    args.write_text(json.dumps(asdict(work)))
    command = [sys.executable, "-m", f"benchmarks.peer.{c.module}", str(args)]
    steps_file, run_dir = Path(work.out), place / "run"
    if c.module == "ours":
        steps_file = run_dir / "metrics.jsonl"
        command += [str(run_dir), str(c.staleness), *map(str, c.threads)]
    env = os.environ | {
        "OMP_NUM_THREADS": str(c.threads[0]), "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"
    }  # fmt: skip
    with (place / "log").open("w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
        meter = Meter(process.pid)
        code = process.wait()
        meter.stop()
    if code != 0:
        raise RuntimeError(f"{c.label} failed:\n{(place / 'log').read_text()[-3000:]}")
    lines = [json.loads(line) for line in steps_file.read_text().splitlines()]
    at = [line["time"] for line in lines]
    measured = at[WARM_UP : len(at) - TAIL]
    return Turn(
        seconds=tuple(b - a for a, b in pairwise(measured)),
        spent=per_step(meter.spent(measured[0], measured[-1]), len(measured) - 1),
        peak_bytes=meter.peak_bytes,
        rewards=tuple(line["reward"] for line in lines),
        over_bound=over_bound(RunDir(run_dir)) if c.module == "ours" else None,
    )


def over_bound(run: RunDir) -> float | None:
    """Measured step over bound, as the summary of the run has them."""
    summary = run.read_summary()
    return summary.step_s / summary.bound_step_s if summary.step_s and summary.bound_step_s else None


@dataclass(frozen=True, kw_only=True)
class Row:
    """All turns of one contender on one load."""

    load: str
    contender: Contender
    turns: tuple[Turn, ...]

    @property
    def step_s(self) -> float:
        return statistics.median(s for t in self.turns for s in t.seconds)

    @property
    def cpu_s(self) -> float:
        return statistics.median(sum(a for a, _ in t.spent.values()) for t in self.turns)

    @property
    def over_bound(self) -> float | None:
        known = [t.over_bound for t in self.turns if t.over_bound is not None]
        return statistics.median(known) if known else None

    def text(self) -> str:
        peak = max(t.peak_bytes for t in self.turns)
        over = f"{self.over_bound:>7.2f}" if self.over_bound else f"{'':>7}"
        return (
            f"{self.load:>8} {self.contender.label:<10} {self.step_s:>8.3f} s {self.cpu_s:>8.3f} s "
            f"{GROUPS * SAMPLES / self.step_s:>9.0f} {peak / 1e6:>8.0f} MB {over}"
        )


def available(names: Sequence[str]) -> list[Contender]:
    """The contenders asked for that can run here; says which can't."""
    chosen = [c for c in CONTENDERS if not names or c.name in names]
    if importlib.util.find_spec("trl") is None and any(c.name == "trl" for c in chosen):
        print("left out: trl is not installed (pip install 'arriero[peers]')")
        chosen = [c for c in chosen if c.name != "trl"]
    cores = len(os.sched_getaffinity(0))
    return [c for c in chosen if max(c.threads) <= cores]


def firsts(contenders: Sequence[Contender]) -> list[Contender]:
    """One of each name: that with the fewest threads."""
    return list({c.name: c for c in reversed(contenders)}.values())[::-1]


def compare(load: Load, contenders: Sequence[Contender], args: argparse.Namespace) -> list[Row]:
    """Every contender in turn, `rounds` times."""
    from benchmarks.peer.fixture import make, problems

    turns: dict[str, list[Turn]] = {c.label: [] for c in contenders}
    model, data = make(args.fixture, load.lengths), problems(args.fixture, 640, seed=5)
    with tempfile.TemporaryDirectory() as folder:
        for k in range(args.rounds):
            for c in contenders:
                place = Path(folder) / f"{c.label}-{k}".replace(" ", "-")
                work = Work(
                    load=load.name, model=str(model), data=str(data), out=str(place / "steps.jsonl"),
                    steps=args.steps + 1 + WARM_UP + TAIL, lr=TIMING_LR, seed=k,
                )  # fmt: skip
                turns[c.label].append(turn(c, work, place))
    return [Row(load=load.name, contender=c, turns=tuple(turns[c.label])) for c in contenders]


def ratios(rows: Sequence[Row]) -> Iterable[str]:
    """The best of each contender against the best of arriero's asynchronous run."""
    best = {
        name: min(r.step_s for r in rows if r.contender.name == name)
        for name in {r.contender.name for r in rows}
    }
    if len(best) > 1 and (ours := best.get("async")):
        yield f"{rows[0].load:>8} async is " + ", ".join(
            f"{other / ours:.2f} x as fast as {name}"
            for name, other in sorted(best.items())
            if name != "async"
        )


def profile(rows: Sequence[Row]) -> Iterable[str]:
    """Processor seconds of a step by process, and of each process the share of its main thread."""
    for r in rows:
        total = r.cpu_s
        names = {n for t in r.turns for n in t.spent}
        yield f"{r.load} {r.contender.label}: {total:.3f} processor seconds a step"
        spent = {
            n: [statistics.median(t.spent.get(n, (0.0, 0.0))[k] for t in r.turns) for k in (0, 1)]
            for n in names
        }
        for name, (whole, main) in sorted(spent.items(), key=lambda s: -s[1][0]):
            share = f"{whole:>8.4f} s {whole / total:>6.1%}"
            yield f"    {name:<14} {share}, of which the main thread {main:>7.4f} s"


def learn(args: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Rewards of each contender by step, one list for each seed: 64 fixed problems, learning rate 3e-4."""
    from benchmarks.peer.fixture import make, problems

    found: dict[str, list[list[float]]] = {}
    model, data = make(args.fixture, "answer"), problems(args.fixture, 64, seed=6)
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seeds):
            for c in firsts(available(args.only)):
                name = c.name
                place = Path(folder) / f"{name}-{seed}"
                work = Work(
                    load="learn", model=str(model), data=str(data), out=str(place / "steps.jsonl"),
                    steps=args.steps, lr=3e-4, seed=seed,
                )  # fmt: skip
                rewards = turn(c, work, place).rewards
                found.setdefault(name, []).append([*rewards])
                means = [statistics.fmean(rewards[k : k + 10]) for k in range(0, len(rewards), 10)]
                print(f"{name:>6} seed {seed}: " + " ".join(f"{m:.2f}" for m in means), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--loads", default="uniform,tailed,slow", help=f"of {', '.join(LOADS)}")
    parser.add_argument("--only", default="", help="of plain, trl, sync, async")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--steps", type=int, default=0, help="measured in each round (8; of a --learn run 150)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round of three steps; one number of threads"
    )
    parser.add_argument("--profile", action="store_true", help="processor time by process, too")
    parser.add_argument("--learn", action="store_true", help="reward at equal samples instead of times")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--fixture", type=Path, default=Path("runs/peers"), help="where the models are kept")
    args = parser.parse_args()
    args.only = [n for n in args.only.split(",") if n]
    args.steps = args.steps or (150 if args.learn else 8)
    args.fixture.mkdir(parents=True, exist_ok=True)
    if args.quick:
        args.rounds, args.steps = 1, 3
    if args.learn:
        curves = learn(args)
        if args.json:
            args.json.write_text(json.dumps(curves))
        return 0
    print(
        f"{'load':>8} {'contender':<10} {'step':>10} {'CPU':>10} {'samples/s':>9} {'memory':>11} {'bound':>7}"
    )
    found: list[Row] = []
    for name in args.loads.split(","):
        contenders = available(args.only)
        rows = compare(LOADS[name], firsts(contenders) if args.quick else contenders, args)
        found += rows
        print("\n".join([*(r.text() for r in rows), *ratios(rows)]), flush=True)
        if args.profile:
            print("\n".join(profile(rows)), flush=True)
    print(f"load average {os.getloadavg()[0]:.1f}; cores {len(os.sched_getaffinity(0))}")
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in found]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
