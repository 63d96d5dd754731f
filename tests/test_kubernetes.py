"""The toy graph on Kubernetes: through the real client, against a stand-in for API server and Volcano."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("kubernetes", reason="pip install 'arriero[kubernetes]'")
pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")

from arriero.launchers.rundir import RunDir
from tests.cluster.api_server import ApiServer, Pod, Stored
from tests.cluster.real_run import real_words

ROOT = Path(__file__).parents[1]
PIPELINE = str(ROOT / "tests" / "cluster" / "toy_run.py")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


class Cluster:
    """The command on a machine whose kubeconfig names the stand-in."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder, folder / "runs"
        self.runs.mkdir()
        (folder / "tests").symlink_to(ROOT / "tests")
        (folder / "arriero.toml").write_text(f"""\
[profile.kubernetes]
image = "registry.example/arriero:0.1"
python = "{sys.executable}"
run_root = "{self.runs}"
mounts = ["arriero-runs:{self.runs}"]
hub = {{ cpus = 1, memory_mb = 500 }}
kubernetes = {{ namespace = "rl" }}
""")
        (folder / "pods").mkdir()
        self.api = ApiServer(folder / "pods")

    def arriero(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "KUBECONFIG": str(self.api.kubeconfig), "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            [sys.executable, "-m", "arriero", *words],
            cwd=self.folder, env=environment, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    def submit(self, *words: str, pipeline: str = PIPELINE) -> str:
        """The handle."""
        done = self.arriero("run", pipeline, "--on", "kubernetes", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self) -> Stored:
        """That of the run."""
        return next(iter(self.api.jobs.values()))

    def guests(self) -> list[Stored]:
        """The jobs of replicas that joined."""
        return list(self.api.jobs.values())[1:]

    def given(self, replica: int) -> int:
        """Records that a generator has given, by its last heartbeat."""
        pulse = self.run.read_vitals().pulses.get(f"generator-{replica}-0")
        return pulse.status.nodes[0].given if pulse else 0

    def pod(self, name: str) -> Pod:
        self.until(lambda: self.job().pods)
        return next(p for p in self.job().pods if p.name.endswith(name))

    @property
    def run(self) -> RunDir:
        (path,) = self.runs.iterdir()
        return RunDir(path)

    def steps(self) -> int:
        found = list(self.runs.glob("*/metrics.jsonl"))
        return len(found[0].read_text().splitlines()) if found else 0

    def until(self, condition: Callable[[], object], timeout_s: float = 180.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            logs = {p.name: p.read_text()[-1500:] for p in (self.folder / "pods").glob("*.log")}
            assert time.monotonic() < deadline, json.dumps(logs, indent=1)
            time.sleep(0.1)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    found = Cluster(tmp_path)
    try:
        yield found
    finally:
        found.api.close()


def test_a_run_is_waited_for_shown_and_known_afterwards(cluster: Cluster) -> None:
    done = cluster.arriero("run", PIPELINE, "--on", "kubernetes", "--wait", "--text-bytes", "300000")
    assert done.returncode == 0, done.stderr
    assert "finished after 3 steps" in done.stdout
    assert cluster.run.read_summary().state == "finished"
    ((namespace, name),) = cluster.api.jobs
    handle = f"kubernetes://{namespace}:{name}"
    told = json.loads(cluster.arriero("status", handle, "--json").stdout)
    assert (told["state"], told["detail"]) == ("finished", "Completed, exit code 0")
    assert told["replicas"]["generator"] == ["succeeded node"] * 2
    assert "finished after 3 steps" in cluster.arriero("logs", handle).stdout
    assert cluster.arriero("status", "--on", "kubernetes").returncode == 0


def test_an_error_of_a_generator_ends_the_job_with_its_code(cluster: Cluster) -> None:
    words = ("--on", "kubernetes", "--wait", "--fault", "user", "--steps", "100000")
    done = cluster.arriero("run", PIPELINE, *words)
    assert done.returncode == 2
    assert "the toy has no model; pass --model PATH" in done.stdout
    assert cluster.job().phase == "Terminated"


def test_a_container_that_is_killed_starts_again_and_the_run_goes_on(cluster: Cluster) -> None:
    cluster.submit("--steps", "80")
    cluster.until(lambda: cluster.steps() >= 2)
    generator = cluster.pod("generator-0")
    assert generator.process is not None
    generator.process.kill()  # the agent, and with it what it has started
    cluster.until(lambda: cluster.job().phase == "Completed")
    assert generator.restarts == 1
    assert cluster.run.read_summary().restarts == {"generator-0": 1}


def test_a_run_with_three_hubs_goes_on_when_one_of_them_is_killed(cluster: Cluster) -> None:
    handle = cluster.submit("--steps", "150", "--hub.replicas", "3")
    cluster.until(lambda: cluster.steps() >= 2)
    hub = cluster.pod("hubs-1")
    assert hub.process is not None
    for process in (
        psutil.Process(hub.process.pid),
        *psutil.Process(hub.process.pid).children(recursive=True),
    ):
        process.kill()
    before = cluster.steps()
    cluster.until(lambda: cluster.steps() >= before + 3)
    cluster.until(lambda: hub.restarts == 1)
    told = json.loads(cluster.arriero("status", handle, "--json").stdout)
    assert len(told["replicas"]["hub"]) == 3
    assert cluster.arriero("logs", handle, "hub-2").returncode == 0
    cluster.until(lambda: cluster.job().phase == "Completed", 300)
    assert cluster.run.read_summary().steps == 150


def test_a_cancelled_run_stops_in_order(cluster: Cluster) -> None:
    handle = cluster.submit("--steps", "100000")
    cluster.until(lambda: cluster.steps() >= 2)
    assert cluster.arriero("cancel", handle).returncode == 0
    cluster.until(lambda: all(p.code() is not None for p in cluster.job().pods), 30)
    assert cluster.run.read_summary().state == "stopped"
    assert cluster.arriero("status", handle).returncode == 1


def test_an_evicted_hub_restarts_the_job_which_runs_to_its_end(cluster: Cluster) -> None:
    cluster.submit("--steps", "40")
    cluster.until(lambda: cluster.steps() >= 2)
    hub = cluster.pod("hub-0")
    assert hub.process is not None
    hub.process.send_signal(signal.SIGTERM)
    cluster.until(lambda: cluster.job().retries == 1)
    cluster.until(lambda: cluster.job().phase == "Completed")
    assert "the job was started again" in cluster.pod("hub-0").log.read_text()
    assert cluster.run.read_summary().state == "finished"


def test_an_evicted_pod_is_made_anew_and_the_run_goes_on(cluster: Cluster) -> None:
    cluster.submit("--steps", "120")
    cluster.until(lambda: cluster.steps() >= 2)
    first = cluster.pod("generator-0")
    trainer = cluster.pod("trainer-0").process
    cluster.api.evict(first, grace_s=1.0)  # its agent would stay longer
    cluster.until(lambda: cluster.job().phase == "Completed")
    assert cluster.pod("generator-0") is not first
    assert cluster.pod("trainer-0").process is trainer
    assert cluster.job().retries == 0
    summary = cluster.run.read_summary()
    assert (summary.state, summary.steps, summary.restarts) == ("finished", 120, {"generator-0": 1})


def test_a_killed_rank_starts_the_job_again_which_goes_on_from_its_version(cluster: Cluster) -> None:
    cluster.submit(*real_words(cluster.folder, steps=20, ranks=2), pipeline="grpo")
    cluster.until(lambda: cluster.steps() >= 2)
    trainer = cluster.pod("trainer-0").process
    assert trainer is not None
    torchrun = psutil.Process(trainer.pid).children()[0]
    torchrun.children()[0].kill()
    cluster.until(lambda: cluster.job().retries == 1)
    cluster.until(lambda: cluster.job().phase == "Completed")
    told = cluster.pod("hub-0").log.read_text()
    assert "trainer-0 rank 0 was killed by signal 9 (SIGKILL)" in told
    assert "the run goes on, trainer from version" in told
    lines = (cluster.run.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 21))


def test_generators_join_a_running_job_by_jobs_of_their_own_and_leave_it(cluster: Cluster) -> None:
    handle = cluster.submit(
        "--steps", "220", "--generators", "1", "--generator-s", "0.05", "--seconds", "0.1"
    )
    cluster.until(lambda: cluster.steps() >= 2)
    more = cluster.arriero("scale", handle, "generator=3")
    assert more.returncode == 0, more.stderr
    own = rf"{handle}-[0-9a-f]{{8}}"
    assert re.fullmatch(f"generator: 1 -> 3, {own}, {own} joins when it starts\n", more.stdout), more.stdout
    cluster.until(lambda: all(cluster.given(k) for k in (1, 2)))
    first, second = cluster.guests()
    (policy,) = cluster.api.policies.values()
    reached = policy["spec"]["podSelector"]["matchLabels"].items()
    assert all(reached <= p.labels.items() for job in cluster.api.jobs.values() for p in job.pods)
    assert first.body["metadata"]["ownerReferences"][0]["uid"] == cluster.job().body["metadata"]["uid"]
    told = json.loads(cluster.arriero("status", handle, "--json").stdout)
    assert told["replicas"]["generator"] == ["running node"] * 3
    fewer = cluster.arriero("scale", str(cluster.run.path), "generator=2")
    assert (fewer.returncode, fewer.stdout[:17]) == (0, "generator: 3 -> 2"), fewer.stderr
    cluster.until(lambda: second.pods[0].code() is not None, 30)
    assert (second.phase, second.pods[0].code()) == ("Aborted", 0)  # in order, for a kill is 137
    process = first.pods[0].process
    assert process is not None
    os.killpg(process.pid, signal.SIGKILL)  # as with a node that is lost
    cluster.until(lambda: first.phase == "Terminated")
    none = cluster.arriero("scale", handle, "generator=1")
    assert (none.returncode, none.stdout) == (0, "generator: 1 -> 1, as it was\n")

    cluster.until(lambda: cluster.job().phase == "Completed")
    summary = cluster.run.read_summary()
    assert (summary.state, summary.steps, summary.groups_trained) == ("finished", 220, 880)
    events = [json.loads(line) for line in cluster.run.ledger.read_text().splitlines()]
    scaled = [(e["joined"], e["leaving"]) for e in events if e["kind"] == "scaled"]
    assert sorted(k for joined, _ in scaled for k in joined) == [1, 2]
    assert sorted(k for _, leaving in scaled for k in leaving) == [1, 2]
    assert "arriero: joined as generator-2" in cluster.arriero("logs", handle, "generator-2").stdout
    unknown = cluster.arriero("logs", handle, "generator-9", "--follow")
    assert (unknown.returncode, "has no log of generator-9" in unknown.stderr) == (2, True)
    over = cluster.arriero("scale", handle, "generator=2")
    assert (over.returncode, "replicas join and leave while a run goes on" in over.stderr) == (2, True)


def test_cancel_takes_replicas_along_that_joined_or_still_wait(cluster: Cluster) -> None:
    handle = cluster.submit("--steps", "100000", "--generators", "1", "--generator-s", "0.05")
    cluster.until(lambda: cluster.steps() >= 2)
    for words, remedy in {
        ("trainer=2",): "trainer: it closes a loop, so it has one replica, not 2",
        ("generatr=2",): "toy has no role generatr; did you mean generator?",
    }.items():
        refused = cluster.arriero("scale", handle, *words)
        assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
        assert remedy in refused.stderr
    assert cluster.arriero("scale", handle, "generator=2").returncode == 0
    cluster.until(lambda: cluster.given(1))
    cluster.api.full = True
    assert cluster.arriero("scale", handle, "generator=3").returncode == 0
    joined, waits = cluster.guests()
    assert (joined.phase, waits.phase) == ("Running", "Pending")
    guest = f"kubernetes://rl:{waits.body['metadata']['name']}"
    assert "Pending" in cluster.arriero("status", guest).stdout
    assert cluster.arriero("cancel", handle).returncode == 0
    cluster.until(lambda: all(p.code() is not None for j in cluster.api.jobs.values() for p in j.pods), 30)
    assert [job.phase for job in cluster.api.jobs.values()] == ["Aborted"] * 3
    assert waits.pods == []
    assert cluster.run.read_summary().state == "stopped"


@pytest.mark.parametrize(
    ("code", "message", "remedy"),
    [
        (403, "jobs.batch.volcano.sh is forbidden: User x cannot create resource", "ask for the right"),
        (404, "the server could not find the requested resource", "is Volcano installed"),
    ],
)
def test_what_the_server_refuses_is_one_line_with_the_remedy(
    code: int, message: str, remedy: str, cluster: Cluster
) -> None:
    cluster.api.refuse = (code, message)
    done = cluster.arriero("run", PIPELINE, "--on", "kubernetes")
    assert done.returncode == 2
    (line,) = (line for line in done.stderr.splitlines() if "error" in line)
    assert message in line
    assert remedy in line
