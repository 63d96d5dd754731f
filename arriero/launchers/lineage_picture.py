"""An answer about lineage as SVG: prompts, rollouts, steps and weights in four columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from arriero.engine.lineage.queries import Answer

_MOST = 24  # of a column; more can't be read
_COLOURS = {"prompt": "#e8f0fe", "rollout": "#e6f4ea", "step": "#fef7e0", "weights": "#fce8e6"}


def draw(answer: Answer, path: Path) -> None:
    """Write the picture; the first two dozen rollouts and their prompts are in it."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    plots: Any = pyplot  # its signatures are partly unknown
    rollouts = answer.rollouts[:_MOST]
    columns = {
        "prompt": list(dict.fromkeys(r.prompt for r in rollouts)),
        "rollout": [r.id for r in rollouts],
        "step": [str(s.version) for s in answer.steps],
        "weights": list(dict.fromkeys(w for s in answer.steps for w in (s.before, s.after))),
    }
    labels = {"rollout": {r.id: f"{r.id}\nreward {r.reward}" for r in rollouts}}
    height = max(2.0, 0.5 * max(len(c) for c in columns.values()))
    figure, axes = plots.subplots(figsize=(14, height))
    at: dict[tuple[str, str], tuple[float, float]] = {}
    for x, (kind, names) in enumerate(columns.items()):
        for k, name in enumerate(names):
            at[kind, name] = (float(x), -(k + 0.5) / len(names) * height)
            text = labels.get(kind, {}).get(name, f"{kind} {name[:16]}")
            box = {"boxstyle": "round", "facecolor": _COLOURS[kind], "edgecolor": "#888888"}
            axes.text(*at[kind, name], text, ha="center", va="center", fontsize=7, bbox=box)
    lines = [(("prompt", r.prompt), ("rollout", r.id)) for r in rollouts]
    lines += [(("rollout", r.id), ("step", str(v))) for r in rollouts for v in r.steps]
    lines += [(("step", str(s.version)), ("weights", s.after)) for s in answer.steps]
    for a, b in lines:
        if a in at and b in at:
            axes.plot(*zip(at[a], at[b], strict=True), color="#bbbbbb", linewidth=0.7, zorder=0)
    axes.set_title(answer.about, fontsize=9)
    axes.set_xlim(-0.5, 3.5)
    axes.set_ylim(-height, 0)
    axes.axis("off")
    figure.savefig(path, bbox_inches="tight")
    plots.close(figure)
