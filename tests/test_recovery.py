"""Processes of a real run are killed; what they leave is whole, and nothing was made twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from arriero.engine.lineage.chain import lines
from arriero.schemas.lineage import GroupEntry
from arriero.schemas.messages import Message
from tests.crashes import Crashing


def group_ids(run: Crashing) -> list[str]:
    entries: list[Message] = [line.entry for line in lines(str(run.path / "lineage"))]
    return [e.id for e in entries if isinstance(e, GroupEntry)]


@pytest.mark.timeout(300)
def test_a_killed_trainer_comes_back_to_the_weights_that_it_had_published(tmp_path: Path) -> None:
    run = Crashing(tmp_path, "--staleness", "1", steps=9)
    run.until(lambda: run.steps() >= 5)
    run.kill("trainer")
    assert run.wait() == 0, run.errors
    assert "trainer-0 was killed by signal 9 (SIGKILL)" in run.errors
    s = run.summary
    assert (s.state, s.steps, s.restarts) == ("finished", 9, {"trainer-0": 1})
    assert s.groups_trained == 9 * 4
    assert s.staleness_max <= 1
    announced = run.fingerprints()
    assert sorted(announced) == list(range(10))
    again = {version: prints for version, prints in announced.items() if len(prints) > 1}
    assert again
    assert all(len({*prints}) == 1 for prints in again.values())
    assert len(group_ids(run)) == len({*group_ids(run)})
    assert run.findings() == []
    steps = [json.loads(line)["step"] for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 10))


@pytest.mark.timeout(300)
def test_a_killed_source_and_a_killed_batch_node_go_on_where_they_were(tmp_path: Path) -> None:
    run = Crashing(tmp_path, "--staleness", "1", steps=9)
    run.until(lambda: run.steps() >= 2)
    run.kill("prompts")
    run.until(lambda: run.steps() >= 5)
    run.kill("advantage")
    assert run.wait() == 0, run.errors
    s = run.summary
    assert (s.state, s.steps, s.restarts) == ("finished", 9, {"prompts-0": 1, "advantage-0": 1})
    assert s.groups_admitted == s.groups_trained + sum(s.groups_dropped.values())
    assert run.findings() == []
