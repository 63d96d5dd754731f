"""Kubernetes with Volcano: TorchX's scheduler, with one task per role and what TorchX leaves out.

TorchX makes a task of every replica, which no API server takes from a thousand replicas on, and lets pods run
on when another has failed. Here the hub's end is the job's, and everybody else's container is started again.
Apps that aren't ours are left to TorchX.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, cast

from kubernetes.client import ApiException
from torchx.schedulers.api import DescribeAppResponse, Stream
from torchx.schedulers.kubernetes_scheduler import JOB_STATE, KubernetesScheduler, Opts
from torchx.specs import AppDef, AppDryRunInfo, AppState, ReplicaStatus, Role, RoleStatus
from urllib3.exceptions import HTTPError

from arriero.engine.errors import UserError
from arriero.launchers.cluster import PLAN, Plan, remember, scheduler_name
from arriero.launchers.volcano_job import GROUP, VERSION, VolcanoRequest, request

_PODS = {
    "Pending": AppState.PENDING,
    "Running": AppState.RUNNING,
    "Succeeded": AppState.SUCCEEDED,
    "Failed": AppState.FAILED,
}
_REMEDIES = {
    401: "log in again: `kubectl auth whoami` says who you are",
    403: "ask for the right to create jobs.batch.volcano.sh and secrets: `kubectl auth can-i --list`",
    404: "is Volcano installed, and does the namespace exist? `kubectl api-resources | grep volcano`",
    409: "submit again",
    422: "correct the profile; `arriero check --on kubernetes` shows the manifest",
}


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
        name, custom, bundle = made.job["metadata"]["name"], self._custom(), made.bundle()
        place = {"group": GROUP, "version": VERSION, "namespace": made.namespace, "plural": "jobs"}
        with _told():
            job = custom.create_namespaced_custom_object(body=made.job, **place)
            try:
                # Pods wait for the secret, which goes when the job does.
                self._core().create_namespaced_secret(made.namespace, bundle(job["metadata"]["uid"]))
            except BaseException:
                custom.delete_namespaced_custom_object(name=name, **place)
                raise
        remember(made.plan, app_id := f"{made.namespace}:{name}")
        return app_id

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """Raises UserError if the API server doesn't answer."""
        namespace, name = app_id.split(":")
        with _told():
            try:
                job = self._custom().get_namespaced_custom_object(
                    group=GROUP, version=VERSION, namespace=namespace, plural="jobs", name=name
                )
            except ApiException as error:
                if _status(error) == 404:
                    return None
                raise
            pods = self._core().list_namespaced_pod(namespace, label_selector=f"volcano.sh/job-name={name}")
        state = cast("dict[str, Any]", job.get("status", {}).get("state", {}))
        phase = str(state.get("phase", "Pending"))
        roles: dict[str, RoleStatus] = {}
        code: int | None = None
        for pod in sorted(pods.items, key=lambda p: str(p.metadata.name)):
            role, number = _role_and_number(str(pod.metadata.name), name)
            replica = ReplicaStatus(
                id=number, role=role, hostname=pod.spec.node_name or "",
                state=_PODS.get(pod.status.phase, AppState.UNKNOWN),
            )  # fmt: skip
            roles.setdefault(role, RoleStatus(role, [])).replicas.append(replica)
            if role == "hub":
                code = _exit_code(pod)
        told = [phase, *([f"exit code {code}"] if code is not None else []), str(state.get("message", ""))]
        return DescribeAppResponse(
            app_id=app_id,
            state=JOB_STATE.get(phase, AppState.UNKNOWN),
            roles=[Role(name=k, image="", num_replicas=len(v.replicas)) for k, v in roles.items()],
            roles_statuses=list(roles.values()),
            num_restarts=int(job.get("status", {}).get("retryCount", 0)),
            msg=", ".join(part for part in told if part),
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
        pod = f"{name}-{scheduler_name(role_name)}-{k}"
        with _told():
            self._started(namespace, pod, wait=should_tail)
            answer = self._core().read_namespaced_pod_log(
                pod, namespace, follow=should_tail, _preload_content=False
            )
            for line in _lines(answer.stream()):
                if regex is None or re.search(regex, line):
                    yield line

    def _started(self, namespace: str, pod: str, *, wait: bool) -> None:
        """With `wait`, until the pod has begun or its job is over."""
        while wait:
            try:
                found = self._core().read_namespaced_pod(pod, namespace)
                if found.status.phase != "Pending":
                    return
            except ApiException as error:
                if _status(error) != 404:
                    raise
            time.sleep(0.5)

    def _cancel_existing(self, app_id: str) -> None:
        with _told():
            super()._cancel_existing(app_id)

    def _custom(self) -> Any:
        return self._custom_objects_api()  # it says of what it gives that it is an object

    def _core(self) -> Any:
        from kubernetes import client

        return client.CoreV1Api(self._api_client())


def create_scheduler(session_name: str, **_: object) -> ArrieroVolcano:
    return ArrieroVolcano(session_name=session_name)


@contextmanager
def _told() -> Generator[None]:
    """What the API server answers, in one line, with the remedy."""
    try:
        yield
    except ApiException as error:
        remedy = _REMEDIES.get(_status(error), "")
        raise UserError(
            f"the API server says: {_message(error)}" + (f"; {remedy}" if remedy else "")
        ) from error
    except HTTPError as error:
        raise UserError(
            f"the API server can't be reached ({error}); `kubectl config current-context` says which it is"
        ) from error


def _status(error: Any) -> int:
    return int(error.status or 0)


def _message(error: Any) -> str:
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"


def _role_and_number(pod: str, job: str) -> tuple[str, int]:
    role, _, number = pod.removeprefix(f"{job}-").rpartition("-")
    return role, int(number) if number.isdecimal() else 0


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
