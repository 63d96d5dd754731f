"""The Volcano job of a run, and the secret with its code and its description.

secret RUN: start.py, the wheel, graph.json, ...  -> mounted at /arriero in every pod
job RUN: task hub (its end is the job's), one task for every other role (their containers start again)
job RUN-xxxxxxxx: a replica that joined, which belongs to the job RUN, as do its secret and a network policy
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import yaml
from kubernetes.client import ApiClient
from torchx.schedulers.kubernetes_scheduler import PLACEHOLDER_FIELD_PATH, role_to_pod
from torchx.specs import AppDef, Role, macros

from arriero.engine.errors import UserError
from arriero.launchers.appdef import HUB
from arriero.launchers.cluster import BUNDLE_MOUNT, HUBS, PLAN_FILE, Place, Plan
from arriero.launchers.conduct import BUNDLE, PREEMPTED
from arriero.launchers.place import ATTEMPT, HOST
from arriero.launchers.profile import KubernetesNeeds, Toleration
from arriero.launchers.ship import FOLDER

GROUP, VERSION = "batch.volcano.sh", "v1alpha1"
RUN, ROLE = "arriero/run", "arriero/role"  # labels: the name of the run's job, that of the task
_INDEX = "VC_TASK_INDEX"  # of Volcano's plugin `env`
_SECRET_BYTES = 1 << 20  # what an API server takes
_NAME_CHARS = 63
_GRACE_S = 60
_KILLED = 137


@dataclass(frozen=True)
class VolcanoRequest:
    """What is submitted to `namespace`: the job, and a secret made of the description of the run."""

    namespace: str
    job: dict[str, Any]
    plan: Plan

    def bundle(self) -> Callable[[str], dict[str, Any]]:
        """The secret, given the uid of the job. Raises UserError if it is too large."""
        folder = Path(self.plan.description)
        files = [p for p in (folder / FOLDER).glob("*") if p.is_file()]
        files += [folder / name for name in BUNDLE]
        data = {file.name: file.read_bytes() for file in files}
        data[PLAN_FILE] = self.plan.model_dump_json().encode()  # for replicas that are to join
        if (size := sum(map(len, data.values()))) > _SECRET_BYTES:
            raise UserError(
                f"code and description of the run are {size >> 10} KiB, more than a secret holds (1 MiB); "
                "install your own modules in the image and start from a folder without them"
            )
        encoded = {name: base64.b64encode(content).decode() for name, content in data.items()}
        name = self.job["metadata"]["name"]

        def secret(uid: str) -> dict[str, Any]:
            metadata = {"name": name, "ownerReferences": [owner(name, uid)]}
            return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": encoded}

        return secret

    def __repr__(self) -> str:
        """The manifest as YAML; what the secret holds is described, not shown."""
        name = self.job["metadata"]["name"]
        own = ("start.py", "code.json", "user.zip", "the wheel of arriero", *BUNDLE, PLAN_FILE)
        files = ", ".join(own)
        head = f"# Secret {name}, which belongs to the job, holds {files}.\n"
        dump = cast("Any", yaml).safe_dump  # the types of its streams are unknown
        return head + str(dump(self.job, sort_keys=False, width=110))


def owner(name: str, uid: str) -> dict[str, str]:
    """The job of the run, for what is deleted with it."""
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": "Job", "name": name, "uid": uid}


def opening(name: str, uid: str) -> dict[str, Any]:
    """The network policy that lets replicas which join reach the pods of the run, and be reached by them.

    Volcano's plugin `svc` makes one that lets in pods of the same job alone.
    """
    pods = {"matchLabels": {RUN: name}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": f"{name[: _NAME_CHARS - 5]}-joins", "ownerReferences": [owner(name, uid)]},
        "spec": {
            "podSelector": pods, "ingress": [{"from": [{"podSelector": pods}]}], "policyTypes": ["Ingress"],
        },
    }  # fmt: skip


def request(app: AppDef, plan: Plan) -> VolcanoRequest:
    """The job for `app`, which was made of `plan`. Raises UserError for what Kubernetes can't take."""
    needs, name = plan.profile.kubernetes, plan.name
    tasks = [_task(role, place, plan, name) for role, place in zip(app.roles, plan.places, strict=True)]
    spec: dict[str, Any] = {
        "schedulerName": "volcano",
        "queue": needs.queue,
        "minAvailable": sum(place.tasks for place in plan.places),
        "maxRetry": plan.profile.requeues + 1,
        "plugins": {} if plan.joins else {"env": [], "svc": ["--publish-not-ready-addresses"]},
        "tasks": tasks,
    }
    if needs.priority_class:
        spec["priorityClassName"] = needs.priority_class
    labels = {"app.kubernetes.io/name": "arriero", RUN: name}
    metadata: dict[str, Any] = {"name": name, "namespace": needs.namespace, "labels": labels}
    if plan.joins:
        (place,) = plan.places
        metadata |= {"name": _guest_name(name, place), "annotations": {ROLE: place.role}}
    job = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "Job", "metadata": metadata, "spec": spec}
    return VolcanoRequest(needs.namespace, job, plan)


def _guest_name(run: str, place: Place) -> str:
    """One that no other has, and that leaves room for its pod's."""
    own = f"-{uuid.uuid4().hex[:8]}"
    room = _NAME_CHARS - len(f"{own}-{place.name}-0")
    return run[:room].rstrip("-") + own


