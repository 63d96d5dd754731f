"""`arriero run|check --on CLUSTER`, and `arriero status|logs|cancel` for runs anywhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from arriero.engine.errors import UserError
from arriero.launchers import jobs, preparing
from arriero.launchers.profile import Cluster, Profile, read_profile
from arriero.launchers.rundir import RunDir
from arriero.launchers.vitals import hubs_told

if TYPE_CHECKING:
    from arriero.launchers.cluster import Job, Plan
    from arriero.launchers.preparing import Begun, Ready

USAGE = """\
usage: arriero status [RUN] [--on slurm|kubernetes] [--json]    state of a run; without RUN, all jobs there
       arriero logs RUN [REPLICA] [--follow]                    what a replica prints; default hub-0
       arriero cancel RUN                                       stop a run; what it has recorded stays

RUN is a run directory or a handle: slurm://1234, kubernetes://namespace:name."""

CLUSTERS: dict[str, Cluster] = {"slurm": "slurm", "kubernetes": "kubernetes"}

Show = Callable[[str], int]


def chosen(ready: Ready) -> Profile:
    """The profile of a run with `--on` or `--profile`. Raises UserError."""
    given = ready.options
    on = None if given.on == "local" else given.on
    if given.inline:
        raise UserError("--inline runs everything in this process; leave it or --on out")
    return read_profile(on, given.profile)


def run(ready: Ready, argv: list[str]) -> int:
    """Submit; with `--wait`, show what the run says until it is over. The exit code, then that of the run."""
    made, plan = begun(ready, argv)
    job = jobs.submit(plan)
    run = made.run.path
    print(f"arriero: run directory {run}", file=sys.stderr)
    print(
        f"arriero: submitted as {job.handle}; arriero status|logs|cancel {run}", file=sys.stderr, flush=True
    )
    if not ready.options.wait:
        print(job.handle)
        return 0
    return jobs.follow(job, lambda line: print(line, flush=True))


def begun(ready: Ready, argv: list[str]) -> tuple[Begun, Plan]:
    """The run directory, made or gone on with, and what is to be submitted.

    Raises UserError before anything is made.
    """
    from arriero.launchers import again

    profile, code = chosen(ready), preparing.pack(ready)
    preparing.placed(ready, profile, preparing.unbegun(ready, profile), code)
    begin = preparing.begin if ready.options.resume is None else again.begin_again
    made = begin(ready, argv, profile, code)
    return made, preparing.placed(ready, profile, made, code)


def check(ready: Ready, out: IO[str]) -> None:
    """What would be submitted: who gets what, and the script or manifest. Makes nothing, asks nobody."""
    from arriero.launchers.show import table

    profile, code = chosen(ready), preparing.pack(ready)
    plan = preparing.placed(ready, profile, preparing.unbegun(ready, profile), code)
    table(f"on {profile.on}", [PLACES, *_rows(plan)], out)
    shipped = ", ".join(f"{name} {len(data) >> 10} KiB" for name, data in code.files.items())
    print(f"code {code.digest}: {shipped}\n", file=out)
    print(jobs.rendered(plan), file=out)


PLACES = ("role", "tasks", "hosts each", "ranks", "cpus", "gpus", "memory", "image")


def _rows(plan: Plan) -> Iterable[tuple[str, ...]]:
    for p in plan.places:
        counts = (str(n) for n in (p.tasks, p.hosts, p.ranks, p.cpus, p.gpus))
        yield (p.role, *counts, f"{p.memory_mb} MB" if p.memory_mb else "-", p.image or "-")


def status(args: Sequence[str], show: Show) -> int:
    """Exit code 0 if the run goes on or has finished, 1 if it failed or was cancelled."""
    names, options = _words(args, {"--on"}, {"--json"})
    if not names:
        return show(_listed(options.get("--on", "")))
    described = _described(jobs.find(_named(names[0], options.get("--on", ""))))
    text = json.dumps(described, indent=2) if "--json" in options else _told(described)
    return show(text) or int(described["state"] in ("failed", "cancelled", "gone"))


