"""`arriero scale RUN generator=6`: more or fewer replicas of a role, while the run goes on."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from arriero.engine.elastic import check_role, elastic_roles
from arriero.engine.errors import UserError
from arriero.launchers import jobs
from arriero.launchers.cluster import Job, guest_plan
from arriero.launchers.keys import nearest
from arriero.launchers.requests import answer_to, request_path
from arriero.launchers.rundir import RunDir, read_json, write_json
from arriero.schemas.graph import GraphSpec
from arriero.schemas.run import RunOptions
from arriero.schemas.scaling import ScaleAnswer, ScaleRequest

USAGE = """\
usage: arriero scale RUN ROLE=N [ROLE=N ...] [--within SECONDS]

So many replicas of a role from now on, as in `arriero scale RUN generator=6 reward=3`. Who joins begins with
the newest weights. Who leaves takes nothing more and answers what it has; after SECONDS (60) it is killed,
and what it held goes to another. On Slurm and Kubernetes the scheduler says how long that may take."""

_ANSWER_S = 60.0  # a busy conductor; it looks ten times a second
_LOOK_S = 0.02
_SECONDS: TypeAdapter[float] = TypeAdapter(Annotated[float, Field(gt=0, allow_inf_nan=False)])
_WITHIN_S = 60.0
_GRACE = {"slurm": "KillWait of slurm.conf, 30 s by default", "kubernetes": "60 s"}


def scale(args: Sequence[str], show: Callable[[str], int]) -> int:
    """Exit code 0 when it has been arranged."""
    if {"--help", "-h"} & {*args}:
        return show(USAGE)
    name, wanted, within_s = _read(args)
    job = jobs.find(name)
    if job.on != "local":
        if within_s is not None:
            raise UserError(
                f"--within {within_s:g}: the jobs of replicas that leave end when {job.on} says so "
                f"({_GRACE[job.on]}); leave --within out"
            )
        return show("\n".join(_by_jobs(name, job, wanted)))
    run = RunDir(Path(job.run_dir))
    _check(run.read_graph(), run.read_options(), wanted)
    if jobs.local_process(job) is None:
        raise UserError(f"{name} doesn't run any more; arriero run --resume goes on with it")
    request = ScaleRequest(
        id=uuid.uuid4().hex, replicas=wanted, within_s=_WITHIN_S if within_s is None else within_s
    )
    answer = ask(run, request, going=lambda: jobs.local_process(job) is not None)
    if answer.error:
        raise UserError(answer.error)
    return show("\n".join(answer.lines))


def ask(run: RunDir, request: ScaleRequest, going: Callable[[], bool]) -> ScaleAnswer:
    """What the process that conducts the run says. Raises UserError if it ends, or says nothing."""
    path = request_path(run, request.id)
    path.parent.mkdir(exist_ok=True)
    write_json(path, request)
    deadline = time.monotonic() + _ANSWER_S
    try:
        while True:
            alive = going()  # asked first: it may answer and end
            if (found := answer_to(path)).exists():
                return read_json(found, ScaleAnswer)
            if not alive:
                raise UserError(f"{run.path} has ended")
            if time.monotonic() > deadline:
                raise UserError(
                    f"{run.path} gave no answer for {_ANSWER_S:g} s; arriero doctor says what it does"
                )
            time.sleep(_LOOK_S)
    finally:
        path.unlink(missing_ok=True)
        answer_to(path).unlink(missing_ok=True)


def _by_jobs(name: str, job: Job, wanted: dict[str, int]) -> list[str]:
    """Submit a job for each replica that joins, and cancel those of who leaves; what was done.

    Raises UserError before anything is.
    """
    assert job.on != "local"
    scheduler = jobs.scheduler(job.on)
    described = scheduler.describe(job.app_id)
    if described is None or described.state.name != "RUNNING":
        state = described.state.name.lower() if described else "gone"
        raise UserError(f"{name} is {state}; replicas join and leave while a run goes on")
    placed, going = jobs.placed(job), jobs.guests(job)
    _check(placed.spec, placed.options, wanted)
    own = {place.role: place.tasks for place in placed.plan.places}
    for role, number in wanted.items():
        if number < own[role]:
            raise UserError(f"{role}={number}: the job keeps its {own[role]}; at least {own[role]}")
    told: list[str] = []
    for role, number in wanted.items():
        guests = [guest for guest in going if guest.role == role]
        more = number - own[role] - len(guests)
        leaving = guests[more:] if more < 0 else []
        for guest in reversed(leaving):
            scheduler.cancel(guest.app_id)
        joined = [jobs.join(guest_plan(placed.plan, role)) for _ in range(more)]
        names = ", ".join(f"{job.on}://{guest.app_id}" for guest in (*joined, *leaving))
        does = "joins when it starts" if joined else "leaves" if leaving else "as it was"
        told.append(f"{role}: {own[role] + len(guests)} -> {number}, {names} {does}".replace(",  ", ", "))
    return told


def _read(args: Sequence[str]) -> tuple[str, dict[str, int], float | None]:
    """The run, replicas by role, and how long those that leave may take, if that is said."""
    names, wanted, within_s = list[str](), dict[str, int](), None
    rest: Iterator[str] = iter(args)
    for word in rest:
        key, equals, value = word.partition("=")
        if key == "--within":
            within_s = _number(key, value if equals else next(rest, ""))
        elif word.startswith("-"):
            raise UserError(f"unknown option {word}\n{USAGE}")
        elif equals and names:
            if not value.isdecimal() or int(value) == 0:
                raise UserError(
                    f"{word}: a role keeps at least one replica; to stop the run: arriero cancel {names[0]}"
                )
            if key in wanted:
                raise UserError(f"{key}={wanted[key]} and {word}; give each role once")
            wanted[key] = int(value)
        else:
            names.append(word)
    if len(names) != 1 or not wanted:
        raise UserError(USAGE)
    return names[0], wanted, within_s


def _number(key: str, text: str) -> float:
    try:
        return _SECONDS.validate_python(text)
    except ValidationError:
        raise UserError(f"{key} takes seconds, more than none, not {text!r}") from None


def _check(spec: GraphSpec, options: RunOptions, wanted: dict[str, int]) -> None:
    """Raises UserError for what can't be scaled."""
    _refuse_fixed(options)
    for role in wanted:
        _check_known(spec, role)
        check_role(spec, role)


def _check_known(spec: GraphSpec, role: str) -> None:
    """Raises UserError for a role that the graph doesn't have."""
    if role in spec.roles:
        return
    near = nearest(role, spec.roles)
    hint = f"did you mean {near}?" if near else f"it can be {', '.join(sorted(elastic_roles(spec)))}"
    raise UserError(f"{spec.name} has no role {role}; {hint}")


def _refuse_fixed(options: RunOptions) -> None:
    """Raises UserError for a run whose replicas are what they are."""
    if options.deterministic:
        raise UserError("a deterministic run keeps its replicas: what it does depends on how many there are")
    if not options.elastic:
        raise UserError("the run is one process (--inline), or of an older arriero; nobody can join it")
