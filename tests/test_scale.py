"""`arriero scale`: processes that join and leave a run while it goes on, and what of it is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from arriero.launchers.audit import audited
from arriero.launchers.cli import main
from arriero.launchers.resuming import go_on
from arriero.launchers.rundir import RunDir, create
from arriero.schemas.ledger import Event, Scaled
from arriero.schemas.run import RunOptions
from tests.toys import toy_graph

ROOT = Path(__file__).parents[1]
T = TypeVar("T")


class Running:
    """`arriero run` on toy components, in a process of its own."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.path = folder / "run"
        self._errors = folder / "errors"
        self.start("tests/cluster/toy_run.py", "--run-dir", str(self.path), *words)

    def start(self, *words: str) -> None:
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "arriero", "run", *words], cwd=ROOT, stdout=subprocess.DEVNULL,
                stderr=errors,
            )  # fmt: skip

    def ended(self, timeout_s: float = 120.0) -> int:
        try:
            return self.process.wait(timeout_s)
        finally:
            self.process.kill()
            self.process.wait()

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in RunDir(self.path).ledger.read_text().splitlines()]

    def scaled(self) -> list[tuple[str, list[int], list[int], int]]:
        """Role, who joined, who was to leave, and how many there were then."""
        found = (e for e in self.events() if e["kind"] == "scaled")
        return [(e["role"], e["joined"], e["leaving"], e["number"]) for e in found]

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def steps(self) -> int:
        metrics = self.path / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def until(self, condition: object, timeout_s: float = 120.0) -> None:
        assert callable(condition)
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.errors
            assert time.monotonic() < deadline, self.errors
            time.sleep(0.02)

    def given(self, key: str) -> int:
        """Records that a replica has given, by its last heartbeat."""
        pulse = RunDir(self.path).read_vitals().pulses.get(f"{key}-0")
        return pulse.status.nodes[0].given if pulse else 0

    def of(self, role: str, number: int) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for p in psutil.process_iter(["cmdline"]):
            words = " ".join(p.info["cmdline"] or ())
            if str(self.path) in words and f"--role {role} --replica {number}" in words:
                found.append(p)
        return found

    def scale(self, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
        capsys.readouterr()
        code = main(["scale", str(self.path), *words])
        said = capsys.readouterr()
        return code, said.err or said.out


@pytest.mark.timeout(300)
def test_generators_and_rewards_join_and_leave_a_running_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Running(
        tmp_path, "--generators", "1", "--generator-s", "0.05", "--seconds", "0.02", "--steps", "90"
    )
    try:
        run.until(lambda: run.steps() >= 2)
        code, said = run.scale(capsys, "generator=3", "reward=2")
        assert code == 0
        assert said.splitlines() == [
            "generator: 1 -> 3, generator-1, generator-2 join",
            "reward: 1 -> 2, reward-1 join",
        ]
        run.until(lambda: all(run.given(k) for k in ("generator-1", "generator-2", "reward-1")))
        (joined,) = run.of("generator", 1)
        joined.kill()
        run.until(
            lambda: "generator-1 was killed by signal 9 (SIGKILL)" in run.errors and run.of("generator", 1)
        )
        (stopped,) = run.of("generator", 2)
        stopped.suspend()  # it can't do what it is told, so it is killed
        code, said = run.scale(capsys, "generator=1", "reward=1", "--within", "1")
        assert (code, said.splitlines()[0]) == (
            0, "generator: 3 -> 1, generator-1, generator-2 leave within 1 s",
        )  # fmt: skip
        gone = [("generator", 1), ("generator", 2), ("reward", 1)]
        run.until(lambda: not any(run.of(*who) for who in gone))
        before = run.steps()
        run.until(lambda: run.steps() > before + 2)
        assert run.scale(capsys, "trainer=2")[0] == 2
        assert run.process.wait(120) == 0, run.errors
    finally:
        run.process.kill()
        run.process.wait()
    summary = RunDir(run.path).read_summary()
    assert (summary.state, summary.steps, summary.groups_trained) == ("finished", 90, 360)
    assert {*summary.groups_dropped} <= {"stale"}
    events, scaled = run.events(), run.scaled()
    assert scaled == [
        ("generator", [1, 2], [], 3), ("reward", [1], [], 2), ("generator", [], [1, 2], 1),
        ("reward", [], [1], 1),
    ]  # fmt: skip
    trained = [k for e in events if e["kind"] == "trained" for k in e["origins"]]
    assert len(trained) == len({*trained}) == 360
    assert audited(str(run.path)).findings == []
    query = "select name, number from events where kind = 'scaled'"
    assert main(["lineage", str(run.path), "--sql", query, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {(row["name"], row["number"]) for row in rows} == {(role, n) for role, *_, n in scaled}
    code, said = run.scale(capsys, "generator=2")
    assert code == 2
    assert said == f"arriero: error: {run.path} doesn't run any more; arriero run --resume goes on with it\n"


@pytest.mark.timeout(300)
def test_one_that_cannot_join_is_told_and_the_run_goes_on_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Running(tmp_path, "--generators", "1", "--steps", "1000", "--seconds", "0.02", "--guests", "raise")
    try:
        run.until(lambda: run.steps() >= 2)
        assert run.scale(capsys, "generator=2")[0] == 0
        run.until(lambda: "generator-1 couldn't join: ZeroDivisionError: the toy breaks" in run.errors)
        run.until(lambda: len(run.scaled()) == 2 and not run.of("generator", 1))
        before = run.steps()
        run.until(lambda: run.steps() > before + 2)
        run.process.terminate()
        assert run.ended() == 130, run.errors
    finally:
        run.process.kill()
    assert run.scaled() == [("generator", [1], [], 2), ("generator", [], [1], 1)]
    assert audited(str(run.path)).findings == []


@pytest.mark.timeout(300)
def test_a_run_does_not_wait_at_its_end_for_one_that_still_loads_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    over = tmp_path / "over"
    words = ["--generators", "1", "--steps", "100000", "--seconds", "0.02", "--until", str(over)]
    run = Running(tmp_path, *words, "--guests", "hang")
    try:
        run.until(lambda: run.steps() >= 2)
        assert run.scale(capsys, "generator=2")[0] == 0
        over.touch()
        assert run.ended() == 0, run.errors  # it would load for an hour
    finally:
        run.process.kill()
    assert "generator-1 hadn't begun, and the run comes to its end" in run.errors
    assert RunDir(run.path).read_summary().state == "finished"
    assert audited(str(run.path)).findings == []


@pytest.mark.timeout(300)
def test_a_run_that_goes_on_has_the_replicas_that_it_was_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Running(tmp_path, "--generators", "2", "--steps", "1000", "--seconds", "0.02")
    try:
        run.until(lambda: run.steps() >= 2)
        assert run.scale(capsys, "generator=1", "reward=3")[0] == 0
        run.until(lambda: run.given("reward-2"))
        run.process.terminate()
        assert run.ended() == 130, run.errors
        before = run.scaled()
        run.start("--resume", str(run.path))
        run.until(lambda: len(run.scaled()) == 4 and run.of("reward", 2) and not run.of("generator", 1))
        run.process.terminate()
        assert run.ended() == 130, run.errors
    finally:
        run.process.kill()
    once: list[tuple[str, list[int], list[int], int]] = [("generator", [], [1], 1), ("reward", [1, 2], [], 3)]
    assert (before, run.scaled()) == (once, [*once, *once])
    (resumed,) = [e for e in run.events() if e["kind"] == "resumed"]
    assert resumed["scaled"] == {"generator": 1, "reward": 3}
    assert audited(str(run.path)).findings == []


def test_what_the_graph_is_given_anew_replaces_what_it_was_scaled_to(tmp_path: Path) -> None:
    opts = RunOptions(run_id="scaled", elastic=True)
    for name, number, expected in (("as-it-was", 1, {"generator": 3}), ("anew", 2, {})):
        run = create(tmp_path / name)
        events: list[Event] = [Scaled(id="a", role="generator", joined=(1, 2), number=3)]
        run.ledger.write_text("".join(e.model_dump_json() + "\n" for e in events))
        before, now = toy_graph().check(), toy_graph(generators=number).check()
        assert go_on(now, opts, run, before=before).scaled == expected
        assert go_on(now, opts, run).scaled == expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generator=0"], "generator=0: a role keeps at least one replica; to stop the run: arriero cancel"),
        (["generator=two"], "a role keeps at least one replica"),
        (["generatr=2"], "toy has no role generatr; did you mean generator?"),
        (["trainer=2"], "trainer: it closes a loop, so it has one replica, not 2; use ranks"),
        (["generator=2", "--within", "soon"], "--within takes seconds, more than none, not 'soon'"),
        (["generator=2", "--within", "-1"], "--within takes seconds, more than none, not '-1'"),
        (["generator=2", "--within=nan"], "--within takes seconds, more than none, not 'nan'"),
        (["generator=2", "--within", "inf"], "--within takes seconds, more than none, not 'inf'"),
        (["generator=2", "generator=3"], "generator=2 and generator=3; give each role once"),
        (["generator=2", "--with"], "unknown option --with"),
        ([], "usage: arriero scale RUN ROLE=N"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    path = described(tmp_path)
    assert main(["scale", str(path), *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("handle", ["slurm://12", "kubernetes://rl:toy"])
def test_how_long_who_leaves_may_take_is_refused_where_a_scheduler_says_it(
    handle: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scale", handle, "generator=2", "--within", "90"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("arriero: error: --within 90: ")
    assert said.endswith("leave --within out\n")


def test_a_deterministic_run_and_one_in_one_process_keep_their_replicas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, said in (
        ("--deterministic", "a deterministic run keeps"),
        ("--inline", "the run is one process"),
    ):
        path = described(tmp_path / words, words)
        assert main(["scale", str(path), "generator=2"]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert len(error.splitlines()) == 1


def test_a_run_that_there_is_not_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", str(tmp_path / "nowhere"), "generator=2"]) == 2
    assert "is this a run directory" in capsys.readouterr().err


def described(folder: Path, *words: str) -> Path:
    """The directory of a run that hasn't been started."""
    from arriero.launchers import catalog, preparing

    path = folder / "run"
    pipeline = catalog.find(str(ROOT / "tests" / "cluster" / "toy_run.py"))
    ready = preparing.prepare(pipeline, ["--run-dir", str(path), *words])
    preparing.begin(ready, ["arriero", "run"])
    return path
