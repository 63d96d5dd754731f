"""Volcano's job of a graph on Kubernetes, by the schemas of its API."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from arriero.engine.errors import UserError
from arriero.launchers.cluster import Plan, cluster_app, guest_plan
from arriero.launchers.conduct import PREEMPTED
from arriero.launchers.profile import (
    KubernetesNeeds,
    Profile,
    RoleNeeds,
    Toleration,
)  # fmt: skip
from tests.cluster.placing import placed

EVERYTHING = Profile(
    on="kubernetes",
    image="registry.example/arriero:1",
    gpus=1,
    secrets={"HF_TOKEN": "hf/token"},
    mounts=("arriero-runs:/runs", "/data:/data:ro"),
    kubernetes=KubernetesNeeds(
        namespace="rl", queue="training", topology="topology.kubernetes.io/zone", priority_class="high",
        node_selector={"gpu": "h100"}, tolerations=(Toleration(key="nvidia.com/gpu", effect="NoSchedule"),),
        image_pull_secrets=("registry",), gpu_resource="amd.com/gpu", shm_gb=64, run_as_user=1000,
        service_account="trainer",
    ),
)  # fmt: skip


def volcano_job(made: Plan) -> dict[str, Any]:
    pytest.importorskip("kubernetes", reason="pip install 'arriero[kubernetes]'")
    from arriero.launchers.volcano_job import request

    return request(cluster_app(made), made).job


def test_a_job_with_everything_is_valid_for_kubernetes() -> None:
    pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    from tests.cluster.admission import problems

    job = volcano_job(placed(EVERYTHING, ranks=2))
    assert problems(job) == []
    hub, trainer = (next(t for t in job["spec"]["tasks"] if t["name"] == n) for n in ("hub", "trainer"))
    spec = trainer["template"]["spec"]
    (container,) = spec["containers"]
    assert container["resources"]["limits"]["amd.com/gpu"] == "2"
    reference = {"secretKeyRef": {"name": "hf", "key": "token"}}
    assert {"name": "HF_TOKEN", "valueFrom": reference} in container["env"]
    assert spec["nodeSelector"] == {"gpu": "h100"}
    assert {"medium": "Memory", "sizeLimit": "64Gi"} in [v.get("emptyDir") for v in spec["volumes"]]
    assert {"name": "mount-1", "mountPath": "/data", "readOnly": True} in container["volumeMounts"]
    assert (hub["template"]["spec"]["restartPolicy"], spec["restartPolicy"]) == ("Never", "OnFailure")
    assert container["command"][-4:] == ["--replica", "VC_TASK_INDEX", "--ranks", "2"]


def test_three_hubs_are_a_task_of_the_first_and_one_of_the_others_on_different_nodes() -> None:
    pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    from tests.cluster.admission import problems

    job = volcano_job(placed(EVERYTHING, hubs=3))
    assert problems(job) == []
    first, others, *_ = job["spec"]["tasks"]
    assert [(t["name"], t["replicas"]) for t in (first, others)] == [("hub", 1), ("hubs", 2)]
    assert job["spec"]["minAvailable"] == 8
    assert {"event": "TaskCompleted", "action": "CompleteJob"} in first["policies"]
    assert {"event": "TaskCompleted", "action": "CompleteJob"} not in others["policies"]
    assert others["template"]["spec"]["restartPolicy"] == "OnFailure"
    for task in (first, others):
        affinity = task["template"]["spec"]["affinity"]
        (term,) = affinity["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        assert term["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
        assert "podAffinity" in affinity, "the zone that all share stays as it was"
    (container,) = others["template"]["spec"]["containers"]
    assert container["command"][-4:] == ["--replica", "VC_TASK_INDEX", "--hubs", "3"]
    assert {"name": "ARRIERO_FIRST", "value": "1"} in container["env"]


def test_a_replica_that_joins_is_a_valid_job_of_the_run_with_the_needs_of_its_role() -> None:
    pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    from arriero.launchers.volcano_job import opening
    from tests.cluster.admission import invalid, problems

    made = placed(replace(EVERYTHING, roles={"generator": RoleNeeds(gpus=2)}), generators=4)
    whole = next(t for t in volcano_job(made)["spec"]["tasks"] if t["name"] == "generator")
    job = volcano_job(guest_plan(made, "generator"))
    assert problems(job) == []
    (task,) = job["spec"]["tasks"]
    assert (task["replicas"], job["spec"]["minAvailable"], job["spec"]["queue"]) == (1, 1, "training")
    assert re.fullmatch("toy-1-[0-9a-f]{8}", job["metadata"]["name"])
    labels = task["template"]["metadata"]["labels"]
    assert (job["metadata"]["labels"]["arriero/run"], labels["arriero/run"]) == ("toy-1", "toy-1")
    pod, other = task["template"]["spec"], whole["template"]["spec"]
    assert pod["volumes"] == other["volumes"]
    (own,), (others,) = pod["containers"], other["containers"]
    assert own["resources"] == others["resources"]
    assert own["env"] == others["env"]
    assert own["command"][-3:] == ["--role", "generator", "--join"]
    assert pod["restartPolicy"] == "Never"
    assert invalid("NetworkPolicy", opening("toy-1", "u"), "networking.k8s.io/v1") == []


@pytest.mark.parametrize("run_id", ["r" * 20 + "-" * 10 + "r" * 200, "2nd_run", "評価"])
def test_names_are_ones_of_services_and_leave_room_for_those_of_pods(run_id: str) -> None:
    pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    from tests.cluster.admission import problems

    made = placed(EVERYTHING, run_id=run_id, generators=1000)
    job, guest = volcano_job(made), volcano_job(guest_plan(made, "generator"))
    name = job["metadata"]["name"]
    for each in (job, guest):
        assert problems(each) == []
        assert each["metadata"]["labels"]["arriero/run"] == name
        # Volcano makes a service of the job's name, for which RFC 1035 holds.
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", each["metadata"]["name"])


def test_the_plain_jobs_of_the_documentation_are_valid_with_the_templates_of_a_run() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate").validate
    page = (Path(__file__).parents[1] / "docs" / "kubernetes.md").read_text()
    generator, hub, index = (
        yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    )
    tasks = {t["name"]: t for t in volcano_job(placed(EVERYTHING, generators=4))["spec"]["tasks"]}
    for job in (generator, hub):
        template = tasks[job["metadata"]["name"].removeprefix("RUN-")]["template"]
        template["spec"].pop("schedulerName", None)
        template["spec"]["containers"][0]["env"].append(index)
        job["spec"]["template"] = template
        validate({**job, "metadata": {**job["metadata"], "name": "run"}}, "1.34", strict=True)
        assert job["spec"]["suspend"]
    assert generator["spec"]["completions"] == tasks["generator"]["replicas"]
    # Only a pod that never restarts by itself may have a policy for its failures.
    assert hub["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    assert hub["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [PREEMPTED, 137]


def test_a_thousand_replicas_are_one_task_and_fit_into_what_a_server_takes() -> None:
    job = volcano_job(placed(EVERYTHING, generators=1024))
    assert job["spec"]["minAvailable"] == 1029
    assert len(json.dumps(job)) < 1_000_000


def test_what_kubernetes_needs_and_the_profile_lacks_is_named() -> None:
    with pytest.raises(UserError, match="needs an image with Python and torch"):
        placed(Profile(on="kubernetes"))
    secret = Profile(on="kubernetes", image="i", secrets={"HF_TOKEN": "hf"})
    with pytest.raises(UserError, match=r"secrets\.HF_TOKEN = 'hf': on Kubernetes it is SECRET/KEY"):
        volcano_job(placed(secret))
