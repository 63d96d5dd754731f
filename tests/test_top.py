"""The live view, from files as a launcher writes them, and of a real run."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from arriero.launchers.cli import main
from arriero.launchers.rundir import RunDir, create, write_json
from arriero.launchers.top import Screen, sparkline
from arriero.schemas.run import EdgeState, LastPulse, NodeStatus, RoleStatus, VitalsFile
from tests.inline_runs import recorded_grpo
from tests.toys import toy_graph

torch.set_num_threads(1)

SPEC = toy_graph(staleness=1).check()


def seen(screen: Screen) -> str:
    out = io.StringIO()
    Console(file=out, width=140).print(screen.draw())
    return out.getvalue()


def vitals(*, given: int, busy_s: float, idle_s: float) -> VitalsFile:
    node = NodeStatus(
        node="generator", waits_for="a record of prompts", waits_s=3, busy_s=busy_s, idle_s=idle_s,
        given=given, tokens=10 * given,
    )  # fmt: skip
    status = RoleStatus(role="generator", replica=0, pid=1, host="h", nodes=(node,))
    edge = EdgeState(
        messages=6, capacity=12, bytes=1, waiting={"reward-records": 4}, leased={"reward-records": 2}
    )
    return VitalsFile(
        time=time.time() - 5, step=7, pulses={"generator-0-0": LastPulse(status=status, age_s=0.5)},
        edges={"generator": edge},
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = create(tmp_path / "run")
    write_json(made.graph, SPEC)
    return made


def test_a_run_that_has_only_begun_says_so(run: RunDir) -> None:
    assert "no replica has been heard of yet" in seen(Screen(run))


def test_rates_are_those_since_the_look_before(run: RunDir) -> None:
    screen = Screen(run)
    write_json(run.vitals, vitals(given=100, busy_s=10, idle_s=30))
    first = next(line for line in seen(screen).splitlines() if "waits 3 s for a record of prompts" in line)
    assert first.split()[-6:-3] == ["75%", "2.5", "25"]
    write_json(run.vitals, vitals(given=110, busy_s=11, idle_s=31))
    again = seen(screen)
    line = next(line for line in again.splitlines() if "waits 3 s for a record of prompts" in line)
    assert line.split()[-6:-3] == ["50%", "5.0", "50"]
    assert "step 7  seen 5 s ago" in again
    edge = next(line for line in again.splitlines() if "6 of" in line)
    assert edge.split()[:8] == ["generator", "→", "reward", "6", "of", "12", "4", "2"]


def test_curves_and_warnings_come_from_the_steps(run: RunDir) -> None:
    write_json(run.vitals, vitals(given=1, busy_s=1, idle_s=1))
    steps = [{"step": k, "reward": k / 8, "loss": None, "health": {"kl": 1}} for k in range(9)]
    run.metrics.write_text("".join(json.dumps(s) + "\n" for s in steps) + '{"step": 9, "rew')
    text = seen(Screen(run))
    assert "WARNED: kl" in text
    assert "▁▂▃▄▅▆▇██" in text
    assert "loss" not in text


def test_a_sparkline_goes_from_the_lowest_to_the_highest() -> None:
    assert sparkline([]) == ""
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([0, 7, 3.6]) == "▁█▅"
    assert len(sparkline(list(range(1000)))) == 48


def test_a_recorded_run_shows_its_last_rollouts_and_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recorded_grpo(tmp_path)
    capsys.readouterr()
    assert main(["top", str(run.path)]) == 0  # it is over: shown once
    text = capsys.readouterr().out
    assert "finished  step 3" in text
    assert "last rollouts" in text
    assert "->" in text
    assert main(["top", str(run.path), "--all"]) == 2
    assert main(["top", "nats://127.0.0.1:4222"]) == 2
    assert "--credentials FILE" in capsys.readouterr().err
    assert main(["top", str(tmp_path / "nowhere")]) == 2
