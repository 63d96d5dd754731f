"""A run as an offline run of Weights & Biases: `wandb sync` sends it, if and when somebody wants that."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from arriero.launchers.exports.subject import Subject


def write(about: Subject, path: Path) -> str:
    wandb: Any = import_module("wandb")
    path.mkdir(parents=True, exist_ok=True)
    run = wandb.init(
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
    for step, time_s, found in about.measures():
        run.log({**dict(found), "_timestamp": time_s}, step=step)
    run.summary.update({**about.results(), "head": about.head})
    folder = Path(str(run.dir)).parent
    run.finish()
    return f"{len(about.lines)} steps in {folder}"
