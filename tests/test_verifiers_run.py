"""Rewards in a whole run of real roles: what its record says of quarantined rows, hangs and verdicts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.rewards import Function, Gsm8k, Known, Limits
from arriero.components.verifiers.reward import RolloutReward
from arriero.engine.graph import Evaluation, Graph
from arriero.engine.stream import Stream
from arriero.launchers.launch import inline
from arriero.launchers.options import LaunchOptions
from arriero.launchers.rundir import RunDir, create
from arriero.schemas.messages import Outcome, Prompt, Rollout, RolloutGroup, ScoredGroup, Weights
from arriero.schemas.run import RunOptions
from tests.toys import ToyCollect, ToyTrainer, rollout
from tests.verdicts import generous, group, hangs_at_row_1
from tests.verdicts import run as scored_by


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Prompts whose answer is their row; every fourth one has none that can be read."""

    count: PositiveInt = 1000

    async def evaluation(self) -> Evaluation:
        return Evaluation(
            prompts=[
                Prompt(id=f"held-{k}", text="?", answer=f"#### {k}" if k < 3 else "unknown", row=k)
                for k in range(4)
            ]
        )

    async def run(self) -> AsyncIterator[Prompt]:
        for k in range(self.count):
            yield Prompt(id=f"p{k}", text="?", answer="unknown" if k % 4 == 3 else f"#### {k}", row=k)


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Two responses: the row, and something else."""

    async def run(self, prompts: Stream[Prompt], weights: Stream[Weights]) -> AsyncIterator[RolloutGroup]:
        await weights.next()
        async for prompt in prompts:
            by = prompt.min_version if prompt.split == "eval" else 0
            sampled = toy(f"#### {prompt.row}", by), toy("#### -1", by)
            yield RolloutGroup(prompt=prompt, rollouts=sampled)


def toy(text: str, version: int = 0) -> Rollout:
    return rollout(version).model_copy(update={"text": text})


def ran(reward: RolloutReward, path: Path, *, replicas: int = 1) -> tuple[int, RunDir]:
    g = Graph("sums")
    weights = g.loop(Weights, staleness=100)
    prompts = g.add(Sums(), name="prompts")()
    groups = g.add(Answers(), name="generator")(prompts, weights)
    scored = g.add(reward, name="reward", replicas=replicas)(groups)
    batches = g.add(ToyCollect(groups=4), name="collect")(scored)
    weights.close(g.add(ToyTrainer(steps=5), name="trainer")(batches))
    run = create(path)
    options = RunOptions(run_id=path.name, wait_bound_s=60, heartbeat_s=0.2)
    return inline(g.check(), options, run, LaunchOptions(quiet=True)), run


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_run_trains_on_verdicts_and_accounts_for_quarantined_rows(tmp_path: Path, replicas: int) -> None:
    code, run = ran(Gsm8k(), tmp_path / "run", replicas=replicas)
    assert code == 0
    summary = json.loads(run.summary.read_text(encoding="utf-8"))
    assert summary["steps"] == 5
    assert summary["accuracy_before"] == 0.5  # of each held-out prompt's two responses one is right
    text = run.ledger.read_text(encoding="utf-8")
    told = [line for line in text.splitlines() if "quarantined" in line]
    assert told
    assert all("'unknown' has no number" in line for line in told)
    kinds = [json.loads(line) for line in text.splitlines()]
    held_out = {e["origin"] for e in kinds if e["kind"] == "admitted" and e["split"] == "eval"}
    trained_on = [e for e in map(json.loads, told) if not held_out & set(e["origins"])]
    assert summary["groups_dropped"]["invalid"] == len(trained_on)
    assert summary["counts"]["prompts_quarantined"] == len(told)
    assert [(r["prompts"], r["missing"]) for r in summary["evaluations"]] == [(3, 1), (3, 1)]
    report = [json.loads(line) for line in (run.path / "quarantine.jsonl").read_text("utf-8").splitlines()]
    assert {(r["split"], r["row"]) for r in report} >= {("eval", 3), ("train", 3), ("train", 7)}
    assert len(report) == summary["counts"]["rows_quarantined"] <= len(told)
    running = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    assert not [p for p in running if "verifiers.worker" in " ".join(p.cmdline())]


def test_a_reward_that_hangs_costs_its_rollout_and_the_run_goes_on(tmp_path: Path) -> None:
    code, run = ran(Function(function=hangs_at_row_1, limits=Limits(time_s=2.0)), tmp_path / "run")
    assert code == 0
    counts: Counter[str] = Counter(json.loads(run.summary.read_text(encoding="utf-8"))["counts"])
    # The held-out prompts and the training prompts have a row 1 each.
    assert 1 <= counts["scores_timeout"] <= 4
    assert counts["workers_replaced"] >= 1


def test_a_reward_that_fails_its_canaries_ends_the_run_with_the_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    known = (Known(answer="1", right="1", wrong="2"),)
    code, run = ran(Function(function=generous, known=known), tmp_path / "run")
    assert code != 0
    summary = json.loads(run.summary.read_text(encoding="utf-8"))
    assert (
        "can't be trusted: it finds a known wrong response '2' ok"
        in summary["error"] + capfd.readouterr().err
    )


async def test_a_group_is_scored_in_place_while_others_are_under_way() -> None:
    records = [group(*(f"#### {k + j}" for j in range(3)), answer=str(k), id=str(k)) for k in range(12)]
    found = [r for r in await scored_by(Gsm8k(workers=3), *records) if isinstance(r, ScoredGroup)]
    assert [r.parents for r in found] == [(str(k),) for k in range(12)]
    assert all([s.outcome for s in r.scores] == [Outcome.OK, Outcome.WRONG, Outcome.WRONG] for r in found)
