"""Slurm: TorchX's scheduler, with jobs of one component (or step) per role, and without need of accounting.

TorchX makes a component of every replica, of which Slurm takes 128, and kills the whole job when one of them
fails. Here a role is one component, and the replicas' agents live as long as the run. Apps that aren't ours
are left to TorchX, except that their state is asked of `scontrol`, which answers on every version.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from shutil import which
from typing import Any

from torchx.schedulers.api import DescribeAppResponse, ListAppResponse, Stream
from torchx.schedulers.slurm_scheduler import SlurmOpts, SlurmScheduler, appstate_from_slurm_state
from torchx.specs import AppDef, AppDryRunInfo, AppState, CfgVal, ReplicaStatus, Role, RoleStatus

from arriero.engine.errors import UserError
from arriero.launchers.cluster import PLAN, Plan, remember
from arriero.launchers.profile import SlurmNeeds
from arriero.launchers.rundir import RunDir
from arriero.launchers.slurm_script import JOB_LOG, guest_script, script

# How sbatch begins what it doesn't like, and what to do about it.
_REMEDIES = {
    "invalid partition": "name one that `sinfo` lists in slurm.partition of the profile",
    "Invalid account": "name one that `sacctmgr show assoc user=$USER` lists in slurm.account of the profile",
    "Invalid qos": "correct slurm.qos of the profile",
    "Invalid feature": "correct slurm.constraint of the profile",
    "Invalid generic resource": "no node has such GPUs: correct gpus and slurm.gpu_type of the profile",
    "Requested node configuration": "no node has so much; `sinfo -o '%n %c %m %G'` shows what there is",
    "Memory specification can not be satisfied": "no node has so much memory; lower memory_mb of the profile",
    "Requested time limit": "lower slurm.time of the profile",
    "More processors requested": "lower cpus of the profile",
    "Unable to contact slurm controller": "is this a login node, and is slurmctld running?",
}


@dataclass(frozen=True)
class SbatchRequest:
    """A script for the standard input of sbatch."""

    text: str
    plan: Plan

    def __repr__(self) -> str:
        return self.text


class ArrieroSlurm(SlurmScheduler):
    """What `-s slurm` of TorchX means where arriero is installed."""

    def _submit_dryrun(self, app: AppDef, cfg: SlurmOpts) -> AppDryRunInfo[Any, SlurmOpts]:
        if PLAN not in app.metadata:
            return super()._submit_dryrun(app, cfg)
        plan = Plan.model_validate_json(app.metadata[PLAN])
        needs = _overridden(plan.profile.slurm, cfg)
        plan = plan.model_copy(update={"profile": replace(plan.profile, slurm=needs)})
        text = guest_script(plan) if plan.joins else script(plan)
        return AppDryRunInfo(SbatchRequest(text, plan), repr)

    def schedule(self, dryrun_info: AppDryRunInfo[Any, Any]) -> str:
        request = dryrun_info.request
        if not isinstance(request, SbatchRequest):
            return super().schedule(dryrun_info)
        app_id = _slurm(["sbatch", "--parsable"], request.text).strip().partition(";")[0]
        remember(request.plan, app_id)
        return app_id

    def _cancel_existing(self, app_id: str) -> None:
        if (run_dir := _run_dir(_jobs(app_id))) is not None:
            RunDir(run_dir).cancelled.touch()
        _slurm(["scancel", app_id])

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """Raises UserError if Slurm doesn't answer."""
        jobs = _jobs(app_id)
        if not jobs:
            return self._describe_sacct(app_id) if which("sacct") else None
        roles: dict[str, Role] = {}
        statuses: dict[str, RoleStatus] = {}
        for job in jobs:
            state, name = _state(job), job["JobName"]
            role = roles.setdefault(name, Role(name=name, image="", num_replicas=0))
            status = statuses.setdefault(name, RoleStatus(name, []))
            for _ in range(int(job.get("NumTasks", "1") or 1)):
                number = role.num_replicas
                role.num_replicas += 1
                status.replicas.append(ReplicaStatus(id=number, role=name, state=state, hostname=_nodes(job)))
        first = jobs[0]
        return DescribeAppResponse(
            app_id=app_id,
            state=_together([_state(job) for job in jobs]),
            roles=list(roles.values()),
            roles_statuses=list(statuses.values()),
            num_restarts=int(first.get("Restarts", "0")),
            msg=f"{first['JobState']}, exit code {first.get('ExitCode')}, reason {first.get('Reason')}",
        )

    def list(self, cfg: Mapping[str, CfgVal] | None = None) -> list[ListAppResponse]:
        """Jobs of this user that Slurm remembers. Raises UserError."""
        found: dict[str, list[dict[str, str]]] = {}
        for job in _jobs():
            found.setdefault(job.get("HetJobId", job["JobId"]), []).append(job)
        return [
            ListAppResponse(app_id=k, state=_together([_state(j) for j in v]), name=v[0]["JobName"])
            for k, v in found.items()
        ]

    def log_iter(
        self,
        app_id: str,
        role_name: str,
        k: int = 0,
        regex: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        should_tail: bool = False,
        streams: Stream | None = None,
    ) -> Iterable[str]:
        run_dir = _run_dir(_jobs(app_id))
        if run_dir is None:
            return super().log_iter(app_id, role_name, k, regex, since, until, should_tail, streams)
        from arriero.launchers.logs import lines

        found = lines(
            run_dir / "logs", f"{role_name}-{k}", follow=should_tail, over=lambda: self._over(app_id)
        )
        return (line for line in found if regex is None or re.search(regex, line))

    def _over(self, app_id: str) -> bool:
        described = self.describe(app_id)
        return described is None or described.state.name in ("SUCCEEDED", "FAILED", "CANCELLED", "UNKNOWN")


