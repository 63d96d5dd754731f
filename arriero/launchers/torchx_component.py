"""What `torchx run -s SCHEDULER arriero.run --pipeline NAME --set key=value` calls.

TorchX reads the source of components: annotations must be types and not text, so nothing is imported from
`__future__` here.
"""

import sys
from pathlib import Path
from typing import Optional

from torchx.specs import AppDef


def run(
    pipeline: str,
    set: Optional[dict[str, str]] = None,  # noqa: UP045  # the word on the command line; TorchX's forms
    on: str = "slurm",
    profile: str = "",
    config: str = "",
) -> AppDef:
    """Train a pipeline of arriero; makes its run directory.

    Args:
        pipeline: a name from `arriero list`, a module or a file
        set: keys of the pipeline and options of `arriero run`, as key=value,key=value
        on: slurm or kubernetes: the scheduler that the app is for
        profile: of arriero.toml; by default the one called like the scheduler
        config: TOML file with keys of the pipeline
    """
    from arriero.launchers import catalog, job_commands, preparing
    from arriero.launchers.cluster import cluster_app

    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    words = [
        "--on",
        on,
        *(["--profile", profile] if profile else []),
        *(["--config", config] if config else []),
    ]
    words += [word for key, value in (set or {}).items() for word in (f"--{key}={value}",)]
    ready = preparing.prepare(catalog.find(pipeline), words)
    begun, plan = job_commands.begun(ready, ["arriero", "run", pipeline, *words])  # as which it can go on
    print(f"arriero: run directory {begun.run.path}", file=sys.stderr)
    return cluster_app(plan)
