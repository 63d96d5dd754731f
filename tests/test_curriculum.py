"""A curriculum in a whole run: what it leaves out follows from the run's own ledger, twice the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from arriero.components.curriculum import Curriculum
from arriero.components.prompts import PromptSource
from arriero.components.rewards import Function
from arriero.pipelines.grpo import GRPOConfig, grpo
from arriero.schemas.messages import Prompt, Rollout
from tests.inline_runs import policy_gradient_fields, steps_of

HOPELESS, SOLVED = {0, 1}, {2}


def by_row(prompt: Prompt, rollout: Rollout) -> float:
    """Rows 0 and 1 nobody solves, row 2 everybody; of the others about half of the responses are right."""
    if prompt.row in HOPELESS | SOLVED:
        return float(prompt.row in SOLVED)
    return float(sum(rollout.tokens.tolist()) % 2)


def ran(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Metrics, ledger and summary of six steps of four groups, on eight rows: an epoch is two steps."""
    path.mkdir()
    fields = policy_gradient_fields(
        path, reward=Function(function=by_row, isolate=False), steps=6, groups_per_step=4, staleness=1
    )
    data = path / "eight.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{a}+1="}) + "\n" for a in range(8)))
    fields["data"] = PromptSource(path=str(data), curriculum=Curriculum(low=0.1, high=0.9))
    steps = steps_of(grpo(GRPOConfig(**fields)), path / "run")
    ledger = [json.loads(line) for line in (path / "run" / "ledger.jsonl").read_text().splitlines()]
    return steps, ledger, json.loads((path / "run" / "summary.json").read_text())


def admitted(ledger: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(e["epoch"], e["row"]) for e in ledger if e["kind"] == "admitted"]


def test_rows_that_are_always_or_never_solved_leave_the_run_and_it_is_the_same_again(tmp_path: Path) -> None:
    steps, ledger, summary = ran(tmp_path / "one")
    asked = admitted(ledger)
    assert len(steps) == 6
    assert sorted(row for epoch, row in asked if epoch == 0) == list(range(8))
    late = [row for epoch, row in asked if epoch >= 2]  # what epoch 0 gave is certain by then
    assert late
    assert not (HOPELESS | SOLVED) & set(late)
    assert summary["counts"]["rows_outside_curriculum"] >= 3
    assert summary["groups_admitted"] == summary["groups_trained"] + sum(summary["groups_dropped"].values())
    again, same_ledger, _ = ran(tmp_path / "two")
    assert admitted(same_ledger) == asked
    told = ("reward", "loss", "grad_norm")
    assert [[s.get(k) for k in told] for s in again] == [[s.get(k) for k in told] for s in steps]
