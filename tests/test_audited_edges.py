"""What an audit says of records and the edges of the graph that they came by."""

from __future__ import annotations

from pathlib import Path

import pytest

from arriero.engine.lineage.reader import Lineage
from arriero.engine.lineage.writer import LineageWriter, Seen
from arriero.launchers.audited_edges import on_edges
from arriero.schemas.graph import GraphSpec, NodeSpec
from arriero.schemas.messages import ScoredGroup
from tests.lineage_runs import OPENED, scored_group


class Judged(ScoredGroup):
    """As a pipeline may derive it."""


@pytest.mark.parametrize(
    ("output", "told"),
    [
        ("tests.test_audited_edges:Judged", []),
        ("arriero.schemas.messages:ScoredGroup", []),
        ("not.installed.here:ScoredGroup", []),
        ("arriero.schemas.messages:Batch", ["is a ScoredGroup of reward, which gives none"]),
    ],
)
def test_a_group_is_of_the_kind_that_its_node_gives(tmp_path: Path, output: str, told: list[str]) -> None:
    writer = LineageWriter(str(tmp_path), OPENED)
    writer.commit([Seen("reward", scored_group(0))])
    node = NodeSpec(name="reward", component="a:b", config={}, output=output, role="reward")
    findings = on_edges(Lineage(str(tmp_path)), GraphSpec(name="graph", nodes=(node,)))
    assert [f.what for f in findings if f.what.startswith("is a")] == told
