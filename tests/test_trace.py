"""The trace of a run: work and waits by hand-made numbers, and a real run from admission to version."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from arriero.launchers.cli import main
from arriero.launchers.launch import inline
from arriero.launchers.options import LaunchOptions
from arriero.launchers.rundir import RunDir, create
from arriero.launchers.timeline import moments
from arriero.launchers.trace import slices, trace_events
from arriero.schemas.run import Moment, NodeMoment, RunOptions
from tests.toys import ToyGenerator, ToyTrainer, toy_graph


def look(time: float, busy_s: float, idle_s: float, waits_for: str = "", *, ended: bool = False) -> Moment:
    node = NodeMoment(
        replica="t-0-0", node="t", busy_s=busy_s, idle_s=idle_s, waits_for=waits_for, ended=ended
    )
    return Moment(time=time, nodes=(node,), edges={"e": 2})


def test_between_two_looks_the_seconds_at_work_are_drawn_before_the_seconds_of_waiting() -> None:
    told = [look(10, 0, 0), look(12, 1, 1, "a record"), look(14, 1, 3, "a record"), look(15, 2, 3)]
    assert slices(told) == {("t-0-0", "t"): [(10, 11, "busy"), (11, 14, "a record"), (14, 15, "busy")]}


def test_a_replica_that_starts_again_and_one_that_has_ended_leave_gaps() -> None:
    again = [look(0, 5, 5), look(1, 0, 0), look(2, 1, 0)]
    assert slices(again)["t-0-0", "t"] == [(1, 2, "busy")]
    over = [look(0, 0, 0), look(1, 1, 0, ended=True), look(5, 1, 0, ended=True)]
    assert slices(over)["t-0-0", "t"] == [(0, 1, "busy")]


def run_of_toys(path: Path) -> RunDir:
    generator = ToyGenerator(seconds=0.02)
    spec = toy_graph(generator=generator, staleness=1, trainer=ToyTrainer(steps=4, seconds=0.6)).check()
    run = create(path)
    assert inline(spec, RunOptions(run_id="toys", heartbeat_s=0.1), run, LaunchOptions(quiet=True)) == 0
    return run


def test_a_run_is_traced_from_admission_to_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of_toys(tmp_path / "run")
    assert main(["trace", str(run.path), "--out", str(tmp_path / "t.json")]) == 0
    assert "ui.perfetto.dev" in capsys.readouterr().out
    events: list[dict[str, Any]] = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    kinds = Counter(e["ph"] for e in events)
    summary = run.read_summary()
    assert kinds["i"] == summary.steps == 4
    # Every prompt has a span, and each comes to an end: the run accounts for all of them.
    assert kinds["b"] == kinds["e"] == summary.groups_admitted
    assert {e["name"] for e in events if e["ph"] == "C"} >= {"edge prompts", "edge generator"}
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"generator", "trainer", "prompts", "versions and edges"} <= names
    waits = {e["name"] for e in events if e["ph"] == "X"}
    assert "busy" in waits
    assert all(e["ts"] >= 0 and e.get("dur", 1) > 0 for e in events if "ts" in e)


def test_a_torn_last_line_is_left_out_and_a_damaged_one_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "timeline.jsonl"
    whole = look(1, 0, 0).model_dump_json()
    path.write_text(f'{whole}\n{{"time": 2')
    assert len([*moments(path)]) == 1
    path.write_text(f'{{"time": 2\n{whole}\n')
    assert main(["trace", str(tmp_path)]) == 2
    assert "line 1 of" in capsys.readouterr().err
    assert main(["trace", str(tmp_path / "none")]) == 2
    assert [*trace_events([])] == []
