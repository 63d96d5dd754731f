"""Whoever comes to its end first: all leave within seconds, with exit code 0, and no prompt is lost."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.test_launch import Launch

MANY = 10**6
BOUND_S = 5.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))  # on an idle machine

ENDS: dict[str, tuple[dict[str, Any], int]] = {
    # What ends first, and how many steps there are.
    "the data set": ({"prompts": {"count": 24}, "trainer": {"steps": MANY}}, 6),
    "the trainer": ({"prompts": {"count": MANY}, "trainer": {"steps": 6}}, 6),
    "the trainer, while generators are slow": (
        {"prompts": {"count": MANY}, "generator": {"seconds": 1.0}, "trainer": {"steps": 3},
         "graph": {"generators": 4, "staleness": 3}},
        3,
    ),
    "the source, long before the trainer": (
        {"prompts": {"count": 24}, "trainer": {"steps": MANY, "seconds": 0.5}, "graph": {"staleness": 8}}, 6,
    ),
    "both at once": ({"prompts": {"count": 24}, "trainer": {"steps": 6}}, 6),
}  # fmt: skip


@pytest.mark.parametrize("first", ENDS)
@pytest.mark.timeout(180)
def test_whoever_ends_first_all_leave_within_seconds(first: str, tmp_path: Path) -> None:
    setting, steps = ENDS[first]
    run = Launch(tmp_path, **setting)
    deadline = time.monotonic() + 90
    while run.steps() < steps:
        assert time.monotonic() < deadline, run.errors
        time.sleep(0.01)
    began = time.monotonic()
    assert run.wait() == 0, run.errors
    assert time.monotonic() - began < BOUND_S
    s = run.summary
    assert (s.state, s.steps, s.groups_trained) == ("finished", steps, 4 * steps)
    assert s.groups_admitted == s.groups_trained + sum(s.groups_dropped.values())
    assert s.groups_dropped.keys() <= {"end_of_run"}
    assert run.left() == []


@pytest.mark.timeout(180)
def test_when_all_generators_are_dead_the_run_says_who_and_stops_within_the_bound(tmp_path: Path) -> None:
    run = Launch(
        tmp_path,
        graph={"generators": 2},
        trainer={"steps": MANY},
        options={"restarts": 0, "wait_bound_s": 10.0},
    )
    run.until(lambda: run.steps() >= 2)
    began = time.monotonic()
    for victim in run.processes("--role generator"):
        victim.kill()
    assert run.wait() == 1
    assert time.monotonic() - began < 10 + BOUND_S
    assert "generator-" in run.errors
    assert "was killed by signal 9 (SIGKILL)" in run.errors
    assert run.summary.state == "failed"
    assert run.left() == []


@pytest.mark.timeout(180)
def test_a_trainer_without_batches_says_what_it_waited_for_and_who_is_silent(tmp_path: Path) -> None:
    """Generators that live and give nothing: nobody is dead, so the bound of the wait ends the run."""
    run = Launch(
        tmp_path,
        generator={"seconds": 3600.0},
        trainer={"steps": MANY},
        options={"wait_bound_s": 4.0},
    )
    assert run.wait(90) == 1
    assert "WaitTimeout" in run.errors
    assert "who waits for what:" in run.errors
    assert "what stands on the edges:" in run.errors
    assert run.left() == []
