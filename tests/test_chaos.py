"""Faults in running processes, a few; `make chaos` goes on for hours."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.chaos import Storm, kinds
from tests.crashes import Crashing


@pytest.mark.timeout(300)
def test_the_account_is_right_whatever_is_killed_or_cut_off(tmp_path: Path) -> None:
    storm = Storm(tmp_path, random.Random(0), steps=80)
    faults = [
        ("trainer", "kill"),
        ("collect", "kill"),
        ("prompts", "kill"),
        ("broker", "kill"),
        ("hub", "kill"),
    ]
    if "cut" in kinds():
        faults.append(("generator", "cut"))
    for role, kind in faults:
        storm.run.until(lambda: storm.run.steps() >= 2)
        storm.commit(role, kind)
    assert storm.findings() == []
    assert [(f.role, f.kind) for f in storm.faults] == faults


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_random_faults(tmp_path: Path) -> None:
    number = done = 0
    while done < 100:
        folder = tmp_path / str(number)
        folder.mkdir()
        storm = Storm(folder, random.Random(number), steps=360)
        storm.strike(12)
        assert storm.findings() == []
        number, done = number + 1, done + len(storm.faults)


@pytest.mark.timeout(300)
def test_without_a_record_the_prompts_after_the_checkpoint_are_sent_again(tmp_path: Path) -> None:
    run = Crashing(tmp_path, "--staleness", "1", "--record", "false", steps=9)
    run.until(lambda: run.steps() >= 5)
    run.kill("trainer")
    assert run.wait() == 0, run.errors
    assert "all of the run starts again, from version" in run.errors
    s = run.summary
    assert (s.state, s.steps, s.groups_trained) == ("finished", 9, 36)
    assert s.staleness_max <= 1
    assert s.groups_admitted == s.groups_trained + sum(s.groups_dropped.values())
