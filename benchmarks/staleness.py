"""What is left of the learning when the data is old: accuracy after a run, by staleness and by loss.

    python benchmarks/staleness.py [--seeds 0 1 2] [--staleness 0 1 2 4 8 16] [--methods ...] [--steps 60]

The task is that of `arriero demo`: a small Llama, trained on labels of which half are wrong, learns to
reverse four letters from the true reward (here in steps of 16 words with 16 samples each). Every cell is the
graph of `aipo` with another loss, run inline and deterministic, where a token is exactly as old as the bound,
from the version at which the bound is reached on. Accuracy is that of samples on words that no run has seen.
Methods whose clip needs several updates take four at a quarter of the learning rate, so that a version is
about as far from the one before under all of them: an age must mean the same distance.

Finished cells stand in the results file and aren't run again; the table and the picture are made from it.
"""

# pyright: reportUnknownMemberType=false
# matplotlib and the tokenizers of transformers are annotated only in part.

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import string
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from pydantic import BaseModel, ConfigDict

from arriero.components.advantage import GroupAdvantage
from arriero.components.decoding import DecodeEngine
from arriero.components.losses import AIPO, DecoupledPPO, ImportanceWeight, Loss, Reinforce
from arriero.components.optimizer import AdamW
from arriero.components.policy import load_policy
from arriero.components.prompts import PromptSource
from arriero.components.rollout_engine import Request
from arriero.components.sampling import Sampling
from arriero.components.supervised import ExampleSource
from arriero.engine.graph import Graph
from arriero.launchers.demo import write_data
from arriero.launchers.demo_model import write_tiny_llama
from arriero.launchers.launch import inline
from arriero.launchers.options import LaunchOptions
from arriero.launchers.rundir import create
from arriero.pipelines.aipo import AIPOConfig
from arriero.pipelines.sft import SFTConfig, sft
from arriero.schemas.messages import Weights
from arriero.schemas.run import RunOptions

ROOT: Final = Path(__file__).resolve().parents[1]
WORDS, SAMPLES = 256, 4  # held out, and samples of each: one standard error is about a point at 0.85
NO_CORRECTION: Final = ImportanceWeight(lower=1 - 1e-6, upper=1 + 1e-6)

# Loss, and updates on a batch: a clip can only act on what an earlier update changed.
METHODS: Final[Mapping[str, tuple[Loss, int]]] = {
    "AIPO": (AIPO(rho=2.0), 1),
    "decoupled PPO": (DecoupledPPO(), 4),
    "naive PPO": (DecoupledPPO(weight=NO_CORRECTION), 4),
    "uncorrected": (Reinforce(), 1),
}


class Cell(BaseModel):
    """One run: the accuracy it ends with, and the largest age of a token that it was trained on."""

    model_config = ConfigDict(frozen=True)

    method: str
    staleness: int
    seed: int
    steps: int
    lr: float
    accuracy: float
    staleness_max: int
    seconds: float

    @property
    def key(self) -> tuple[str, int, int, int, float]:
        return self.method, self.staleness, self.seed, self.steps, self.lr


class Results(BaseModel):
    """All cells that are finished; `start` is the accuracy of the model that every run begins with."""

    start: float
    cells: list[Cell]


def graph(cfg: AIPOConfig, loss: Loss, minibatches: int) -> Graph:
    """The graph of `aipo` with another loss."""
    g = Graph("staleness")
    weights = g.loop(Weights, staleness=cfg.staleness)
    prompts = g.add(cfg.data, name="prompts")()
    rollouts = g.add(cfg.generator())(prompts, weights)
    scored = g.add(cfg.reward, name="reward")(rollouts)
    batches = g.add(GroupAdvantage(groups=cfg.groups_per_step), name="advantage")(scored)
    weights.close(g.add(cfg.trainer(loss, minibatches=minibatches))(batches))
    return g


def run_cell(
    base: Path, scratch: Path, method: str, staleness: int, seed: int, args: argparse.Namespace
) -> Cell:
    """Train from the model in `base` and measure."""
    loss, minibatches = METHODS[method]
    cfg = AIPOConfig(
        model=str(base / "sft" / "model"),
        data=PromptSource(path=str(base / "data" / "train.jsonl"), seed=seed),
        sampling=Sampling(max_new_tokens=6),
        optimizer=AdamW(lr=args.lr / minibatches),
        steps=args.steps,
        staleness=staleness,
        groups_per_step=16,
        samples=16,
    )
    began = time.monotonic()
    shutil.rmtree(scratch, ignore_errors=True)  # of a cell that was broken off
    run = create(scratch)
    # Not `check`: it refuses stale data under a loss that corrects nothing, which is a question here.
    spec = graph(cfg, loss, minibatches).spec()
    options = RunOptions(run_id=f"staleness-{os.getpid()}", seed=seed, deterministic=True)
    if code := inline(spec, options, run, LaunchOptions(quiet=True)):
        raise SystemExit(f"{method} at staleness {staleness}, seed {seed} ended with {code}")
    ages = [json.loads(line)["staleness_max"] for line in run.metrics.read_text().splitlines()]
    return Cell(
        method=method,
        staleness=staleness,
        seed=seed,
        steps=args.steps,
        lr=args.lr,
        accuracy=accuracy(run.model, held_out(base / "data")),
        staleness_max=max(ages),
        seconds=round(time.monotonic() - began, 1),
    )


