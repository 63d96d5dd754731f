"""The curves of a run as one PNG: reward, accuracy, staleness and log-probability mismatch by version."""

# pyright: reportUnknownMemberType=false
# matplotlib is annotated only in part.

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def draw_curves(metrics: Path, summary: Path, out: Path) -> Path:
    """Write the picture to `out` from metrics.jsonl and summary.json; gives `out` back."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    done: dict[str, Any] = json.loads(summary.read_text())
    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2)
    versions = [s["step"] for s in steps]
    for axis, (key, label) in zip(axes.flat, _PANELS, strict=True):
        values = [_value(s, key) for s in steps]
        axis.plot(versions, values, color="#2b6cb0", linewidth=1.6)
        axis.set(xlabel="version (optimizer steps)", title=label)
        axis.grid(alpha=0.3)
    if done.get("accuracy_before") is not None and versions:
        ends = [0, versions[-1]]
        held_out = [done["accuracy_before"], done["accuracy_after"]]
        axes[0, 0].plot(ends, held_out, "o--", color="#c05621", label="held out, sampled")
        axes[0, 0].legend(loc="lower right")
    figure.suptitle(f"{out.parent.name}: {done['steps']} steps in {done['wall_s']:.0f} s")
    figure.savefig(out, dpi=110)
    return out


_PANELS = [
    ("reward", "mean reward of the batch"),
    ("entropy", "entropy of the policy (nats)"),
    ("staleness_mean", "mean staleness of a trained token (versions)"),
    ("mismatch", "mean |log-prob of trainer - generator| (nats)"),
]


def _value(step: dict[str, Any], key: str) -> float:
    value = step.get(key, step.get("metrics", {}).get(key))
    return float("nan") if value is None else float(value)