def create_scheduler(session_name: str, **_: object) -> ArrieroSlurm:
    return ArrieroSlurm(session_name=session_name)


def _overridden(needs: SlurmNeeds, cfg: SlurmOpts) -> SlurmNeeds:
    """What `-cfg` of TorchX says goes before the profile."""
    options = {"comment": cfg.comment, "mail-user": cfg.mail_user, "mail-type": cfg.mail_type}
    return replace(
        needs,
        partition=cfg.partition or needs.partition,
        account=cfg.account or needs.account,
        time=cfg.time or needs.time,
        qos=cfg.qos or needs.qos,
        constraint=cfg.constraint or needs.constraint,
        options={**needs.options, **{key: str(value) for key, value in options.items() if value}},
    )


def _slurm(command: list[str], stdin: str = "") -> str:
    """Standard output. Raises UserError with what the command said, and what to do about it."""
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError as error:
        raise UserError(
            f"{command[0]} isn't here; submit from a login node of the cluster (arriero check works anywhere)"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{command[0]} didn't answer within 120 s; is slurmctld running?") from error
    if done.returncode == 0:
        return done.stdout
    said = "; ".join(line.strip() for line in done.stderr.splitlines() if line.strip()) or "no reason given"
    remedy = next((r for known, r in _REMEDIES.items() if known.lower() in said.lower()), "")
    raise UserError(said + (f"; {remedy}" if remedy else ""))


def _jobs(app_id: str = "") -> list[dict[str, str]]:
    """Components of a job, or all jobs, as scontrol shows them; none of a job it doesn't know any more."""
    try:
        text = _slurm(["scontrol", "show", "job", "-o", *([app_id] if app_id else [])])
    except UserError as error:
        if "Invalid job id" in str(error):
            return []
        raise
    jobs = [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in text.splitlines()]
    return [job for job in jobs if "JobId" in job]


def _run_dir(jobs: list[dict[str, str]]) -> Path | None:
    """That of one of our jobs: it stands in the path of the job's own log."""
    log = Path(jobs[0].get("StdOut", "")) if jobs else Path()
    return log.parent.parent if log.name == JOB_LOG else None


def _state(job: Mapping[str, str]) -> AppState:
    if job["JobState"] in ("COMPLETING", "CONFIGURING"):
        return AppState.RUNNING
    return appstate_from_slurm_state(job["JobState"])


def _nodes(job: Mapping[str, str]) -> str:
    return job.get("NodeList", "").replace("(null)", "")


def _together(states: list[AppState]) -> AppState:
    """The state of all components: that of the first in this order which any of them is in."""
    order = (
        AppState.RUNNING, AppState.PENDING, AppState.FAILED, AppState.CANCELLED, AppState.UNKNOWN,
    )  # fmt: skip
    return next((state for state in order if state in states), AppState.SUCCEEDED)
