"""Kubernetes with Volcano: TorchX's scheduler, with one task per role and what TorchX leaves out.

TorchX makes a task of every replica, which no API server takes from a thousand replicas on, and lets pods run
on when another has failed. Here the hub's end is the job's, and everybody else's container is started again.
Apps that aren't ours are left to TorchX.
"""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, cast

from kubernetes.client import ApiException
from torchx.schedulers.api import DescribeAppResponse, Stream
from torchx.schedulers.kubernetes_scheduler import JOB_STATE, KubernetesScheduler, Opts
from torchx.specs import AppDef, AppDryRunInfo, AppState, ReplicaStatus, Role, RoleStatus

from arriero.engine.errors import UserError
from arriero.launchers.api_answers import http_code, told
from arriero.launchers.appdef import HUB
from arriero.launchers.cluster import HUBS, PLAN, Guest, Plan, remember, scheduler_name
from arriero.launchers.volcano_job import (
    GROUP,
    ROLE,
    RUN,
    VERSION,
    VolcanoRequest,
    opening,
    owner,
    request,
)  # fmt: skip
from arriero.schemas.crew import joined_line

_PODS = {
    "Pending": AppState.PENDING,
    "Running": AppState.RUNNING,
    "Succeeded": AppState.SUCCEEDED,
    "Failed": AppState.FAILED,
}
_OVER = (AppState.SUCCEEDED, AppState.FAILED, AppState.CANCELLED)
_FIRST_BYTES = 4096  # of the output of a replica that joined, within which it says its name


