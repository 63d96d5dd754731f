"""A stand-in for a Kubernetes API server with Volcano: what arriero and TorchX ask of it, over HTTP.

Objects are validated against the schemas of Kubernetes. A pod is a process of this machine: its container's
command, with the environment that Kubernetes and Volcano would give it. Volumes aren't mounted; a secret's
folder takes the place of its mount path in the command. Restarts, policies and phases are Volcano's.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import cast
from urllib.parse import parse_qs, urlparse

from tests.cluster.admission import Json, invalid, problems

GRACE_S = 8.0
_JOBS = re.compile(r"/apis/batch\.volcano\.sh/v1alpha1/namespaces/([^/]+)/jobs(?:/([^/]+))?(/status)?")
_SECRETS = re.compile(r"/api/v1/namespaces/([^/]+)/secrets(?:/([^/]+))?")
_POLICIES = re.compile(r"/apis/networking\.k8s\.io/v1/namespaces/([^/]+)/networkpolicies")
_PODS = re.compile(r"/api/v1/namespaces/([^/]+)/pods(?:/([^/]+))?(/log)?")


@dataclass
class Pod:
    """One pod and the process that its container is."""

    name: str
    index: int
    task: Json
    log: Path
    command: list[str]
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    killed: bool = False
    evicted: bool = False

    labels: dict[str, str] = field(default_factory=dict[str, str])

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, env=self.environment, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def code(self) -> int | None:
        """As Kubernetes tells it: 137 for SIGKILL."""
        code = self.process.poll() if self.process else None
        return code if code is None or code >= 0 else 128 - code

    def phase(self) -> str:
        code = self.code()
        return "Running" if code is None else "Failed" if code else "Succeeded"

    def kill(self, grace_s: float = GRACE_S) -> None:
        """SIGTERM to its first process; SIGKILL to all after the grace period."""
        assert self.process is not None
        self.killed = True
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(grace_s)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


@dataclass
class Stored:
    """A job with its pods."""

    body: Json
    pods: list[Pod] = field(default_factory=list["Pod"])
    phase: str = "Pending"
    retries: int = 0

    @property
    def aborted(self) -> bool:
        """Another thread says so."""
        return self.phase == "Aborted"


def _secrets(job: Json) -> set[str]:
    """Those that pods of the job mount."""
    volumes = [v for task in job["spec"]["tasks"] for v in task["template"]["spec"]["volumes"]]
    return {v["secret"]["secretName"] for v in volumes if "secret" in v}


def _fits(labels: dict[str, str], query: dict[str, list[str]]) -> bool:
    """Whether an object with these labels is among those that are asked for."""
    selector = query.get("labelSelector", [""])[0]
    wanted = dict(term.split("=", 1) for term in selector.split(",") if term)
    return wanted.items() <= labels.items()


def _policy(stored: Stored, pod: Pod, event: str, code: int = 0) -> str | None:
    """The action of the first policy that fits, of the task or else of the job."""
    for policy in (*pod.task.get("policies", []), *stored.body["spec"].get("policies", [])):
        if policy.get("event") == event or (code and policy.get("exitCode") == code):
            return cast("str", policy["action"])
    return None


class ApiServer:
    """Serves on a free port of loopback; `kubeconfig` names it. `refuse`: answer every POST with this.

    `full`: there is no room for another job, so it stays pending.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs: dict[tuple[str, str], Stored] = {}
        self.secrets: dict[tuple[str, str], Json] = {}
        self.policies: dict[tuple[str, str], Json] = {}
        self.refuse: tuple[int, str] | None = None
        self.lock = threading.RLock()
        self.over = self.full = False
        handler = type("Handler", (_Handler,), {"api": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self.kubeconfig = folder / "kubeconfig"
        cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{self._http.server_port}"}}
        context = {"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "rl"}}
        user: Json = {"name": "u", "user": {}}
        config: Json = {"apiVersion": "v1", "kind": "Config", "current-context": "x"}
        config |= {"clusters": [cluster], "contexts": [context], "users": [user]}
        self.kubeconfig.write_text(json.dumps(config))

    def close(self) -> None:
        self.over = True
        for job in self.jobs.values():
            for pod in job.pods:
                if pod.process is not None and pod.process.poll() is None:
                    os.killpg(pod.process.pid, signal.SIGKILL)
                    pod.process.wait()
        self._http.shutdown()
        self._http.server_close()

    def evict(self, pod: Pod, grace_s: float) -> None:
        """As `kubectl drain` does: the pod is told, ended after `grace_s`, and gone."""
        pod.kill(grace_s)
        pod.evicted = True

    def run(self, namespace: str, stored: Stored) -> None:
        """The life of a job, as Volcano's controller leads it."""
        needed = {(namespace, secret) for secret in _secrets(stored.body)}
        while self.full or not needed <= {*self.secrets}:  # the kubelet waits for what it has to mount
            if self.over or stored.aborted:
                return
            time.sleep(0.05)
        self._start(namespace, stored)
        while not self.over and stored.phase == "Running":
            time.sleep(0.05)
            with self.lock:
                action = None if stored.aborted else self._action(namespace, stored)
                if action is None:
                    continue
                stored.phase = {
                    "CompleteJob": "Completing", "TerminateJob": "Terminating", "RestartJob": "Restarting",
                }[action]  # fmt: skip
            for pod in stored.pods:
                pod.kill()
            if action == "RestartJob" and stored.retries + 1 < stored.body["spec"]["maxRetry"]:
                stored.retries += 1
                self._start(namespace, stored)
            else:
                ends = {"CompleteJob": "Completed", "TerminateJob": "Terminated", "RestartJob": "Failed"}
                stored.phase = ends[action]
        if stored.aborted:
            for pod in stored.pods:
                pod.kill()

    def _start(self, namespace: str, stored: Stored) -> None:
        stored.pods = [
            self._pod(namespace, stored, task, index)
            for task in stored.body["spec"]["tasks"]
            for index in range(task["replicas"])
        ]
        for pod in stored.pods:
            pod.start()
        stored.phase = "Running"

    def _action(self, namespace: str, stored: Stored) -> str | None:
        """What the policies say of how the pods are.

        Containers of OnFailure start again; a pod that is gone, and of which no policy says anything, is made
        anew.
        """
        for at, pod in enumerate(stored.pods):
            if pod.evicted:
                if action := _policy(stored, pod, "PodEvicted"):
                    return action
                stored.pods[at] = self._pod(namespace, stored, pod.task, pod.index)
                stored.pods[at].start()
                continue
            code = pod.code()
            if code is None or pod.killed:
                continue
            if code and pod.task["template"]["spec"]["restartPolicy"] == "OnFailure":
                pod.restarts += 1
                pod.start()
            elif action := _policy(stored, pod, "PodFailed" if code else "TaskCompleted", code):
                return action
        return None

    def _pod(self, namespace: str, stored: Stored, task: Json, index: int) -> Pod:
        job = stored.body["metadata"]["name"]
        name = f"{job}-{task['name']}-{index}"
        spec = task["template"]["spec"]
        (container,) = spec["containers"]
        command = [*container["command"], *container.get("args", [])]
        for volume in spec["volumes"]:
            if "secret" in volume:
                folder = self._mounted(namespace, volume["secret"]["secretName"])
                (path,) = (m["mountPath"] for m in container["volumeMounts"] if m["name"] == volume["name"])
                command = [re.sub(rf"^{re.escape(path)}(?=/|$)", str(folder), word) for word in command]
        environment = {**os.environ, "VC_TASK_INDEX": str(index), "VC_HUB_HOSTS": f"{job}-hub-0.{job}"}
        environment |= {e["name"]: self._value(namespace, stored, e) for e in container["env"]}
        labels = {**task["template"]["metadata"].get("labels", {}), "volcano.sh/job-name": job}
        return Pod(name, index, task, self.folder / f"{name}.log", command, environment, labels=labels)

    def _mounted(self, namespace: str, secret: str) -> Path:
        folder = self.folder / "secrets" / secret
        folder.mkdir(parents=True, exist_ok=True)
        for key, value in self.secrets[namespace, secret]["data"].items():
            (folder / key).write_bytes(base64.b64decode(value))
        return folder

    def _value(self, namespace: str, stored: Stored, variable: Json) -> str:
        source = variable.get("valueFrom")
        if source is None:
            return cast("str", variable["value"])
        if reference := source.get("secretKeyRef"):
            data = self.secrets[namespace, reference["name"]]["data"]
            return base64.b64decode(data[reference["key"]]).decode()
        fields = {
            "status.podIP": "127.0.0.1",
            "metadata.annotations['volcano.sh/job-retry-count']": str(stored.retries),
        }
        return fields[source["fieldRef"]["fieldPath"]]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: ApiServer

    def log_message(self, format: str, *args: object) -> None:
        """Not on the terminal."""

    def do_POST(self) -> None:
        body = self._body()
        if self.api.refuse:
            return self._error(*self.api.refuse)
        if found := _SECRETS.fullmatch(urlparse(self.path).path):
            if wrong := invalid("Secret", body):
                return self._error(422, "; ".join(wrong))
            self.api.secrets[found[1], body["metadata"]["name"]] = body
            return self._answer(201, body)
        if found := _POLICIES.fullmatch(urlparse(self.path).path):
            if wrong := invalid("NetworkPolicy", body, "networking.k8s.io/v1"):
                return self._error(422, "; ".join(wrong))
            key = found[1], body["metadata"]["name"]
            if key in self.api.policies:
                return self._error(409, f'networkpolicies "{key[1]}" already exists')
            self.api.policies[key] = body
            return self._answer(201, body)
        found = _JOBS.fullmatch(urlparse(self.path).path)
        if not found:
            return self._error(404, "the server could not find the requested resource")
        if wrong := problems(body):
            return self._error(422, "; ".join(wrong))
        body["metadata"]["uid"] = f"uid-{len(self.api.jobs)}"
        body["metadata"]["creationTimestamp"] = f"2026-12-01T00:00:{len(self.api.jobs):02}Z"
        stored = self.api.jobs[found[1], body["metadata"]["name"]] = Stored(body)
        threading.Thread(target=self.api.run, args=(found[1], stored), daemon=True).start()
        return self._answer(201, body)

    def do_GET(self) -> None:
        url = urlparse(self.path)
        query = parse_qs(url.query)
        if found := _JOBS.fullmatch(url.path):
            if not found[2]:
                there = [j for (space, _), j in self.api.jobs.items() if space == found[1]]
                jobs = [self._job(j) for j in there if _fits(j.body["metadata"].get("labels", {}), query)]
                return self._answer(200, {"kind": "JobList", "items": jobs})
            stored = self.api.jobs.get((found[1], found[2]))
            return self._answer(200, self._job(stored)) if stored else self._error(404, "not found")
        if (found := _SECRETS.fullmatch(url.path)) and found[2]:
            secret = self.api.secrets.get((found[1], found[2]))
            return self._answer(200, secret) if secret else self._error(404, "not found")
        found = _PODS.fullmatch(url.path)
        if not found:
            return self._error(404, "the server could not find the requested resource")
        if not found[2]:
            pods = [p for j in self.api.jobs.values() for p in j.pods if _fits(p.labels, query)]
            return self._answer(
                200, {"kind": "PodList", "apiVersion": "v1", "items": [*map(self._view, pods)]}
            )
        pod = next((p for j in self.api.jobs.values() for p in j.pods if p.name == found[2]), None)
        if pod is None:
            return self._error(404, f'pods "{found[2]}" not found')
        if not found[3]:
            return self._answer(200, self._view(pod))
        return self._log(pod, follow=query.get("follow", [""])[0].lower() == "true")

    def do_PUT(self) -> None:
        found = _JOBS.fullmatch(urlparse(self.path).path)
        assert found is not None
        body, stored = self._body(), self.api.jobs[found[1], found[2]]
        with self.api.lock:
            stored.phase = body["status"]["state"]["phase"]
        self._answer(200, self._job(stored))

    def do_DELETE(self) -> None:
        found = _JOBS.fullmatch(urlparse(self.path).path)
        assert found is not None
        del self.api.jobs[found[1], found[2]]
        self._answer(200, {"kind": "Status", "status": "Success"})

    def _job(self, stored: Stored) -> Json:
        state = {"phase": stored.phase}
        return {**stored.body, "status": {"state": state, "retryCount": stored.retries}}

    def _view(self, pod: Pod) -> Json:
        code = pod.code()
        state: Json = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
        status = {"name": "c", "image": "i", "imageID": "", "ready": True, "restartCount": pod.restarts}
        return {
            "kind": "Pod",
            "apiVersion": "v1",
            "metadata": {"name": pod.name, "labels": pod.labels},
            "spec": {"nodeName": "node", "containers": [{"name": "c"}]},
            "status": {"phase": pod.phase(), "containerStatuses": [{**status, "state": state}]},
        }

    def _log(self, pod: Pod, *, follow: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for data in self._output(pod, follow=follow):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def _output(self, pod: Pod, *, follow: bool) -> Iterator[bytes]:
        with pod.log.open("rb") as file:
            while True:
                over = pod.code() is not None
                if data := file.read():
                    yield data
                if over or not follow:
                    return
                time.sleep(0.05)

    def _body(self) -> Json:
        return cast("Json", json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _error(self, code: int, message: str) -> None:
        self._answer(code, {"kind": "Status", "apiVersion": "v1", "code": code, "message": message})

    def _answer(self, code: int, body: Json) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
