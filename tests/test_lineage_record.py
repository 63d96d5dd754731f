"""Runs that are recorded: all of what passed the edges, whoever was to take it, and nothing twice."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from arriero.engine.lineage.reader import Lineage
from arriero.engine.lineage.recorder import recorded
from arriero.engine.runtime.ledger import Ledger
from arriero.launchers.rundir import RunDir
from tests.test_launch import Launch
from tests.toys import toy_graph

RECORDED: dict[str, Any] = {
    "options": {"record": True},
    "graph": {"generators": 2, "staleness": 1},
    "prompts": {"held_out": 3, "every": 2},
    "trainer": {"steps": 6, "seconds": 0.05},
}


def test_an_edge_is_recorded_unless_its_records_stand_whole_in_the_next_ones() -> None:
    assert recorded(toy_graph().check()) == ("reward", "collect")


@pytest.mark.parametrize("how", ["inline", "launch"])
def test_a_recorded_run_can_be_put_together_again(tmp_path: Path, how: Literal["inline", "launch"]) -> None:
    run = Launch(tmp_path, how, **RECORDED)
    assert (run.wait(), run.errors) == (0, "")
    lineage = Lineage(str(run.path))
    assert (lineage.broken, lineage.twice) == ("", [])
    assert lineage.anchor == run.summary.lineage
    assert lineage.closed is not None
    assert lineage.closed.state == "finished"
    assert [w.version for w in lineage.weights] == list(range(7))
    for step in lineage.steps:
        batch = lineage.trained_batch(step)
        assert (batch.id, batch.origins) == (step.batch, step.origins)
        assert sum(int(s.mask.sum()) for s in batch.samples) == step.tokens
        assert all(lineage.batches[batch.id].rollout[k] == k % 2 for k in range(len(batch.samples)))
    ledger = Ledger()
    for event in lineage.events:
        ledger.apply(event)
    assert (ledger.in_flight, ledger.admitted, ledger.trained) == (0, 24, 24)
    held_out = [g for g in lineage.groups.values() if g.prompt.split == "eval"]
    assert len(held_out) == sum(1 for _ in lineage.evaluated)


def test_each_step_of_a_recorded_run_stands_in_one_piece(tmp_path: Path) -> None:
    run = Launch(tmp_path, "inline", **RECORDED)
    assert run.wait() == 0
    lineage = Lineage(str(run.path))
    for step in lineage.steps:
        places = [lineage.groups[name].arrays for name in lineage.batches[step.batch].groups]
        chunks = {(p.part, p.start // 4096) for p in places}
        assert len(chunks) == 1


def test_a_stopped_run_has_a_record_of_all_it_did(tmp_path: Path) -> None:
    run = Launch(tmp_path, "launch", **RECORDED | {"trainer": {"steps": 100_000, "seconds": 0.05}})
    run.until(lambda: run.steps() >= 3)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(15) == 130
    lineage = Lineage(str(run.path))
    assert lineage.closed is not None
    assert (lineage.broken, lineage.closed.state) == ("", "stopped")
    assert len(lineage.steps) == run.summary.steps
    for step in lineage.steps:
        assert lineage.trained_batch(step).origins == step.origins


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
def test_a_killed_run_leaves_whole_commits(tmp_path: Path, steps: int) -> None:
    run = Launch(tmp_path, "launch", **RECORDED | {"trainer": {"steps": 100_000, "seconds": 0.05}})
    run.until(lambda: run.steps() >= steps)
    run.process.kill()
    run.process.wait()
    lineage = Lineage(str(run.path))
    assert (lineage.broken, lineage.closed) == ("", None)
    for name in lineage.batches:
        assert lineage.batch(name).origins == lineage.batches[name].origins


def test_a_record_stands_wherever_the_run_is_told(tmp_path: Path) -> None:
    place = tmp_path / "elsewhere"
    run = Launch(
        tmp_path, "inline", **RECORDED | {"options": {"record": True, "record_url": f"file://{place}"}}
    )
    assert run.wait() == 0
    assert not RunDir(run.path).lineage.exists()
    record = Lineage(str(place))
    assert (record.broken, bool(record.steps)) == ("", True)


def test_a_full_edge_makes_the_recorder_let_go(tmp_path: Path) -> None:
    # The batch component needs all that its edge holds, so nothing may be kept back for the sake of order.
    run = Launch(tmp_path, "inline", **RECORDED | {"graph": {"staleness": 1, "room": 4}})
    assert (run.wait(), run.errors) == (0, "")
    assert not Lineage(str(run.path)).twice


def test_the_process_that_records_loads_neither_torch_nor_what_questions_need() -> None:
    code = "import sys, arriero.launchers.recording, arriero.engine.lineage.writer; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not {"torch", "transformers", "duckdb", "pyarrow", "zarr"} & {*done.stdout.split()}
