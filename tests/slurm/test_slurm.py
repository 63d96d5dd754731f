"""The toy graph on a real Slurm, through the command: what goes well, and what goes wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from arriero.launchers.rundir import RunDir
from arriero.schemas.run import RunSummary
from tests.cluster.real_run import real_options, real_words
from tests.slurm.cluster import missing, slurm

ROOT = Path(__file__).parents[2]
PIPELINE = str(ROOT / "tests" / "cluster" / "toy_run.py")
LONG = ("--steps", "100000")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.timeout(400),
]

PROFILE = """\
[profile.slurm]
requeues = 1
hub = { cpus = 1, memory_mb = 500 }
[profile.slurm.roles]
generator = { apart = true, gpus = 1 }
trainer = { apart = true, resource = "cpu.nano" }
[profile.slurm.slurm]
time = "10"

[profile.real]
gpus = 1
gpus_per_node = 1
hub = { cpus = 1, memory_mb = 500 }
[profile.real.slurm]
time = "10"

[profile.packed]
requeues = 2
hub = { cpus = 1, memory_mb = 500 }
[profile.packed.slurm]
mode = "packed"
nodes = 2

[profile.small]
hub = { cpus = 1, memory_mb = 500 }
[profile.small.slurm]
mode = "packed"

[profile.nowhere]
[profile.nowhere.slurm]
partition = "nowhere"
"""


class Cluster:
    """The command on a login node of the cluster; every run has a directory of its own."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self.environment, self.folder = environment, folder
        self.runs = 0

    def arriero(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "arriero", *words)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A Python program."""
        environment = {**self.environment, "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            [sys.executable, *words], cwd=self.folder, env=environment, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip

    def until_told(self) -> tuple[str, ...]:
        """Words with which the next run ends when `tell` says so."""
        return (*LONG, "--until", str(self._end(self.runs + 1)))

    def tell(self) -> None:
        """Let the newest run end."""
        self._end(self.runs).touch()

    def _end(self, number: int) -> Path:
        return self.folder / f"end{number}"

    def submit(self, *words: str, pipeline: str = PIPELINE, profile: str = "slurm") -> Run:
        self.runs += 1
        path = self.folder / f"run{self.runs}"
        where = ["--on", "slurm", "--profile", profile, "--run-dir", str(path)]
        done = self.arriero("run", pipeline, *where, *words)
        assert done.returncode == 0, done.stderr
        return Run(self, path, done.stdout.strip())


class Run:
    """One run, by what it leaves in its directory and what Slurm says of its job."""

    def __init__(self, cluster: Cluster, path: Path, handle: str) -> None:
        self.cluster, self.path, self.handle = cluster, path, handle

    @property
    def summary(self) -> RunSummary:
        return RunDir(self.path).read_summary()

    def log(self, name: str) -> str:
        file = self.path / "logs" / f"{name}.log"
        return file.read_text() if file.exists() else ""

    def components(self) -> list[dict[str, str]]:
        words = ["scontrol", "show", "job", "-o", self.handle.removeprefix("slurm://")]
        text = subprocess.run(
            words, env=self.cluster.environment, capture_output=True, text=True, check=True
        ).stdout
        return [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in text.splitlines()]

    def job(self) -> dict[str, str]:
        return self.components()[0]

    def over(self, timeout_s: float = 180.0) -> dict[str, str]:
        """The job, when it has ended for good."""
        self.until(lambda: self.job()["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), timeout_s)
        return self.job()

    def steps(self) -> int:
        metrics = self.path / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def has_made(self, steps: int) -> bool:
        return self.steps() >= steps

    def step_numbers(self) -> list[int]:
        return [json.loads(line)["step"] for line in (self.path / "metrics.jsonl").read_text().splitlines()]

    def went_on(self) -> int:
        """The version of the trainer that the run went on from; 0 if it began anew."""
        found = re.search(r"the run goes on, trainer from version (\d+)", self.log("hub-0"))
        return int(found[1]) if found else 0

    def processes(self, *words: str) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            try:
                line = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if all(word in line for word in (str(self.path), *words)):
                found.append(process)
        return found

    def until(self, condition: Callable[[], object], timeout_s: float = 180.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            logs = {p.name: p.read_text()[-2000:] for p in (self.path / "logs").glob("*.log")}
            assert time.monotonic() < deadline, f"nothing happened for so long: {json.dumps(logs, indent=1)}"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    with slurm(folder / "daemons") as environment:
        (folder / "arriero.toml").write_text(PROFILE)
        (folder / "tests").symlink_to(ROOT / "tests")
        yield Cluster(environment, folder)


@pytest.fixture
def cluster(installed: Cluster) -> Iterator[Cluster]:
    """The one cluster of all tests; what a test has left there is cancelled."""
    yield installed
    subprocess.run(["scancel", "--full", "--user=root"], env=installed.environment, check=False)


def test_a_run_on_several_nodes_outlives_a_killed_generator_and_is_known_from_elsewhere(
    cluster: Cluster,
) -> None:
    # Groups of 600 kB go by claim check, between nodes.
    run = cluster.submit("--text-bytes", "300000", "--seconds", "0.2", *cluster.until_told())
    run.until(lambda: run.steps() >= 2)
    (trainer,) = (p.pid for p in run.processes("launchers.role", "--role trainer"))
    next(iter(run.processes("launchers.role", "--role generator", "--replica 0"))).kill()
    run.until(lambda: "generator-0 was killed" in run.log("hub-0"))
    killed = run.steps()
    run.until(lambda: run.steps() >= killed + 2)
    assert trainer in {p.pid for p in run.processes("launchers.role", "--role trainer")}
    cluster.tell()
    job = run.over()
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), run.log("hub-0")
    summary = run.summary
    assert (summary.state, summary.restarts) == ("finished", {"generator-0": 1})
    assert run.step_numbers() == list(range(1, summary.steps + 1))
    together, generator, trains = run.components()
    assert {c["NodeList"] for c in (together, generator, trains)} == {"n1", "n2", "n3"}
    assert (_gpus(generator), _gpus(trains)) == ("1", "")
    assert trains["MinMemoryCPU"] == "512M"  # of TorchX's named resource cpu.nano
    status = cluster.arriero("status", str(run.path), "--json")
    told = json.loads(status.stdout)
    assert (status.returncode, told["state"], told["steps"]) == (0, "finished", summary.steps)
    assert told["replicas"]["generator"] == ["succeeded n2"] * 2
    assert f"finished after {summary.steps} steps" in cluster.arriero("logs", run.handle).stdout
    assert run.handle in cluster.arriero("status", "--on", "slurm").stdout
    # What was shipped ran, not what is installed, and the manifest says which.
    manifest = RunDir(run.path).read_manifest()
    code = run.path / "ship" / "code.json"
    assert manifest.shipped_sha256
    assert (run.path / "claims").exists() is False
    assert code.exists()


def test_an_error_ends_its_job_with_its_code_beside_runs_that_are_cancelled_and_do_not_come_back(
    cluster: Cluster,
) -> None:
    cancelled = [cluster.submit(*LONG, "--hub.replicas", hubs) for hubs in ("1", "3")]
    fault = cluster.submit("--fault", "raise", *LONG)
    mistake = cluster.submit("--fault", "user", *LONG, profile="small")
    for run in cancelled:
        run.until(partial(run.has_made, 2))
        assert cluster.arriero("cancel", str(run.path)).returncode == 0
    job = fault.over()
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "1:0")
    assert "ZeroDivisionError: the toy breaks as it was told to" in fault.log("hub-0")
    status = cluster.arriero("status", str(fault.path))
    assert status.returncode == 1
    assert "ZeroDivisionError" in status.stdout
    assert mistake.over()["ExitCode"] == "2:0"
    assert "arriero: error: the toy has no model; pass --model PATH" in mistake.log("hub-0")
    for run in cancelled:
        _check_cancelled(cluster, run)


def _check_cancelled(cluster: Cluster, run: Run) -> None:
    assert run.over()["JobState"] == "CANCELLED"
    run.until((run.path / "summary.json").exists, 60)
    assert run.summary.state == "stopped"
    assert cluster.arriero("status", str(run.path)).returncode == 1
    assert run.job()["Restarts"] == "0"
    run.until(lambda: not run.processes("arriero.launchers"), 60)


def test_a_run_in_one_allocation_goes_on_when_another_job_preempts_it_and_when_its_hub_is_killed(
    cluster: Cluster,
) -> None:
    run = cluster.submit("--ranks", "2", *cluster.until_told(), profile="packed")
    run.until(lambda: run.steps() >= 2)
    urgent = ["sbatch", "--partition=urgent", "--nodes=4", "--exclusive", "--wrap=sleep 1"]
    subprocess.run(urgent, cwd=cluster.folder, env=cluster.environment, capture_output=True, check=True)
    run.until(lambda: run.job()["Restarts"] == "1")
    stopped = run.steps()
    run.until(lambda: run.steps() >= stopped + 2)
    assert run.went_on() > 0
    (hub,) = run.processes("-m arriero.launchers.conduct")
    hub.kill()
    run.until(lambda: run.job()["Restarts"] == "2")
    killed = run.steps()
    run.until(lambda: run.steps() >= killed + 2)
    cluster.tell()
    job = run.over()
    assert (job["JobState"], job["NumNodes"]) == ("COMPLETED", "2"), run.log("hub-0")
    assert "HetJobId" not in job
    assert run.log("hub-0").count("the job was started again; the run goes on") == 2
    assert not (run.path / "attempts").exists()
    assert run.step_numbers() == list(range(1, run.summary.steps + 1))


def test_a_run_with_three_hubs_goes_on_with_two_when_one_is_killed(cluster: Cluster) -> None:
    run = cluster.submit("--hub.replicas", "3", *cluster.until_told(), profile="packed")
    run.until(lambda: run.steps() >= 2)
    hubs = run.processes("-m arriero.launchers.hub_peer", "--replica")
    for process in (hubs[0], *hubs[0].children(recursive=True)):
        process.kill()
    killed = run.steps()
    run.until(lambda: run.steps() >= killed + 40)
    cluster.tell()
    job = run.over()
    assert (job["JobState"], job["NumNodes"], job["Restarts"]) == ("COMPLETED", "2", "0"), run.log("hub-0")
    assert run.step_numbers() == list(range(1, run.summary.steps + 1))
    run.until(lambda: not run.processes(), 60)


def test_a_trainer_on_two_nodes_that_is_told_to_stop_is_requeued_and_goes_on(cluster: Cluster) -> None:
    run = cluster.submit(*real_words(cluster.folder, steps=12, ranks=2), pipeline="grpo", profile="real")
    run.until(lambda: run.steps() >= 2)
    number = run.handle.removeprefix("slurm://")
    # As Slurm does before the time limit: SIGTERM to all tasks, not to the script.
    subprocess.run(["scancel", "--signal=TERM", number], env=cluster.environment, check=True)
    run.until(lambda: run.job()["Restarts"] == "1")
    assert run.over()["JobState"] == "COMPLETED", run.log("hub-0") + run.log("trainer-0.0")
    assert run.went_on() > 0
    assert run.step_numbers() == list(range(1, 13))
    assert run.summary.staleness_max <= 1
    assert {p.name for p in (run.path / "logs").glob("trainer*")} == {"trainer-0.0.log", "trainer-0.1.log"}
    assert {component["NumNodes"] for component in run.components()} == {"1", "2"}
    assert [_gpus(component) for component in run.components()] == ["", "1", "1"]


def test_torchx_submits_the_same_job_and_a_cancelled_run_goes_on_with_resume(cluster: Cluster) -> None:
    path = cluster.folder / "by-torchx"
    keys = real_options(cluster.folder, steps=30, run_dir=path)
    words = [
        "--pipeline",
        "aipo",
        "--profile",
        "small",
        "--set",
        ",".join(f"{k}={v}" for k, v in keys.items()),
    ]
    done = cluster.run("-m", "torchx.cli.main", "run", "-s", "slurm", "arriero.run", *words)
    assert done.returncode == 0, done.stderr
    run = Run(cluster, path, "slurm://" + done.stdout.strip().rpartition("/")[2])
    run.until(lambda: run.steps() >= 2)
    assert cluster.arriero("cancel", str(path)).returncode == 0
    assert run.over()["JobState"] == "CANCELLED"
    run.until((path / "summary.json").exists, 60)
    again = cluster.arriero("run", "--resume", str(path))
    assert again.returncode == 0, again.stderr
    run = Run(cluster, path, again.stdout.strip())
    assert run.over()["JobState"] == "COMPLETED", run.log("hub-0")
    assert run.went_on() > 0
    assert run.step_numbers() == list(range(1, 31))


def test_what_sbatch_refuses_is_one_line_with_the_remedy(cluster: Cluster) -> None:
    where = ["--on", "slurm", "--profile", "nowhere", "--run-dir", str(cluster.folder / "refused")]
    done = cluster.arriero("run", PIPELINE, *where)
    assert done.returncode == 2
    told = [line for line in done.stderr.splitlines() if "error" in line]
    assert len(told) == 1
    assert "invalid partition specified: nowhere" in told[0]
    assert "slurm.partition of the profile" in told[0]


def test_generators_join_a_running_job_by_jobs_of_their_own_and_leave_it(cluster: Cluster) -> None:
    words = ["--generators", "1", "--generator-s", "0.05"]
    run = cluster.submit(*words, *cluster.until_told(), profile="small")
    run.until(lambda: run.steps() >= 2)
    more = cluster.arriero("scale", str(run.path), "generator=3")
    assert more.returncode == 0, more.stderr
    assert re.fullmatch(r"generator: 1 -> 3, slurm://\d+, slurm://\d+ joins when it starts\n", more.stdout), (
        more.stdout
    )
    run.until(lambda: len(run.processes("launchers.role", "--role generator")) == 3)
    run.until(lambda: all(given(run, k) for k in (1, 2)))
    assert "has no log of generator-9" in cluster.arriero("logs", str(run.path), "generator-9").stderr
    assert cluster.arriero("logs", str(run.path), "generator-2").returncode == 0
    run.processes("launchers.role", "--role generator", "--replica 2")[0].kill()
    run.until(lambda: "generator-2 was killed" in run.log("hub-0"))
    fewer = cluster.arriero("scale", str(run.path), "generator=2")
    assert (fewer.returncode, fewer.stdout[:17]) == (0, "generator: 3 -> 2"), fewer.stderr
    run.until(lambda: len(run.processes("launchers.agent", "--role generator", "--join")) == 1)
    vanished = run.processes("launchers.agent", "--role generator", "--join")
    for process in [child for p in vanished for child in (p, *p.children(recursive=True))]:
        process.kill()  # as with a node that is lost
    too_few = cluster.arriero("scale", str(run.path), "generator=0")
    assert (too_few.returncode, "at least one replica" in too_few.stderr) == (2, True)
    run.until(lambda: all(f"generator-{k} leaves" in run.log("hub-0") for k in (1, 2)))
    gone = run.steps()
    run.until(lambda: run.steps() >= gone + 2)
    cluster.tell()
    job = run.over()
    assert job["ExitCode"] == "0:0", run.log("hub-0")
    summary = run.summary
    assert (summary.state, summary.groups_trained) == ("finished", 4 * summary.steps)
    events = [json.loads(line) for line in RunDir(run.path).ledger.read_text().splitlines()]
    scaled = [(e["joined"], e["leaving"]) for e in events if e["kind"] == "scaled"]
    assert scaled[:2] == [([1], []), ([2], [])]
    assert sorted(k for _, leaving in scaled for k in leaving) == [1, 2]
    over = cluster.arriero("scale", str(run.path), "generator=2")
    assert (over.returncode, "replicas join and leave while a run goes on" in over.stderr) == (2, True)
    run.until(lambda: not run.processes("arriero.launchers"), 60)


def _gpus(component: dict[str, str]) -> str:
    """Of each of its tasks: `gres:gpu:1` of Slurm 22.05, `cpu=1,gres/gpu=1` of 24.11."""
    found = re.search(r"gres[:/]gpu[:=](\d+)", component.get("TresPerTask", ""))
    return found[1] if found else ""


def given(run: Run, replica: int) -> int:
    """Records that a generator has given since it was started last, by its last heartbeat."""
    pulse = RunDir(run.path).read_vitals().pulses.get(f"generator-{replica}-0")
    return pulse.status.nodes[0].given if pulse else 0