def _task(role: Role, place: Place, plan: Plan, name: str) -> dict[str, Any]:
    return {
        "name": place.name,
        "replicas": place.tasks,
        "template": _pod(role, place, plan, name),
        "policies": _guest_policies()
        if plan.joins
        else _hub_policies()
        if place.name == HUB
        else _policies(),
    }


def _hub_policies() -> list[dict[str, Any]]:
    """Its end is the job's. In this order: the first that fits counts."""
    again = [{"exitCode": code, "action": "RestartJob"} for code in (PREEMPTED, _KILLED)]
    return [
        {"event": "TaskCompleted", "action": "CompleteJob"},
        {"event": "PodEvicted", "action": "RestartJob"},
        *again,
        {"event": "PodFailed", "action": "TerminateJob"},
    ]


def _guest_policies() -> list[dict[str, Any]]:
    """Nothing comes again: who was told to leave has left, and who has vanished counts as one that left."""
    return [
        {"event": "TaskCompleted", "action": "CompleteJob"},
        {"event": "PodEvicted", "action": "CompleteJob"},
        {"event": "PodFailed", "action": "TerminateJob"},
    ]


def _policies() -> list[dict[str, Any]]:
    """None for a pod that was deleted (its node is drained): without one Volcano makes it anew.

    A container that ends starts again in its pod, so a pod fails only when its node takes it down. Volcano
    keeps such a pod, and not all versions know how to restart it alone.
    """
    return [{"event": "PodFailed", "action": "RestartJob"}]


def _pod(role: Role, place: Place, plan: Plan, name: str) -> dict[str, Any]:
    """TorchX's pod, and what it leaves out."""
    needs = plan.profile.kubernetes
    env = {HOST: "status.podIP", ATTEMPT: "metadata.annotations['volcano.sh/job-retry-count']"}
    replica = replace(
        role,
        args=[arg.replace(macros.replica_id, _INDEX) for arg in role.args],
        env=role.env | {key: PLACEHOLDER_FIELD_PATH + path for key, path in env.items()},
    )
    made = role_to_pod(place.name, replica, needs.service_account or None, 0, 0)
    client: Any = ApiClient()  # its method has no types
    pod: dict[str, Any] = client.sanitize_for_serialization(made)
    spec, (container,) = pod["spec"], pod["spec"]["containers"]
    spec["restartPolicy"] = "Never" if plan.joins or place.name == HUB else "OnFailure"
    spec["terminationGracePeriodSeconds"] = _GRACE_S
    spec["nodeSelector"] = {**spec.get("nodeSelector", {}), **needs.node_selector}
    spec["tolerations"] = [_toleration(t) for t in needs.tolerations]
    spec["imagePullSecrets"] = [{"name": secret} for secret in needs.image_pull_secrets]
    if needs.run_as_user is not None:
        spec["securityContext"] = {"runAsUser": needs.run_as_user, "fsGroup": needs.run_as_user}
    apart = _apart(name) if place.role == HUB and any(p.name == HUBS for p in plan.places) else {}
    if affinity := (_together(needs, name) if needs.topology else {}) | apart:
        spec["affinity"] = affinity
    shm = next(v for v in spec["volumes"] if v["name"] == "dshm")
    shm["emptyDir"]["sizeLimit"] = f"{needs.shm_gb}Gi"
    spec["volumes"].append({"name": "arriero", "secret": {"secretName": name, "defaultMode": 0o444}})
    container["volumeMounts"].append({"name": "arriero", "mountPath": BUNDLE_MOUNT, "readOnly": True})
    container["securityContext"] = {**container.get("securityContext", {}), "allowPrivilegeEscalation": False}
    container["env"] += [_secret(key, reference) for key, reference in plan.profile.secrets.items()]
    _name_gpus(container["resources"], needs)
    empty = [key for key in ("nodeSelector", "tolerations", "imagePullSecrets") if not spec[key]]
    for key in empty:
        del spec[key]
    pod["metadata"].setdefault("labels", {}).update({RUN: name, ROLE: place.name})
    return {"metadata": pod["metadata"], "spec": spec}


def _secret(name: str, reference: str) -> dict[str, Any]:
    """An environment variable from a secret of the namespace. Raises UserError."""
    secret, _, key = reference.partition("/")
    if not key:
        raise UserError(f"secrets.{name} = {reference!r}: on Kubernetes it is SECRET/KEY of the namespace")
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _toleration(t: Toleration) -> dict[str, str]:
    given = {"key": t.key, "operator": t.operator, "value": t.value, "effect": t.effect}
    return {k: v for k, v in given.items() if v}


def _together(needs: KubernetesNeeds, name: str) -> dict[str, Any]:
    """All pods of the job should stand where the label `topology` of the nodes is the same."""
    term = {"labelSelector": {"matchLabels": {"volcano.sh/job-name": name}}, "topologyKey": needs.topology}
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def _apart(name: str) -> dict[str, Any]:
    """The hubs of the run should stand on different nodes."""
    hubs = [{"key": ROLE, "operator": "In", "values": [HUB, HUBS]}]
    selector = {"matchLabels": {RUN: name}, "matchExpressions": hubs}
    term = {"labelSelector": selector, "topologyKey": "kubernetes.io/hostname"}
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def _name_gpus(resources: dict[str, Any], needs: KubernetesNeeds) -> None:
    """TorchX knows those of one maker."""
    for amounts in resources.values():
        if (count := amounts.pop("nvidia.com/gpu", None)) is not None:
            amounts[needs.gpu_resource] = count
