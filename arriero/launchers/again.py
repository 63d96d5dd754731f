"""`arriero run --resume RUN`: the words that the run was started with, and what of them has changed since."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from arriero.engine.errors import UserError
from arriero.launchers import rundir
from arriero.launchers.changes import changes, check_allowed, data_changed
from arriero.launchers.preparing import Begun, Ready
from arriero.launchers.provenance import MASK
from arriero.launchers.resuming import go_on
from arriero.launchers.ship import FOLDER

if TYPE_CHECKING:
    from arriero.launchers.profile import Profile
    from arriero.launchers.ship import Code

RESUME = "--resume"
_OWN = {
    RESUME,
    "--allow-change",
    "--run-dir",
    "--overwrite",
}  # of the command that started it, not of the run


def words_of(args: Sequence[str]) -> list[str]:
    """The whole command line of a run that goes on: as it was, with what is given now behind.

    Raises UserError for a directory without a run, and for one whose run isn't over.
    """
    place, given = _taken(args)
    run = rundir.reopen(Path(place))
    _refuse_going(run.path)
    _, command, *words = run.read_manifest().argv
    if command != "run" or not words:
        raise UserError(f"{place} was made by arriero {command}; only arriero run can go on")
    pipeline, *before = words
    if given and not given[0].startswith("-") and given.pop(0) != pipeline:
        raise UserError(f"{place} is a run of {pipeline}; leave the pipeline out after {RESUME}")
    before = _without(before, _OWN)
    for option, value in pairwise(before):
        name = option.partition("=")[0]
        if MASK in (value, option.partition("=")[2]) and not any(w.partition("=")[0] == name for w in given):
            raise UserError(f"{name} is a secret, which no run keeps; give it again")
    return [pipeline, *before, *given, RESUME, str(run.path)]


def begin_again(
    ready: Ready, argv: list[str], profile: Profile | None = None, code: Code | None = None
) -> Begun:
    """As `preparing.begin`, in the directory of a run that has ended.

    Raises UserError with every difference that `--allow-change` doesn't name, and on Kubernetes, where the
    record stands in a volume of the cluster.
    """
    from arriero.launchers import provenance
    from arriero.launchers.cluster import JOB_FILE
    from arriero.launchers.content_hashes import content_hashes
    from arriero.launchers.hub import CLAIMS

    given = ready.options
    assert given.resume is not None, "by `words_of`"
    if profile is not None and profile.on == "kubernetes":
        raise UserError(
            f"{RESUME} needs the record of the run, which stands in a volume of the cluster; go on from its "
            "checkpoint in a new run: --model CHECKPOINT"
        )
    run = rundir.RunDir(given.resume)
    before, graph, options = run.read_manifest(), run.read_graph(), run.read_options()
    manifest = provenance.manifest(
        run_id=before.run_id, pipeline=ready.pipeline, spec=ready.spec, config=ready.config,
        sources=ready.sources, seed=given.seed, started=datetime.now(UTC), argv=argv,
        content=content_hashes(ready.spec), hubs=given.hub.replicas,
    )  # fmt: skip
    changed = changes(before, manifest)
    for key in ("deterministic", "record", "record_url"):
        if (old := getattr(options, key)) != (new := getattr(given, key)):
            changed[key] = f"{old} -> {new}"
    check_allowed(changed, given.allow_change)
    if not (changed or given.quiet) and (done := _finished(run)) is not None:
        print(
            f"arriero: note: {run.path} finished with step {done}, so only checkpoints that are gone are "
            "made anew; for more steps give --steps NUMBER --allow-change steps",
            file=sys.stderr,
        )
    if "record" in changed or "record_url" in changed:
        raise UserError("record and record_url stay as they were: the run goes on from its record")
    told = {"seed", "deterministic", "wait_bound_s", "liveness_s", "max_dead_letters", "restarts"}
    told |= {"sinks", "metrics_port", "metrics_host"}
    claims = {"claims_url": f"file://{run.path}/{CLAIMS}" if profile else ""}
    now = {"elastic": not (given.inline or given.deterministic), "hubs": given.hub.replicas}
    options = options.model_copy(update={key: getattr(given, key) for key in told} | claims | now)
    anew = data_changed(graph, ready.spec, changed)
    resumed = go_on(ready.spec, options, run, changed=changed, anew=anew, before=graph)
    for path in (run.path / JOB_FILE, run.cancelled, run.prepared):
        path.unlink(missing_ok=True)
    if code is not None:
        manifest = manifest.model_copy(update={"shipped_sha256": code.digest})
        code.write(run.path / FOLDER)
    run.begin_again(resumed.number, ready.spec, options, manifest)
    provenance.write_diffs(run.path, manifest)
    if profile is not None:
        run.prepared.touch()
    return Begun(options=options, run=run, seen_as=str(run.path) if profile else "")


def _finished(run: rundir.RunDir) -> int | None:
    """The last step of a run that came to its end; None for one that didn't."""
    if not run.summary.exists():
        return None
    summary = run.read_summary()
    return summary.steps if summary.state == "finished" else None


def _refuse_going(path: Path) -> None:
    """UserError for a run that goes on, or waits to, on a cluster."""
    from arriero.launchers import jobs

    job = jobs.find(str(path))
    if job.on != "local" and jobs.running(job):
        raise UserError(f"{path} goes on as {job.handle}; arriero cancel {path} stops it")


def _taken(args: Sequence[str]) -> tuple[str, list[str]]:
    """The value of the option, and the other words."""
    rest = list(args)
    for at, word in enumerate(rest):
        name, equals, value = word.partition("=")
        if name == RESUME:
            if not equals and at + 1 >= len(rest):
                break
            place = value if equals else rest.pop(at + 1)
            del rest[at]
            return place, rest
    raise UserError(f"{RESUME} needs the directory of a run")


def _without(words: Sequence[str], options: Collection[str]) -> list[str]:
    """Words without these options and their values."""
    found: list[str] = []
    skipping = False
    for word in words:
        if word.startswith("--"):
            skipping = word.partition("=")[0] in options
            if not skipping:
                found.append(word)
        elif not skipping:
            found.append(word)
    return found
