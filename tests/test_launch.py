"""A toy graph, launched as `arriero run` does it: real processes through TorchX, a real nats-server."""

from __future__ import annotations

import json
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from arriero.launchers.hub import clean
from arriero.launchers.rundir import RunDir
from arriero.schemas.run import RunSummary

ROOT = Path(__file__).parents[1]
LONG: dict[str, Any] = {"trainer": {"steps": 100_000, "seconds": 0.05}}

Setting = dict[str, Any]
How = Literal["launch", "inline"]


class Launch:
    """A launcher in a process of its own, and what can be seen of its run from outside."""

    def __init__(self, folder: Path, how: How = "launch", **setting: Setting) -> None:
        self.path = folder / f"toy-{secrets.token_hex(4)}"
        self._out, self._err = folder / "out", folder / "err"
        command = [sys.executable, "-m", "tests.toys", how, str(self.path), json.dumps(setting)]
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=err)

    def wait(self, timeout_s: float = 60.0) -> int:
        try:
            return self.process.wait(timeout_s)
        finally:
            self.process.kill()

    @property
    def output(self) -> str:
        return self._out.read_text()

    @property
    def errors(self) -> str:
        return self._err.read_text()

    @property
    def summary(self) -> RunSummary:
        return RunDir(self.path).read_summary()

    def steps(self) -> int:
        metrics = self.path / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def until(self, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"it ended: {self.errors}"
            assert time.monotonic() < deadline, "nothing happened for so long"
            time.sleep(0.02)

    def processes(self, *words: str) -> list[psutil.Process]:
        """All processes of the run, launcher and nats-server too, whose command line holds all `words`."""
        return [p for p in psutil.process_iter() if all(w in _command(p) for w in (str(self.path), *words))]

    def left(self) -> list[str]:
        """Processes, files in shared memory and open ports that the run left behind."""
        found = [_command(p) for p in self.processes()]
        found += [str(p) for p in Path("/dev/shm").iterdir() if self.path.name in p.name]
        log = self.path / "broker" / "nats-server.log"
        ports = [
            int(line.rpartition(":")[2])
            for line in (log.read_text() if log.exists() else "").splitlines()
            if "Listening for client connections" in line
        ]
        return found + [f"port {p}" for p in ports if _open(p)]

    def events(self) -> Counter[str]:
        lines = (self.path / "ledger.jsonl").read_text().splitlines()
        return Counter(json.loads(line)["kind"] for line in lines)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) if process.status() != psutil.STATUS_ZOMBIE else ""
    except psutil.Error:
        return ""


def _open(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


WHOLE: dict[str, Setting] = {
    "graph": {"generators": 2, "staleness": 1},
    "prompts": {"held_out": 3, "every": 2},
    # Groups of 600 kB: they travel by claim check through shared memory.
    "generator": {"text_bytes": 300_000},
    "trainer": {"steps": 6, "seconds": 0.2},
}


class Seen:
    """What was seen of a run of `WHOLE` when it had made two steps."""

    def __init__(self, run: Launch) -> None:
        run.until(lambda: run.steps() >= 2)
        processes = run.processes()
        self.names = sorted(_command(p).partition(str(run.path))[2].strip() for p in processes)
        self.with_torch = [
            _command(p) for p in processes if "libtorch" in Path(f"/proc/{p.pid}/maps").read_text()
        ]
        (hub,) = run.processes("arriero.launchers.hub")
        self.token = hub.environ()["ARRIERO_TOKEN"]
        self.commands = [_command(p) for p in processes]
        self.readable_by_others = {
            p.name: p.read_bytes() for p in run.path.rglob("*") if p.is_file() and p.stat().st_mode & 0o077
        }
        self.in_memory = [p.name for p in Path("/dev/shm").iterdir() if run.path.name in p.name]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Launch, Seen, int]:
    """A run of `WHOLE` to its end, what was seen meanwhile, and its exit code."""
    run = Launch(tmp_path_factory.mktemp("whole"), "launch", **WHOLE)
    seen = Seen(run)
    return run, seen, run.wait()


def test_a_graph_runs_to_its_end(whole: tuple[Launch, Seen, int]) -> None:
    run, _, code = whole
    assert (code, run.errors) == (0, "")
    s = run.summary
    assert (s.state, s.steps, s.error) == ("finished", 6, "")
    assert (s.groups_admitted, s.groups_trained, s.groups_dropped) == (24, 24, {})
    # One of the two rollouts of every toy group is right.
    assert (s.accuracy_before, s.accuracy_after, s.reward_first, s.reward_last) == (0.5, 0.5, 0.5, 0.5)
    assert s.staleness_max <= 1 == s.staleness_bound
    assert s.step_s == pytest.approx(0.2, abs=0.15)
    assert "finished after 6 steps" in run.output


def test_a_finished_run_leaves_no_process_port_or_shared_memory(whole: tuple[Launch, Seen, int]) -> None:
    run, seen, _ = whole
    assert seen.in_memory, "no payload went through shared memory: this test shows nothing"
    assert run.left() == []
    assert [p.name for p in (run.path / "broker").iterdir()] == ["nats-server.log"]