def logs(args: Sequence[str], show: Show) -> int:
    names, options = _words(args, {"--on"}, {"--follow"})
    if not 1 <= len(names) <= 2:
        raise UserError("logs takes a run and a replica: arriero logs RUN generator-0")
    job = jobs.find(_named(names[0], options.get("--on", "")))
    replica = names[1] if len(names) > 1 else "hub-0"
    for line in jobs.log_lines(job, replica, follow="--follow" in options):
        if code := show(line.rstrip("\n")):
            return code
    return 0


def cancel(args: Sequence[str], show: Show) -> int:
    names, options = _words(args, {"--on"}, set())
    if len(names) != 1:
        raise UserError("cancel takes one run: arriero cancel RUN")
    job = jobs.find(_named(names[0], options.get("--on", "")))
    jobs.cancel(job)
    return show(f"{job.handle} was told to stop")


def _described(job: Job) -> dict[str, object]:
    """The state of a run, its replicas where the scheduler knows them, and its result when it is over."""
    told: dict[str, object] = {"run": job.run_dir or job.handle, "handle": job.handle, "detail": ""}
    if job.on == "local":
        going = jobs.local_process(job) is not None
        state = "running" if going else "gone"
        if going and (run := RunDir(Path(job.run_dir))).vitals.exists():
            told["hubs"] = hubs_told(run.read_vitals().hubs)
    else:
        found = jobs.scheduler(job.on).describe(job.app_id)
        names = {"SUCCEEDED": "finished", "SUBMITTED": "pending"}
        state = names.get(found.state.name, found.state.name.lower()) if found else "gone"
        if found:
            told["detail"] = found.msg
            told["replicas"] = {
                s.role: [f"{r.state.name.lower()} {r.hostname}".strip() for r in s.replicas]
                for s in found.roles_statuses
            }
    summary = Path(job.run_dir) / "summary.json"
    if job.run_dir and summary.exists() and state != "running":
        result = json.loads(summary.read_text())
        told |= {"steps": result["steps"], "error": result["error"]}
        state = {"stopped": "cancelled"}.get(result["state"], result["state"]) if state == "gone" else state
    return {"state": state, **told}


def _told(described: dict[str, object]) -> str:
    lines = [f"{described['run']}: {described['state']}  {described['handle']}"]
    lines += [f"  {described[key]}" for key in ("detail", "hubs", "error") if described.get(key)]
    if "steps" in described:
        lines.append(f"  {described['steps']} steps")
    replicas = cast("dict[str, list[str]]", described.get("replicas", {}))
    for role, states in replicas.items():
        counts = dict.fromkeys(states)
        lines.append(f"  {role}: " + ", ".join(f"{states.count(s)} {s}" for s in counts))
    return "\n".join(lines)


def _listed(on: str) -> str:
    if on not in CLUSTERS:
        raise UserError("status takes a run, or --on slurm|kubernetes; `arriero runs` lists the runs here")
    found = jobs.scheduler(CLUSTERS[on]).list()
    rows = [f"{on}://{app.app_id}  {app.state.name.lower():10} {app.name}" for app in found]
    return "\n".join(rows) or f"no jobs on {on}"


def _named(name: str, on: str) -> str:
    """A number alone is a job of the scheduler that `--on` names."""
    return f"{on}://{name}" if on in CLUSTERS and not Path(name).exists() else name


def _words(args: Sequence[str], valued: set[str], flags: set[str]) -> tuple[list[str], dict[str, str]]:
    names: list[str] = []
    options: dict[str, str] = {}
    rest = list(args)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.partition("=")
        if key in valued and (equals or rest):
            options[key] = value if equals else rest.pop(0)
        elif word in flags:
            options[word] = ""
        elif word.startswith("-"):
            raise UserError(USAGE if word in ("--help", "-h") else f"unknown option {word}\n{USAGE}")
        else:
            names.append(word)
    return names, options
