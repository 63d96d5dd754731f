"""`arriero doctor`: why a run doesn't get on, or what of the installation is missing for what."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from arriero.engine.errors import UserError
from arriero.launchers.causes import causes
from arriero.launchers.rundir import RunDir, running
from arriero.launchers.stacks import stacks
from arriero.launchers.vitals import Vitals, wait_graph
from arriero.schemas.graph import GraphSpec

USAGE = """\
usage: arriero doctor RUN [--no-stacks]    who waits for whom, since when, stacks of stuck roles, likely cause
       arriero doctor                      what is installed here, and what is missing for what

Stacks are read by py-spy (arriero[doctor]), of processes of this machine."""


def doctor(args: Sequence[str], show: Callable[[str], int]) -> int:
    """Exit code 1 if something is missing that every run needs. Raises UserError."""
    if {"--help", "-h"} & {*args}:
        return show(USAGE)
    words = [a for a in args if a != "--no-stacks"]
    if unknown := [a for a in words if a.startswith("-")]:
        raise UserError(f"unknown option {unknown[0]}; see arriero doctor --help")
    if len(words) > 1:
        raise UserError(f"doctor takes one run, got {' '.join(words)}")
    if not words:
        from arriero.launchers.installation import examined

        text, whole = examined()
        return show(text) or int(not whole)
    return show(examination(RunDir(Path(words[0]).absolute()), with_stacks="--no-stacks" not in args))


def examination(run: RunDir, *, with_stacks: bool) -> str:
    """What is known of a run: its state, its newest step, and the diagnosis unless it is over."""
    if not run.path.is_dir():
        raise UserError(f"{run.path} is no directory; name that of a run")
    spec = run.read_graph()
    if run.summary.exists():
        s = run.read_summary()
        return f"{run.path} is over: {s.state} after {s.steps} steps" + (f"\n{s.error}" if s.error else "")
    if not run.vitals.exists():
        return f"{run.path} has no vitals.json: no replica has been heard of yet; look into {run.logs}"
    file = run.read_vitals()
    pid = running(run)
    since = time.time() - file.time
    state = f"goes on, launched by process {pid}" if pid is not None else "isn't known to go on here"
    lines = [f"{run.path} {state}; its newest step is {file.step}, its vitals are {since:.1f} s old"]
    if since > 30:
        lines.append("the launcher doesn't write any more: it was killed or stopped, or its machine is gone")
    return "\n".join([*lines, diagnosis(spec, Vitals.read(file, time.time()), with_stacks=with_stacks)])


def diagnosis(spec: GraphSpec, vitals: Vitals, *, with_stacks: bool) -> str:
    """Who waits for whom, what stands on the edges, the likely cause, and the stacks that bear on it."""
    found = causes(spec, vitals)
    parts = [wait_graph(spec, vitals)]
    if found:
        parts.append("likely cause:\n" + "\n".join(f"  {cause.text}" for cause in found))
    stuck = [key for cause in found for key in cause.stuck]
    if stuck and with_stacks:
        parts.append(stacks(vitals, stuck))
    return "\n".join(parts)
