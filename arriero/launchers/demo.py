"""`arriero demo`: the main job in small, on real components and real processes.

    data and a tiny random Llama  ->  SFT on labels of which half are wrong  ->  AIPO with the true reward

Reversing four letters is learned in seconds on two cores; wrong labels leave sampled accuracy near one half,
so that reinforcement learning has something to do. The two runs are ordinary commands, printed as such.
"""

from __future__ import annotations

import json
import random
import string
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from arriero.engine.errors import UserError
from arriero.launchers.demo_model import write_tiny_llama

_TRAIN, _HELD_OUT = 3000, 64
_WRONG = 0.5


def demo(args: list[str]) -> int:
    """Run the demo in `runs/demo` (`--run-dir DIR` for another place); the exit code of its runs.

    `--engine vllm` samples with vLLM, if it is installed.
    """
    from arriero.launchers.cli import main

    run_dir, engine = _options(args)
    began = time.monotonic()
    data, supervised = run_dir.with_name(run_dir.name + "-data"), run_dir.with_name(run_dir.name + "-sft")
    write_data(data)
    write_tiny_llama(data / "model", characters=string.ascii_lowercase + "=")
    for command in (sft_command(data, supervised), aipo_command(data, supervised, run_dir, engine)):
        print("$ arriero " + " ".join(command), flush=True)
        if (code := main(command)) != 0:
            return code
    from arriero.launchers.curves import draw_curves

    picture = draw_curves(run_dir / "metrics.jsonl", run_dir / "summary.json", run_dir / "curves.png")
    summary = json.loads((run_dir / "summary.json").read_text())
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    print(f"held-out words, sampled: {before:.2f} -> {after:.2f} in {time.monotonic() - began:.0f} s")
    print(f"curves: {picture}")
    return 0


def sft_command(data: Path, run_dir: Path) -> list[str]:
    return [
        "run", "sft", "--model", str(data / "model"), "--data", str(data / "supervised.jsonl"),
        "--steps", "300", "--examples-per-step", "128", "--max-length", "16",
        "--optimizer.lr", "3e-3", "--optimizer.warmup-steps", "20", "--optimizer.schedule", "cosine",
        "--optimizer.floor", "0.1", "--run-dir", str(run_dir), "--overwrite",
    ]  # fmt: skip


def aipo_command(data: Path, supervised: Path, run_dir: Path, engine: str = "transformers") -> list[str]:
    return [
        "run", "aipo", "--model", str(supervised / "model"), "--data", str(data / "train.jsonl"),
        "--data.eval-path", str(data / "held_out.jsonl"), "--sampling.max-new-tokens", "6",
        "--steps", "60", "--staleness", "1", "--groups-per-step", "32", "--samples", "8",
        "--optimizer.lr", "5e-4", "--engine", engine, "--run-dir", str(run_dir), "--overwrite",
    ]  # fmt: skip


def write_data(directory: Path, seed: int = 0) -> None:
    """Words and their reversals: supervised.jsonl (half of the labels wrong), train.jsonl, held_out.jsonl."""
    directory.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    words: dict[str, None] = {}
    while len(words) < _TRAIN + _HELD_OUT:
        words["".join(draw.choices(string.ascii_lowercase, k=4))] = None
    train, held_out = list(words)[:_TRAIN], list(words)[_TRAIN:]
    _write(directory / "supervised.jsonl", ({"prompt": w + "=", "response": _label(w, draw)} for w in train))
    _write(directory / "train.jsonl", ({"prompt": w + "=", "answer": w[::-1]} for w in train))
    _write(directory / "held_out.jsonl", ({"prompt": w + "=", "answer": w[::-1]} for w in held_out))


def _label(word: str, draw: random.Random) -> str:
    """The reversal; with probability one half with one letter replaced by another."""
    letters = list(word[::-1])
    if draw.random() < _WRONG:
        place = draw.randrange(len(letters))
        letters[place] = draw.choice(string.ascii_lowercase.replace(letters[place], ""))
    return "".join(letters)


def _write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _options(args: list[str]) -> tuple[Path, str]:
    """The run directory and the engine."""
    chosen = {"--run-dir": "runs/demo", "--engine": "transformers"}
    if args in (["--help"], ["-h"]):
        print("usage: arriero demo [--run-dir DIR] [--engine NAME]    (runs/demo, transformers)")
        sys.exit(0)
    if len(args) % 2 or not set(args[::2]) <= chosen.keys():
        raise UserError(f"demo takes --run-dir DIR and --engine NAME only, got {' '.join(args)}")
    chosen |= dict(zip(args[::2], args[1::2], strict=True))
    return Path(chosen["--run-dir"]), chosen["--engine"]
