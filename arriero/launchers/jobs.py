"""Runs from outside: submit one to a cluster, and ask about, read and cancel any, from any process and host.

A run is named by its directory, in which `job.json` says what the scheduler calls it, or by that name itself:
`slurm://1234`, `kubernetes://namespace:name`.
"""

from __future__ import annotations

import os
import platform
import re
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import psutil
from torchx.schedulers.api import DescribeAppResponse, ListAppResponse, Stream
from torchx.specs import AppDef

from arriero.engine.errors import UserError
from arriero.launchers.cluster import JOB_FILE, PLAN_FILE, Guest, Job, Plan, cluster_app, guests_of
from arriero.launchers.profile import Cluster
from arriero.launchers.rundir import RunDir, read_json
from arriero.schemas.graph import GraphSpec
from arriero.schemas.run import RunOptions

if TYPE_CHECKING:
    from arriero.launchers.volcano import ArrieroVolcano

GOING = ("SUBMITTED", "PENDING", "RUNNING", "UNKNOWN")  # TorchX's states of what isn't over
_SETTLE_S = 60.0


@dataclass(frozen=True)
class Placed:
    """A run on a cluster as whoever lets replicas join it must know it."""

    spec: GraphSpec
    options: RunOptions
    plan: Plan


class Scheduler(Protocol):
    """The part of TorchX's schedulers that is used here."""

    def submit_dryrun(self, app: AppDef, cfg: dict[str, object]) -> object: ...
    def schedule(self, dryrun_info: object) -> str: ...
    def describe(self, app_id: str) -> DescribeAppResponse | None: ...
    def cancel(self, app_id: str) -> None: ...
    def list(self) -> Sequence[ListAppResponse]: ...
    def log_iter(
        self, app_id: str, role_name: str, k: int = 0, *, should_tail: bool, streams: Stream | None = None
    ) -> Iterator[str]: ...


def scheduler(on: Cluster) -> Scheduler:
    """Raises UserError if what it needs isn't installed."""
    if on == "slurm":
        from arriero.launchers import slurm

        return cast("Scheduler", slurm.create_scheduler("arriero"))  # TorchX leaves types of requests open
    return cast("Scheduler", _volcano())


def rendered(plan: Plan) -> str:
    """The script or manifest that `submit` would hand to the scheduler; asks no server."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchX's, about servers that aren't asked
        return repr(scheduler(plan.profile.on).submit_dryrun(cluster_app(plan), _config(plan)))


def submit(plan: Plan) -> Job:
    """Hand the run to the scheduler. Raises UserError in its words."""
    one = scheduler(plan.profile.on)
    one.schedule(one.submit_dryrun(cluster_app(plan), _config(plan)))
    return read_json(Path(plan.description) / JOB_FILE, Job)


def join(plan: Plan) -> Guest:
    """Submit one more replica for a run that goes on. Raises UserError in the scheduler's words."""
    one = scheduler(plan.profile.on)
    app_id = one.schedule(one.submit_dryrun(cluster_app(plan), _config(plan)))
    return Guest(role=plan.places[0].role, app_id=app_id)


def guests(job: Job) -> list[Guest]:
    """The jobs of replicas that joined the run or are to, as far as they aren't over; oldest first."""
    if job.on == "kubernetes":
        return _volcano().guests(job.app_id)
    if not job.run_dir:
        return []
    one = scheduler(_cluster(job))
    described = ((guest, one.describe(guest.app_id)) for guest in guests_of(Path(job.run_dir)))
    return [guest for guest, found in described if found is not None and found.state.name in GOING]


def placed(job: Job) -> Placed:
    """What a run on a cluster is, and where its roles went. Raises UserError."""
    if job.on == "kubernetes":
        files = _volcano().description(job.app_id)
        return Placed(
            GraphSpec.model_validate_json(files["graph.json"]),
            RunOptions.model_validate_json(files["options.json"]),
            Plan.model_validate_json(files[PLAN_FILE]),
        )
    if not job.run_dir:
        raise UserError(
            f"{job.handle} is a handle; give the directory of the run, which says how it was placed"
        )
    run = RunDir(Path(job.run_dir))
    return Placed(run.read_graph(), run.read_options(), read_json(run.path / PLAN_FILE, Plan))


