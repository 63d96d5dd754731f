"""What a Kubernetes API server with Volcano refuses, by the schemas of Kubernetes."""

from __future__ import annotations

from typing import Any

import kubernetes_validate

KUBERNETES = "1.34"
_EVENTS = {"PodEvicted", "PodFailed", "TaskCompleted"}
_ACTIONS = {"RestartJob", "CompleteJob", "TerminateJob", "AbortJob"}

Json = dict[str, Any]


def problems(job: Json) -> list[str]:
    """What an API server with Volcano's admission would refuse."""
    found: list[str] = []
    names = [task["name"] for task in job["spec"]["tasks"]]
    if len({*names}) != len(names):
        found.append("duplicate task names")
    for owner in (job["spec"], *job["spec"]["tasks"]):
        for policy in owner.get("policies", []):
            if ("event" in policy) == ("exitCode" in policy):
                found.append(f"a policy has an event or an exit code: {policy}")
            if policy.get("event", "PodFailed") not in _EVENTS or policy["action"] not in _ACTIONS:
                found.append(f"unknown policy {policy}")
    for task in job["spec"]["tasks"]:
        found += [f"{task['name']}: {text}" for text in invalid("Pod", task["template"])]
        if len(pod := f"{job['metadata']['name']}-{task['name']}-{task['replicas'] - 1}") > 63:
            found.append(f"{pod} is longer than a label")
    return found


def invalid(kind: str, template: Json, version: str = "v1") -> list[str]:
    """What the schema of this kind, strictly, finds wrong."""
    whole = {**template, "apiVersion": version, "kind": kind}
    whole["metadata"] = {"name": "checked", **template.get("metadata", {})}
    try:
        kubernetes_validate.validate(whole, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [str(error.message)]
    return []
