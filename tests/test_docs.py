"""What the guides show works as it stands there."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import cast

import pytest

from arriero.components.advantage import GroupAdvantage
from arriero.engine.graph import Graph, PerRecord
from arriero.launchers.launch import inline
from arriero.launchers.options import LaunchOptions
from arriero.launchers.rundir import create
from arriero.schemas.messages import ScoredGroup, Weights
from arriero.schemas.run import RunOptions
from tests.toys import ToyGenerator, ToyPrompts, ToyReward, ToyTrainer

DOCS = Path(__file__).parents[1] / "docs"


def test_the_component_of_the_graph_guide_runs_and_answers_for_all_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "graph.md").read_text(), re.DOTALL)
    (tmp_path / "guide_longest.py").write_text(next(b for b in blocks if "class Longest" in b))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    longest = importlib.import_module("guide_longest").Longest(groups=2)

    g = Graph("guide")
    weights = g.loop(Weights, staleness=1)
    prompts = g.add(ToyPrompts(), name="prompts")()
    scored = g.add(ToyReward(), name="reward")(g.add(ToyGenerator(), name="generator")(prompts, weights))
    # The guide's module is known at run time only: its component has the ports of this type.
    kept = g.add(cast("PerRecord[ScoredGroup, ScoredGroup]", longest), name="longest")(scored)
    batches = g.add(GroupAdvantage(groups=4), name="advantage")(kept)
    weights.close(g.add(ToyTrainer(steps=3), name="trainer")(batches))
    run = create(tmp_path / "run")

    assert inline(g.check(), RunOptions(run_id="guide"), run, LaunchOptions(quiet=True)) == 0
    summary = run.read_summary()
    # Two groups are taken for each that is kept: 3 steps of 4 groups, and as many not the longest at least.
    assert summary.groups_trained == 12
    assert summary.groups_dropped["filtered"] >= 12