def find(name: str) -> Job:
    """The run in this directory, or with this handle. Raises UserError."""
    on, separator, app_id = name.partition("://")
    match on if separator else "":
        case "slurm" | "kubernetes" as cluster:
            return Job(on=cluster, app_id=app_id, run_dir="")
        case "":
            pass
        case _:
            raise UserError(f"{name}: a handle is slurm://JOB or kubernetes://NAMESPACE:NAME")
    path = Path(name).absolute()
    if (path / JOB_FILE).exists():
        return read_json(path / JOB_FILE, Job)
    manifest = RunDir(path).read_manifest()
    return Job(on="local", app_id=f"{manifest.host}:{manifest.pid}", run_dir=str(path))


def cancel(job: Job) -> None:
    """Stop the run; what it has recorded stays. Raises UserError."""
    if job.on != "local":
        for guest in guests(job):  # those that still wait would start for nothing
            scheduler(job.on).cancel(guest.app_id)
        scheduler(job.on).cancel(job.app_id)
        return
    process = local_process(job)
    if process is None:
        raise UserError(f"{job.run_dir} doesn't run any more")
    process.send_signal(signal.SIGTERM)


def local_process(job: Job) -> psutil.Process | None:
    """The process that conducts a local run; None if it has ended. Raises UserError on another host."""
    host, _, pid = job.app_id.rpartition(":")
    if host != platform.node():
        raise UserError(f"{job.run_dir} runs on {host}; ask there, this is {platform.node()}")
    started = RunDir(Path(job.run_dir)).read_manifest().started.timestamp()
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(int(pid))
        # A younger process with the same number is another one.
        if process.create_time() <= started and process.pid != os.getpid():
            return process
    return None


def log_lines(job: Job, replica: str, *, follow: bool) -> Iterator[str]:
    """Lines of a replica's log ("generator-0"; "hub-0" is what `arriero run` shows). Raises UserError."""
    from arriero.launchers.logs import lines

    role, _, number = replica.rpartition("-")
    if not role or not number.isdecimal():
        raise UserError(f"{replica}: a replica is ROLE-NUMBER, such as hub-0 or generator-0")
    folder = RunDir(Path(job.run_dir)).logs
    if job.on == "local" or (job.on == "slurm" and job.run_dir):
        return lines(folder, replica, follow=follow, over=lambda: not running(job))
    return scheduler(job.on).log_iter(job.app_id, role, int(number), should_tail=follow)


def running(job: Job) -> bool:
    """Whether the run goes on, or waits to."""
    if job.on == "local":
        return local_process(job) is not None
    described = scheduler(job.on).describe(job.app_id)
    return described is not None and described.state.name in GOING


def follow(job: Job, show: Callable[[str], object]) -> int:
    """Show what the hub says until the run is over; the exit code of the run."""
    while True:
        for line in log_lines(job, "hub-0", follow=True):
            show(line.rstrip("\n"))
        described = _settled(job)
        if described is None or described.state.name not in GOING:
            return exit_code(described)


def exit_code(described: DescribeAppResponse | None) -> int:
    """Of a run that is over: 0 if it finished; that of the hub where the scheduler tells it; else 1."""
    if described is None or described.state.name == "SUCCEEDED":
        return 0 if described else 1
    told = re.search(r"exit code (\d+)", described.msg)
    return int(told[1]) or 1 if told else 1


def _settled(job: Job) -> DescribeAppResponse | None:
    """The state of a run whose hub has ended, when it is over; one that starts again takes its time."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        described = scheduler(_cluster(job)).describe(job.app_id)
        going = described is not None and described.state.name in GOING
        if not going or time.monotonic() > deadline:
            return described
        time.sleep(1.0)


def _volcano() -> ArrieroVolcano:
    try:
        from arriero.launchers import volcano
    except ImportError as error:
        raise UserError(f"{error.name} isn't installed; pip install 'arriero[kubernetes]'") from error
    return volcano.create_scheduler("arriero")


def _cluster(job: Job) -> Cluster:
    assert job.on != "local"
    return job.on


def _config(plan: Plan) -> dict[str, object]:
    """What TorchX's own options must hold; the rest stands in the plan."""
    if plan.profile.on == "slurm":
        return {}
    needs = plan.profile.kubernetes
    return {"queue": needs.queue, "namespace": needs.namespace, "validate_spec": False}