class ArrieroVolcano(KubernetesScheduler):
    """What `-s kubernetes` of TorchX means where arriero is installed."""

    def _submit_dryrun(self, app: AppDef, cfg: Opts) -> AppDryRunInfo[Any, Opts]:
        if PLAN not in app.metadata:
            return super()._submit_dryrun(app, cfg)
        plan = Plan.model_validate_json(app.metadata[PLAN])
        if plan.profile.on != "kubernetes":
            raise UserError(
                "this app was made for Slurm; give the component --on kubernetes, and its profile"
            )
        return AppDryRunInfo(request(app, plan), repr)

    def schedule(self, dryrun_info: AppDryRunInfo[Any, Any]) -> str:
        made = dryrun_info.request
        if not isinstance(made, VolcanoRequest):
            return super().schedule(dryrun_info)
        if made.plan.joins:
            return self._join(made)
        name, custom, bundle = made.job["metadata"]["name"], self._custom(), made.bundle()
        place = _jobs(made.namespace)
        with told():
            job = custom.create_namespaced_custom_object(body=made.job, **place)
            try:
                # Pods wait for the secret, which goes when the job does.
                self._core().create_namespaced_secret(made.namespace, bundle(job["metadata"]["uid"]))
            except BaseException:
                custom.delete_namespaced_custom_object(name=name, **place)
                raise
        remember(made.plan, app_id := f"{made.namespace}:{name}")
        return app_id

    def _join(self, made: VolcanoRequest) -> str:
        """Submit one more replica; its handle."""
        run, custom = made.plan.name, self._custom()
        with told():
            uid = custom.get_namespaced_custom_object(name=run, **_jobs(made.namespace))["metadata"]["uid"]
            try:
                self._networking().create_namespaced_network_policy(made.namespace, opening(run, uid))
            except ApiException as error:
                if http_code(error) != 409:  # the first that joined has made it
                    raise
            metadata = {**made.job["metadata"], "ownerReferences": [owner(run, uid)]}
            custom.create_namespaced_custom_object(
                body={**made.job, "metadata": metadata}, **_jobs(made.namespace)
            )
        return f"{made.namespace}:{metadata['name']}"

    def guests(self, app_id: str) -> list[Guest]:
        """The jobs of replicas that joined the run or are to, as far as they aren't over; oldest first."""
        namespace, name = app_id.split(":")
        with told():
            found: Any = self._custom().list_namespaced_custom_object(
                label_selector=f"{RUN}={name}", **_jobs(namespace)
            )
        going = [
            job["metadata"] for job in found["items"]
            if job["metadata"]["name"] != name and JOB_STATE.get(_phase(job)) not in _OVER
        ]  # fmt: skip
        going.sort(key=lambda m: (m["creationTimestamp"], m["name"]))
        return [Guest(role=m["annotations"][ROLE], app_id=f"{namespace}:{m['name']}") for m in going]

    def description(self, app_id: str) -> dict[str, bytes]:
        """What was submitted with the run: files by name, with its plan. Raises UserError."""
        namespace, name = app_id.split(":")
        with told():
            job = self._custom().get_namespaced_custom_object(name=name, **_jobs(namespace))
            run = job["metadata"].get("labels", {}).get(RUN)
            if run is None:
                raise UserError(f"kubernetes://{app_id} is no run of this arriero, or of an older one")
            if run != name:
                raise UserError(
                    f"kubernetes://{app_id} is a replica that joined; the run is kubernetes://{namespace}:{run}"
                )
            data = self._core().read_namespaced_secret(name, namespace).data
        return {key: base64.b64decode(value) for key, value in data.items()}

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """Raises UserError if the API server doesn't answer."""
        namespace, name = app_id.split(":")
        with told():
            try:
                job = self._custom().get_namespaced_custom_object(name=name, **_jobs(namespace))
            except ApiException as error:
                if http_code(error) == 404:
                    return None
                raise
            whole = job["metadata"].get("labels", {}).get(RUN) == name  # with those that joined
            chosen = f"{RUN}={name}" if whole else f"volcano.sh/job-name={name}"
            pods = self._core().list_namespaced_pod(namespace, label_selector=chosen)
        state = cast("dict[str, Any]", job.get("status", {}).get("state", {}))
        phase = _phase(job)
        roles: dict[str, RoleStatus] = {}
        code: int | None = None
        for pod in sorted(pods.items, key=lambda p: str(p.metadata.name)):
            role, number = _role_and_number(pod, name)
            replica = ReplicaStatus(
                id=number, role=role, hostname=pod.spec.node_name or "",
                state=_PODS.get(pod.status.phase, AppState.UNKNOWN),
            )  # fmt: skip
            roles.setdefault(role, RoleStatus(role, [])).replicas.append(replica)
            if (role, number) == (HUB, 0):
                code = _exit_code(pod)
        parts = [phase, *([f"exit code {code}"] if code is not None else []), str(state.get("message", ""))]
        return DescribeAppResponse(
            app_id=app_id,
            state=JOB_STATE.get(phase, AppState.UNKNOWN),
            roles=[Role(name=k, image="", num_replicas=len(v.replicas)) for k, v in roles.items()],
            roles_statuses=list(roles.values()),
            num_restarts=int(job.get("status", {}).get("retryCount", 0)),
            msg=", ".join(part for part in parts if part),
        )

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
        """Lines of a pod's log; with `should_tail` until it ends. Raises UserError."""
        namespace, name = app_id.split(":")
        with told():
            pod = self._pod_of(namespace, name, role_name, k)
            self._started(namespace, name, pod, wait=should_tail)
            answer = self._core().read_namespaced_pod_log(
                pod, namespace, follow=should_tail, _preload_content=False
            )
            for line in _lines(answer.stream()):
                if regex is None or re.search(regex, line):
                    yield line

    def _pod_of(self, namespace: str, name: str, role: str, number: int) -> str:
        """The name of a replica's pod. Raises UserError for one that isn't known."""
        task, core = scheduler_name(role), self._core()
        if role == HUB and number > 0:
            task, number = HUBS, number - 1
        job = self._custom().get_namespaced_custom_object(name=name, **_jobs(namespace))
        if number < sum(t["replicas"] for t in job["spec"]["tasks"] if t["name"] == task):
            return f"{name}-{task}-{number}"
        pods = core.list_namespaced_pod(namespace, label_selector=f"{RUN}={name},{ROLE}={task}").items
        for pod in (p.metadata.name for p in pods if p.status.phase != "Pending"):
            if not pod.startswith(f"{name}-{task}-"):
                said = core.read_namespaced_pod_log(pod, namespace, limit_bytes=_FIRST_BYTES)
                if joined_line(f"{role}-{number}") in said.splitlines():
                    return str(pod)
        raise UserError(
            f"kubernetes://{namespace}:{name} has no log of {role}-{number}; arriero status says who is there"
        )

    def _started(self, namespace: str, job: str, pod: str, *, wait: bool) -> None:
        """With `wait`, until the pod has begun or its job is over."""
        while wait:
            try:
                found = self._core().read_namespaced_pod(pod, namespace)
                if found.status.phase != "Pending":
                    return
            except ApiException as error:
                if http_code(error) != 404:
                    raise
                found = self._custom().get_namespaced_custom_object(name=job, **_jobs(namespace))
                if JOB_STATE.get(_phase(found)) in _OVER:
                    return
            time.sleep(0.5)

    def _cancel_existing(self, app_id: str) -> None:
        with told():
            super()._cancel_existing(app_id)

    def _custom(self) -> Any:
        return self._custom_objects_api()  # it says of what it gives that it is an object

    def _core(self) -> Any:
        from kubernetes import client

        return client.CoreV1Api(self._api_client())

    def _networking(self) -> Any:
        from kubernetes import client

        return client.NetworkingV1Api(self._api_client())


def create_scheduler(session_name: str, **_: object) -> ArrieroVolcano:
    return ArrieroVolcano(session_name=session_name)


def _jobs(namespace: str) -> dict[str, str]:
    """Where the API server has Volcano's jobs."""
    return {"group": GROUP, "version": VERSION, "namespace": namespace, "plural": "jobs"}


def _phase(job: Any) -> str:
    return str(job.get("status", {}).get("state", {}).get("phase", "Pending"))


def _role_and_number(pod: Any, job: str) -> tuple[str, int]:
    role, _, number = str(pod.metadata.name).removeprefix(f"{job}-").rpartition("-")
    task = cast("dict[str, str]", pod.metadata.labels or {}).get(ROLE, role)
    index = int(number) if number.isdecimal() else 0
    return (HUB, index + 1) if task == HUBS else (task, index)


def _exit_code(pod: Any) -> int | None:
    """Of its container; None while it runs."""
    for status in pod.status.container_statuses or ():
        if status.state and status.state.terminated:
            return int(status.state.terminated.exit_code)
    return None


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line.decode(errors="replace") + "\n" for line in whole)
    if rest:
        yield rest.decode(errors="replace")
