"""What do the health gates measure in runs that are well, and in runs that aren't?

    python -m benchmarks.health MODEL [--steps 15] [--only NAME ...] [--json]

MODEL is a directory with a small language model, stories260K say. Short runs of several pipelines, inline, on
the beginnings of stories in `examples/`; those that aren't well go wrong on purpose. For each measure that a
gate looks at: its extremes and its middle over all steps of the runs of a kind, as the gate judges it (a norm
of the gradient over the median before, an entropy over the first). Then, gate by gate, the steps in which it
would have warned by its default.

The first table is what docs/health.md gives as reason for the defaults.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from arriero.components.health import Gate, HealthGates, judge, judged_value
from arriero.components.mismatch import MismatchGate
from arriero.launchers.cli import main as arriero

STORIES = Path(__file__).resolve().parents[1] / "examples" / "stories.jsonl"
GATES = (*MismatchGate().gates(), *HealthGates().gates())
_NEVER = {g.name: '{"warn": null, "stop": null}' for g in HealthGates().gates()}

WELL = {
    "grpo": ("grpo",),
    "aipo, staleness 0": ("aipo", "--staleness", "0"),
    "aipo, staleness 1": ("aipo", "--staleness", "1"),
    "aipo, staleness 4": ("aipo", "--staleness", "4"),
    "dapo": ("dapo", "--staleness", "1"),
    "rloo": ("rloo",),
    "cispo": ("cispo", "--staleness", "1"),
    "reinforce_pp": ("reinforce_pp",),
    "dr_grpo": ("dr_grpo",),
}
ILL = {
    "learning rate x 100": ("aipo", "--staleness", "1", "--optimizer.lr", "3e-2"),
    "learning rate x 10, staleness 8": ("aipo", "--staleness", "8", "--optimizer.lr", "3e-3"),
    "nothing is right": ("grpo", "--reward.text", "arriero"),
    "learning rate x 30": ("grpo", "--optimizer.lr", "1e-2"),
}
Lines = list[dict[str, float]]


def measured(model: Path, words: Sequence[str], steps: int) -> Lines:
    """The measures of each step of a run; of one that ended early, of those it made."""
    command = [
        "run", words[0], "--model", str(model), "--data", str(STORIES), "--data.eval-path", str(STORIES),
        "--data.overlap", "allow", "--data.eval-limit", "1", "--reward", "contains",
        "--sampling.max-new-tokens", "24", "--steps", str(steps), "--groups-per-step", "6", "--samples", "8",
        "--slots", "48",
        *([] if "--reward.text" in words else ["--reward.text", "dog"]),
        *([] if "--optimizer.lr" in words else ["--optimizer.lr", "3e-4"]),
        *words[1:], "--inline", "--record", "false", "--sinks", "[]",
        "--mismatch.stop-mean", "1e9", "--mismatch.stop-share", "1",
    ]  # fmt: skip
    for name, never in _NEVER.items():
        command += [f"--health.{name.replace('_', '-')}", never]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = arriero([*command, "--run-dir", str(run)])
        text = (run / "metrics.jsonl").read_text() if (run / "metrics.jsonl").exists() else ""
        if code and not text:
            raise RuntimeError(f"{' '.join(words)}: {said.getvalue()[-500:]}")
    numbers = [json.loads(line) for line in text.splitlines()]
    return [{k: float(v) for k, v in line.items() if isinstance(v, int | float)} for line in numbers]


def values(gate: Gate, runs: Sequence[Lines]) -> list[float]:
    """As the gate judges them, of all steps of `runs` that have them."""
    found = (judged_value(gate, lines, at) for lines in runs for at in range(len(lines)))
    return [v for v in found if math.isfinite(v)]


def warned(gate: Gate, lines: Lines) -> int:
    """In how many steps of a run it warns."""
    return sum(bool(judge([gate], lines[: k + 1], k + 1, "trainer")) for k in range(len(lines)))


def table(runs: dict[str, dict[str, Lines]]) -> list[list[str]]:
    rows = [["gate", "measure", "warns", "well: least, middle, most", "ill: least, middle, most"]]
    for gate in GATES:
        sign = "<=" if gate.low else ">"
        bound = (
            "-" if gate.warn is None else f"{sign} {gate.warn:g}" + f", {gate.steps} steps" * (gate.steps > 1)
        )
        spans = [_span(values(gate, [*kind.values()])) for kind in runs.values()]
        rows.append([gate.name, gate.measure, bound, *spans])
    return rows


def _span(found: Sequence[float]) -> str:
    return f"{min(found):.3g}  {median(found):.3g}  {max(found):.3g}" if found else "not measured"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--only", nargs="*", default=[], help="names of runs")
    parser.add_argument("--json", action="store_true", help="the measures of all steps, as the last line")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    runs: dict[str, dict[str, Lines]] = {"well": {}, "ill": {}}
    for kind, chosen in (("well", WELL), ("ill", ILL)):
        for name, words in chosen.items():
            if args.only and name not in args.only:
                continue
            lines = runs[kind][name] = measured(args.model, words, args.steps)
            told = {g.name: n for g in GATES if (n := warned(g, lines))}
            said = ", ".join(f"{gate} in {n} steps" for gate, n in told.items()) or "nothing"
            print(f"{kind:<5} {name:<32} {len(lines)} steps, warned of {said}", flush=True)
    rows = table(runs)
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    print()
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if args.json:
        print(json.dumps(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