def test_every_replica_is_a_process_and_none_imports_torch_without_need(
    whole: tuple[Launch, Seen, int],
) -> None:
    _, seen, _ = whole
    roles = [n for n in seen.names if n.startswith("--role")]
    assert roles == [
        f"--role {name} --replica {k}"
        for name, k in (
            ("collect", 0), ("generator", 0), ("generator", 1), ("prompts", 0), ("reward", 0), ("trainer", 0),
        )
    ]  # fmt: skip
    assert seen.with_torch == []


def test_the_brokers_token_is_in_no_command_line_and_no_file_that_others_can_read(
    whole: tuple[Launch, Seen, int],
) -> None:
    run, seen, _ = whole
    assert len(seen.token) > 20
    assert not any(seen.token in c for c in seen.commands)
    assert not any(seen.token.encode() in text for text in seen.readable_by_others.values())
    assert not any(seen.token.encode() in p.read_bytes() for p in run.path.rglob("*") if p.is_file())


def test_an_inline_run_has_the_same_account(whole: tuple[Launch, Seen, int], tmp_path: Path) -> None:
    launched, _, _ = whole
    run = Launch(tmp_path, "inline", **WHOLE)
    assert (run.wait(), run.errors) == (0, "")
    assert run.events() == launched.events()
    assert run.summary.groups_trained == launched.summary.groups_trained == 24
    assert run.left() == []


def test_an_error_in_a_component_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    run = Launch(tmp_path, trainer={"fault": "raise", "fault_at": 2, "steps": 1000})
    assert run.wait() == 1
    assert "trainer-0: trainer failed: ZeroDivisionError: the toy breaks as it was told to" in run.errors
    assert 'raise ZeroDivisionError("the toy breaks as it was told to")' in run.errors
    assert f"The full log is {run.path}/logs/trainer-0.log" in run.errors
    assert "ZeroDivisionError" in (run.path / "logs" / "trainer-0.log").read_text()
    assert run.summary.state == "failed"
    assert run.summary.error in run.errors
    assert run.left() == []


def test_an_inline_error_has_its_traceback_too(tmp_path: Path) -> None:
    run = Launch(tmp_path, "inline", trainer={"fault": "raise", "steps": 1000})
    assert run.wait() == 1
    assert 'raise ZeroDivisionError("the toy breaks as it was told to")' in run.errors


@pytest.mark.parametrize("how", ["inline", pytest.param("launch", marks=pytest.mark.slow)])
def test_a_users_mistake_is_one_line(how: How, tmp_path: Path) -> None:
    run = Launch(tmp_path, how, generator={"fault": "user", "fault_at": 2})
    assert run.wait() == 2
    assert run.errors == "arriero: error: the toy has no model; pass --model PATH\n"


@pytest.mark.parametrize("how", ["inline", pytest.param("launch", marks=pytest.mark.slow)])
def test_a_record_that_keeps_failing_ends_the_run_naming_it(how: How, tmp_path: Path) -> None:
    run = Launch(tmp_path, how, reward={"bad_row": 2}, **LONG)
    assert run.wait() == 2
    assert "reward gave up record prompt-2>generator: ValueError: row 2 can't be scored" in run.errors
    assert len(run.errors.splitlines()) == 1


def test_a_killed_process_is_named_at_once(tmp_path: Path) -> None:
    run = Launch(tmp_path, graph={"generators": 2}, options={"restarts": 0}, **LONG)
    run.until(lambda: run.steps() >= 1)
    (victim,) = run.processes("--role generator", "--replica 1")
    began = time.monotonic()
    victim.kill()
    assert run.wait() == 1
    assert time.monotonic() - began < 30  # about 2 s on an idle machine
    log = f"{run.path}/logs/generator-1.log"
    assert run.errors == f"arriero: error: generator-1 was killed by signal 9 (SIGKILL); its log is {log}\n"
    assert run.left() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_generator_that_is_killed_or_stands_still_starts_again_and_nothing_is_lost(
    number: signal.Signals, tmp_path: Path
) -> None:
    setting: dict[str, Any] = {"trainer": {"steps": 60, "seconds": 0.1}, "options": {"liveness_s": 3.0}}
    run = Launch(tmp_path, graph={"generators": 2}, **setting)
    run.until(lambda: run.steps() >= 1)
    (victim,) = run.processes("--role generator", "--replica 1")
    victim.send_signal(number)
    assert run.wait() == 0, run.errors
    assert run.errors.startswith("arriero: generator-1 was killed by signal 9 (SIGKILL)")
    assert "it starts again (1 of 3)" in run.errors
    s = run.summary
    assert s.groups_trained == 60 * 4
    assert s.groups_admitted == s.groups_trained + s.groups_dropped.get("end_of_run", 0)
    assert s.staleness_max <= 1
    assert s.restarts == {"generator-1": 1}
    assert run.left() == []


