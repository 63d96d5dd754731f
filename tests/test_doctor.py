"""Why a run doesn't get on: the cause from waits and heartbeats, the stacks of those who are stuck."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from arriero.launchers.causes import causes
from arriero.launchers.cli import main
from arriero.launchers.doctor import diagnosis
from arriero.launchers.rundir import create, write_json
from arriero.launchers.stacks import find_py_spy, stacks
from arriero.launchers.vitals import Pulse, Vitals
from arriero.schemas.run import NodeStatus, RoleStatus, RunOptions
from tests.test_launch import LONG, Launch
from tests.toys import toy_graph

SPEC = toy_graph(staleness=1).check()  # prompts -> generator -> reward -> collect -> trainer
HOST = socket.gethostname()
WAITS = {
    "prompts": "admission of record 8 (version 0, 8 of 8 admitted)",
    "generator": "a record of prompts",
    "reward": "a record of generator",
    "collect": "a record of reward",
    "trainer": "a record of collect",
}


def vitals(pid: int = 1, **others: NodeStatus | None) -> Vitals:
    """Every node waits as above for 60 s, but for `others`; None: never heard of."""
    found = Vitals(())
    for name, what in WAITS.items():
        usual = NodeStatus(node=name, waits_for=what, waits_s=60.0)
        if (node := others.get(name, usual)) is not None:
            status = RoleStatus(role=name, replica=0, pid=pid, host=HOST, nodes=(node,))
            found.pulses[f"{name}-0-0"] = Pulse(status=status, age_s=0.5)
    return found


def test_who_doesnt_wait_is_what_all_others_wait_for() -> None:
    (cause,) = causes(SPEC, vitals(generator=NodeStatus(node="generator")))
    assert cause.text.startswith("generator is at work; trainer <- collect <- reward waits for it")
    assert cause.stuck == ("generator-0-0",)
    full = NodeStatus(node="reward", waits_for="room on its own edge", waits_s=5.0)
    (cause,) = causes(SPEC, vitals(reward=full, collect=NodeStatus(node="collect")))
    assert cause.text.startswith("collect is at work; trainer waits for it")


def test_a_circle_of_waits_is_named_with_everybody_in_it() -> None:
    (cause,) = causes(SPEC, vitals())
    assert cause.text.startswith("trainer, collect, reward, generator, prompts wait for each other")
    assert len(cause.stuck) == 5


def test_silence_a_blocked_loop_and_a_replica_that_never_came_go_before_waits() -> None:
    silent = vitals()
    silent.pulses["reward-0-0"] = Pulse(status=silent.pulses["reward-0-0"].status, age_s=40.0)
    assert [c.text.partition(":")[0] for c in causes(SPEC, silent)] == [
        "reward-0-0 has given no sign of life for 40 s"
    ]
    blocked = vitals()
    status = blocked.pulses["reward-0-0"].status.model_copy(update={"lag_s": 12.0})
    blocked.pulses["reward-0-0"] = Pulse(status=status, age_s=0.1)
    assert "hasn't let its event loop run for 12 s: reward computes" in causes(SPEC, blocked)[0].text
    assert causes(SPEC, vitals(reward=None))[0].text.startswith("reward-0 has never been heard of")


def test_a_run_whose_nodes_have_ended_has_no_cause() -> None:
    over = Vitals(())
    nodes = tuple(NodeStatus(node=name, ended=True) for name in WAITS)
    for role in WAITS:
        status = RoleStatus(role=role, replica=0, pid=1, host=HOST, nodes=nodes)
        over.pulses[f"{role}-0-0"] = Pulse(status=status, age_s=60.0)
    assert causes(SPEC, over) == []
    assert "likely cause" not in diagnosis(SPEC, over, with_stacks=True)


@pytest.mark.skipif(find_py_spy() is None, reason="py-spy isn't installed")
def test_a_stack_shows_the_function_that_is_stuck_and_a_dead_process_says_so() -> None:
    program = "import time\ndef stuck_here():\n    time.sleep(600)\nprint('up', flush=True)\nstuck_here()\n"
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    try:
        seen = vitals(pid=child.pid, generator=NodeStatus(node="generator"))
        text = diagnosis(SPEC, seen, with_stacks=True)
        assert "stack of generator-0-0:\n" in text
        assert "stuck_here (<string>:3)" in text
        assert "stack of" not in diagnosis(SPEC, seen, with_stacks=False)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert f"py-spy can't read process {child.pid}" in stacks(seen, ["generator-0-0"])


def test_a_replica_of_another_machine_is_left_to_that_machine() -> None:
    seen = vitals()
    status = seen.pulses["reward-0-0"].status.model_copy(update={"host": "gpu7"})
    seen.pulses["reward-0-0"] = Pulse(status=status, age_s=0.5)
    assert "it runs on gpu7; there: py-spy dump --pid 1" in stacks(seen, ["reward-0-0"])


def test_the_command_reads_what_the_launcher_has_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = create(tmp_path / "run")
    write_json(run.graph, SPEC)
    write_json(run.options, RunOptions(run_id="r"))
    assert main(["doctor", str(run.path)]) == 0
    assert "no replica has been heard of yet" in capsys.readouterr().out
    written = vitals(generator=NodeStatus(node="generator")).written(SPEC, step=3)
    write_json(run.vitals, written.model_copy(update={"time": time.time() - 100}))
    assert main(["doctor", str(run.path), "--no-stacks"]) == 0
    out = capsys.readouterr().out
    assert "its newest step is 3, its vitals are 10" in out
    assert "the launcher doesn't write any more" in out
    assert "generator-0-0 has given no sign of life for 10" in out  # heartbeats have aged with the file
    assert main(["doctor", str(tmp_path / "nowhere")]) == 2
    assert main(["doctor", "--stack"]) == 2


def test_the_installation_is_examined_and_says_what_is_missing_for_what(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "a run can start here"
    for part in ("torch", "CUDA", "NCCL", "nats-server", "vllm", "sbatch", "kubernetes", "py-spy"):
        assert any(line[8:].startswith(part) for line in out.splitlines())
    monkeypatch.setenv("ARRIERO_NATS_SERVER", "/nowhere/nats-server")
    monkeypatch.setenv("PATH", "")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "nothing runs without nats-server"
    assert "sbatch          not on PATH; needed for --on slurm" in out


@pytest.mark.slow
def test_a_bound_that_is_hit_tells_the_cause_and_the_stack_and_so_does_the_command_before(
    tmp_path: Path,
) -> None:
    run = Launch(tmp_path, generator={"fault": "hang", "fault_at": 6}, options={"wait_bound_s": 20.0}, **LONG)
    vitals_json = run.path / "vitals.json"
    deadline = time.monotonic() + 60
    while not (vitals_json.exists() and '"lag_s":0.0' not in vitals_json.read_text().replace(" ", "")):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    time.sleep(5)
    command = [sys.executable, "-m", "arriero", "doctor", str(run.path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert run.wait(90) == 1
    for text in (said, run.errors):
        assert "generator-0-0 hasn't let its event loop run for" in text
        if find_py_spy() is not None:
            assert "_commit (" in text
    assert run.left() == []