def prepare(base: Path) -> None:
    """The data, and the model that every run begins with; once."""
    if (base / "sft" / "model").exists():
        return
    write_data(base / "data")
    write_tiny_llama(base / "data" / "model", characters=string.ascii_lowercase + "=")
    cfg = SFTConfig(
        model=str(base / "data" / "model"),
        data=ExampleSource(path=str(base / "data" / "supervised.jsonl")),
        optimizer=AdamW(lr=3e-3, warmup_steps=20, schedule="cosine", floor=0.1),
        steps=300,
        examples_per_step=128,
        max_length=16,
    )
    run = create(base / "sft", overwrite=True)
    options = RunOptions(run_id="sft", deterministic=True)
    if inline(sft(cfg).check(), options, run, LaunchOptions(quiet=True)):
        raise SystemExit("the supervised run failed")


def held_out(data: Path) -> list[str]:
    """Words that are in none of the files, the same ones every time."""
    lines = [line for f in ("train", "held_out") for line in (data / f"{f}.jsonl").read_text().splitlines()]
    seen = {json.loads(line)["prompt"][:-1] for line in lines}
    draw = random.Random(1)
    words: dict[str, None] = {}
    while len(words) < WORDS:
        word = "".join(draw.choices(string.ascii_lowercase, k=4))
        if word not in seen:
            words[word] = None
    return list(words)


def accuracy(model: Path, words: list[str]) -> float:
    """Share of samples that are the word reversed, drawn as in training."""
    policy, tokenizer = load_policy(model)
    engine = DecodeEngine(policy, tokenizer, Sampling(max_new_tokens=6), slots=WORDS, max_length=64)
    right = 0
    for sample in range(SAMPLES):
        engine.add([
            Request(key=word, prompt_ids=tokenizer.encode(word + "="), seed=1000 * sample + i)
            for i, word in enumerate(words)
        ])  # fmt: skip
        while not engine.idle:
            for done in engine.step():
                right += tokenizer.decode(done.token_ids, skip_special_tokens=True) == done.key[::-1]
    return right / (len(words) * SAMPLES)


def table(results: Results) -> str:
    """Mean accuracy in percent, with the number of seeds where there are several; a row per method."""
    cells = results.cells
    ages = sorted({c.staleness for c in cells})
    lines = ["| staleness | " + " | ".join(map(str, ages)) + " |", "|---|" + "---|" * len(ages)]
    for method in METHODS:
        row: list[str] = []
        for age in ages:
            found = [100 * c.accuracy for c in cells if (c.method, c.staleness) == (method, age)]
            seeds = f" ({len(found)})" if len(found) > 1 else ""
            row.append(f"{statistics.mean(found):.1f}{seeds}" if found else "")
        lines.append(f"| {method} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def draw(results: Results, picture: Path) -> None:
    """Accuracy by staleness, a line per method, a point per seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axis = figure.subplots()
    ages = sorted({c.staleness for c in results.cells})
    for method, colour in zip(METHODS, ("#2b6cb0", "#2f855a", "#c05621", "#718096"), strict=True):
        mine = [c for c in results.cells if c.method == method]
        axis.plot(
            [ages.index(c.staleness) for c in mine], [100 * c.accuracy for c in mine], ".", color=colour
        )
        known = [age for age in ages if any(c.staleness == age for c in mine)]
        means = [statistics.mean(100 * c.accuracy for c in mine if c.staleness == age) for age in known]
        axis.plot([ages.index(age) for age in known], means, color=colour, label=method)
    axis.axhline(100 * results.start, color="black", linestyle=":", linewidth=1, label="before")
    axis.set_xticks(range(len(ages)), [str(age) for age in ages])
    axis.set(xlabel="staleness (versions)", ylabel="sampled accuracy after the run (%)", ylim=(0, 100))
    axis.grid(alpha=0.3)
    axis.legend(loc="lower left")
    figure.savefig(picture, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1, 2, 4, 8, 16])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--scratch", type=Path, default=ROOT / "runs" / "staleness")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "staleness.json")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "images" / "staleness.png")
    args = parser.parse_args()
    torch.set_num_threads(1)
    prepare(args.scratch)
    if args.results.exists():
        results = Results.model_validate_json(args.results.read_bytes())
    else:
        before = accuracy(args.scratch / "sft" / "model", held_out(args.scratch / "data"))
        results = Results(start=before, cells=[])
    done = {c.key for c in results.cells}
    args.results.parent.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        for staleness in args.staleness:
            for method in args.methods:
                if (method, staleness, seed, args.steps, args.lr) in done:
                    continue
                cell = run_cell(args.scratch, args.scratch / "cell", method, staleness, seed, args)
                shutil.rmtree(args.scratch / "cell")
                results.cells.append(cell)
                print(cell.model_dump_json(), flush=True)
                args.results.write_text(results.model_dump_json(indent=1) + "\n")
    print(table(results))
    draw(results, args.picture)


if __name__ == "__main__":
    main()
