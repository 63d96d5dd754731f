"""A run as an offline run of Weights & Biases: `wandb sync` sends it, if and when somebody wants that."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from arriero.launchers.exports.subject import Subject
from arriero.launchers.step_lines import Scalars


class Live:
    """The run in a folder below `path`, step by step as it is made."""

    def __init__(self, about: Subject, path: Path) -> None:
        wandb: Any = import_module("wandb")
        path.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            dir=str(path),
            project=about.pipeline,
            name=about.manifest.run_id,
            id=about.manifest.run_id,
            config=about.parameters(),
            settings=wandb.Settings(
                mode="offline", console="off", silent=True, disable_git=True, disable_code=True,
                x_disable_stats=True, x_disable_meta=True,
            ),
        )  # fmt: skip

    def step(self, step: int, time_s: float, found: Scalars) -> None:
        self._run.log({**dict(found), "_timestamp": time_s}, step=step)

    def finish(self, about: Subject) -> str:
        """With what the run came to; the folder that it stands in."""
        self._run.summary.update({**about.results(), "head": about.head})
        folder = Path(str(self._run.dir)).parent
        self._run.finish()
        return str(folder)


def write(about: Subject, path: Path) -> str:
    live = Live(about, path)
    for step, time_s, found in about.measures():
        live.step(step, time_s, found)
    return f"{len(about.lines)} steps in {live.finish(about)}"