def test_a_replica_that_is_killed_again_and_again_ends_the_run(tmp_path: Path) -> None:
    fault = {"fault": "kill", "fault_at": 0}
    run = Launch(tmp_path, generator=fault, options={"restarts": 1, "max_deliveries": 9}, **LONG)
    assert run.wait() == 1
    again, last = run.errors.splitlines()
    assert again.endswith("it starts again (1 of 1)")
    assert last.startswith("arriero: error: generator-0 was killed by signal 9")


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupted_run_leaves_nothing_but_its_record(number: signal.Signals, tmp_path: Path) -> None:
    run = Launch(tmp_path, graph={"generators": 2}, **LONG)
    run.until(lambda: run.steps() >= 1)
    began = time.monotonic()
    run.process.send_signal(number)
    assert run.wait() == 130
    assert time.monotonic() - began < 30  # about 1 s on an idle machine
    assert run.left() == []
    s = run.summary
    assert s.state == "stopped"
    assert s.groups_admitted == s.groups_trained + s.groups_dropped["end_of_run"]
    assert run.errors == ""


def test_an_interrupt_while_the_roles_start_leaves_nothing(tmp_path: Path) -> None:
    run = Launch(tmp_path)
    run.until(lambda: run.processes("--role trainer"))
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert run.left() == []


def test_an_inline_run_can_be_interrupted(tmp_path: Path) -> None:
    run = Launch(tmp_path, "inline", **LONG)
    run.until(lambda: run.steps() >= 1)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert run.summary.state == "stopped"


def test_an_occupied_port_is_one_line_that_names_it(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = Launch(tmp_path, launch={"port": port})
        assert run.wait() == 2
    assert len(run.errors.splitlines()) == 1
    assert f"arriero: error: port {port} of 127.0.0.1 is in use; choose another" in run.errors
    assert run.processes() == []


@pytest.mark.slow
def test_a_process_that_stands_still_is_named_with_who_waits_for_what(tmp_path: Path) -> None:
    fault = {"fault": "stop", "fault_at": 6}
    run = Launch(tmp_path, generator=fault, options={"liveness_s": 3.0, "restarts": 0}, **LONG)
    assert run.wait() == 1
    first, *rest = run.errors.splitlines()
    assert first.startswith("arriero: error: generator-0 gave no sign of life for ")
    assert any(line.split()[:4] == ["collect", "waits", "for", "a"] for line in rest)
    assert any(line.split()[:3] == ["generator", "0", "of"] for line in rest), "no depth of an edge"
    assert run.left() == []


@pytest.mark.slow
def test_a_wait_too_long_shows_who_waits_for_what(tmp_path: Path) -> None:
    run = Launch(tmp_path, trainer={"steps": 100, "seconds": 1000.0}, options={"wait_bound_s": 4.0})
    assert run.wait() == 1
    assert "WaitTimeout" in run.errors
    assert "who waits for what:" in run.errors
    assert run.left() == []


@pytest.mark.slow
def test_a_process_that_leaves_early_is_named(tmp_path: Path) -> None:
    run = Launch(tmp_path, generator={"fault": "exit"}, **LONG)
    assert run.wait() == 1
    assert "generator-0 left before its nodes had ended" in run.errors


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_outlives_a_killed_launcher(ranks: int, tmp_path: Path) -> None:
    run = Launch(tmp_path, graph={"ranks": ranks}, **LONG)
    run.until(lambda: run.steps() >= 1)
    run.process.kill()
    run.process.wait()
    deadline = time.monotonic() + 10
    while run.left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert run.left() == []
    assert [p.name for p in (run.path / "broker").iterdir()] == ["nats-server.log"]


@pytest.mark.slow
def test_ranks_run_under_torchrun_and_one_that_is_killed_is_named(tmp_path: Path) -> None:
    run = Launch(tmp_path, graph={"ranks": 2}, options={"restarts": 0}, **LONG)
    run.until(lambda: run.steps() >= 1)
    ranks = [p for p in run.processes("--role trainer") if "RANK" in p.environ()]
    assert sorted(p.environ()["RANK"] for p in ranks) == ["0", "1"]
    next(p for p in ranks if p.environ()["RANK"] == "1").kill()
    assert run.wait() == 1
    assert "arriero: error: trainer-0 rank 1 was killed by signal 9 (SIGKILL)" in run.errors
    assert run.left() == []


def test_cleaning_up_removes_the_weights_of_every_loop_of_this_run_alone(tmp_path: Path) -> None:
    from arriero.engine.weights.shm import path_of

    run = f"run-{secrets.token_hex(4)}"
    own, other = path_of(f"shm://arriero-{run}-weights"), path_of(f"shm://arriero-{run}2-weights")
    try:
        for path in (own, other):
            path.touch(0o600)
        clean(tmp_path, run)
        assert (own.exists(), other.exists()) == (False, True)
    finally:
        other.unlink()


def test_a_light_process_starts_without_torch() -> None:
    modules = "arriero.launchers.role, arriero.launchers.hub, arriero.engine.runtime, arriero.engine.claims"
    program = f"import sys, {modules}; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    assert found.stdout == "False\n"
