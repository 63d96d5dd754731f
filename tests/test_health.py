"""Every gate is provoked, by numbers and by runs that go wrong; a healthy run warns of nothing."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from arriero.components.health import Gate, HealthGates, High, Low, judge
from arriero.components.measures import reward_spread
from arriero.engine.broker import Depth
from arriero.engine.graph import Graph
from arriero.engine.lineage.reader import Lineage
from arriero.launchers import facts
from arriero.launchers.audit import audited
from arriero.launchers.audited_health import found_again
from arriero.launchers.cli import main
from arriero.launchers.exports.subject import subject
from arriero.launchers.health import Health, gates_of
from arriero.launchers.lineage import indexed
from arriero.launchers.rundir import RunDir
from arriero.launchers.vitals import Pulse, Vitals
from arriero.pipelines.grpo import GRPOConfig, grpo
from arriero.schemas.ledger import EVENT, DroppedEvent, Event, Trained, Unhealthy
from arriero.schemas.messages import Sample
from arriero.schemas.run import NodeStatus, RoleStatus
from tests.inline_runs import policy_gradient_fields
from tests.toys import toy_graph

torch.set_num_threads(1)

HEALTHY = {
    "clipped": 0.1, "tokens": 100.0, "reward_std": 0.4, "entropy": 2.0, "kl": 0.01, "staleness_mean": 0.5,
    "stale_share": 0.0, "grad_norm": 1.0, "effective_samples": 0.9, "imbalance": 0.1, "lag_s": 0.0,
}  # fmt: skip
SICK = [
    ("masked", "clipped", 0.6, 1),
    ("tokens", "tokens", 0.0, 1),
    ("reward_variance", "reward_std", 0.0, 5),
    ("entropy", "entropy", 0.1, 3),
    ("kl", "kl", 0.3, 1),
    ("staleness", "staleness_mean", 9.0, 1),
    ("stale", "stale_share", 0.4, 3),
    ("gradient", "grad_norm", 30.0, 1),
    ("effective_samples", "effective_samples", 0.2, 1),
    ("imbalance", "imbalance", 0.8, 5),
    ("lag", "lag_s", 7.0, 1),
]
GATES = HealthGates().gates()


def test_every_gate_is_provoked_here() -> None:
    assert [name for name, *_ in SICK] == [g.name for g in GATES]
    assert {measure for _, measure, *_ in SICK} == HEALTHY.keys()


def test_a_healthy_step_is_warned_of_by_none() -> None:
    assert judge(GATES, [HEALTHY] * 30, 30, "trainer") == []
    assert judge(GATES, [{}], 1, "trainer") == []
    assert judge(GATES, [HEALTHY | {"kl": math.nan}], 1, "trainer") == []


@pytest.mark.parametrize(("name", "measure", "value", "steps"), SICK)
def test_a_gate_warns_after_its_number_of_steps_and_says_what_to_set(
    name: str, measure: str, value: float, steps: int
) -> None:
    history = [HEALTHY] * 20
    for number in range(1, steps + 1):
        history = [*history, HEALTHY | {measure: value}]
        assert (name in {f.gate for f in judge(GATES, history, 20 + number, "trainer")}) == (number == steps)
    (found,) = (f for f in judge(GATES, history, 20 + steps, "trainer") if f.gate == name)
    assert found.level == ("stop" if name == "tokens" else "warn")
    assert found.detail.startswith(f"step {20 + steps}: ")
    assert f"health.{name}.{found.level} is " in found.detail
    ratio = {"entropy": 0.1 / 2.0, "gradient": 30.0}.get(name, value)
    assert (found.node, found.version, found.measure) == ("trainer", 20 + steps, measure)
    assert found.value == pytest.approx(ratio)
    gate = next(g for g in GATES if g.name == name)
    assert found.bound == (gate.stop if found.level == "stop" else gate.warn)
    assert judge(GATES, [*history, HEALTHY], 99, "trainer") == []


@pytest.mark.parametrize(("name", "measure", "value", "steps"), SICK)
def test_a_gate_stops_where_the_configuration_says_so_and_can_be_taken_away(
    name: str, measure: str, value: float, steps: int
) -> None:
    history = [*[HEALTHY] * 20, *[HEALTHY | {measure: value}] * steps]
    (gate,) = (g for g in GATES if g.name == name)
    kind = Low if gate.low else High
    chosen: dict[str, Any] = {name: kind(warn=gate.warn, stop=gate.warn, steps=steps)}
    assert [f.level for f in judge(HealthGates(**chosen).gates(), history, 1, "trainer")] == ["stop"]
    none: dict[str, Any] = {name: kind()}
    assert judge(HealthGates(**none).gates(), history, 1, "trainer") == []


def test_a_spike_is_judged_by_the_median_before_it_and_a_collapse_by_the_first_steps() -> None:
    gradient = [g for g in GATES if g.name in ("gradient", "entropy")]
    norms = [{"grad_norm": n} for n in (1.0, 100.0, 1.0, 1.0, 1.0)]
    assert judge(gradient, [*norms[:4], {"grad_norm": 50.0}], 5, "trainer") == []  # of too few steps
    (found,) = judge(gradient, [*norms, {"grad_norm": 50.0}], 6, "trainer")
    assert "50 times what it was before" in found.detail
    entropies = [{"entropy": e} for e in (2.0, 2.0, 2.0, 2.0, 2.0, 0.19, 0.19, 0.1)]
    assert "0.05 of what it was at first for 3 steps" in judge(gradient, entropies, 8, "trainer")[0].detail


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: High(warn=2, stop=1), "warn=2 is above stop=1"),
        (lambda: Low(warn=1, stop=2), "warn=1 is below stop=2"),
        (lambda: High(warn=-1), "greater than or equal to 0"),
    ],
)
def test_a_gate_that_would_stop_before_it_warns_is_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def sample(group: str, reward: float) -> Sample:
    return Sample(
        group=group, reward=reward, tokens=np.zeros(1, np.int32), mask=np.ones(1, np.bool_),
        advantages=np.zeros(1, np.float32),
    )  # fmt: skip


def test_rewards_are_compared_within_the_group_of_a_prompt() -> None:
    # A hard prompt and an easy one: far apart, but neither says which answer is better.
    apart = [sample("a", 0.0)] * 4 + [sample("b", 1.0)] * 4
    assert reward_spread(apart) == 0
    assert reward_spread([*apart[:4], sample("a", 1.0)]) == pytest.approx(0.4)
    alone = [sample(str(k), float(k % 2)) for k in range(4)]
    assert reward_spread(alone) == 0.5


SPEC = toy_graph(generators=2, staleness=1).check()


def trained(version: int, origins: int = 4, **metrics: float) -> Trained:
    return Trained(
        node="trainer", version=version, batch=f"b{version}", origins=tuple(range(origins)), tokens=24,
        staleness_max=1, staleness_mean=0.5, reward_mean=0.5, metrics=metrics,
    )  # fmt: skip


def vitals(*, busy_s: float = 0.0, idle_s: float = 0.0, waiting: int = 0, lag_s: float = 0.0) -> Vitals:
    found = Vitals(())
    trainer = NodeStatus(node="trainer", busy_s=busy_s, idle_s=idle_s)
    status = RoleStatus(role="trainer", replica=0, pid=1, host="h", lag_s=lag_s, nodes=(trainer,))
    found.pulses["trainer-0-0"] = Pulse(status=status, age_s=0.1)
    found.depths["generator"] = Depth(
        messages=waiting, bytes=0, waiting={"reward-records": waiting}, leased={"reward-records": 0}
    )
    return found


def stepped(health: Health, event: Trained, now: Vitals) -> tuple[dict[str, Any], list[str]]:
    told: list[str] = []
    health.event(event)
    return health.step(event, now, lambda f: told.append(f.detail)), told


def test_a_full_queue_before_an_idle_trainer_is_an_imbalance_of_both() -> None:
    health = Health(SPEC)  # a step takes 4 groups
    noted: list[float] = []
    line: dict[str, Any] = {}
    for version in range(1, 7):  # 1 s at work and 3 s idle each, 8 groups wait
        line, told = stepped(health, trained(version), vitals(busy_s=version, idle_s=3 * version, waiting=8))
        noted.append(line["imbalance"])
        assert bool(told) == (version == 5)  # and once only
    assert noted == [0.75] * 6
    assert line["health"] == {"imbalance": 1}
    assert health.warned == {"imbalance": 2}
    # Half a step's worth waits; then the trainer has no time to wait.
    assert stepped(health, trained(7), vitals(busy_s=7, idle_s=21, waiting=2))[0]["imbalance"] == 0.375
    assert stepped(health, trained(8), vitals(busy_s=11, idle_s=21, waiting=8))[0]["imbalance"] == 0


def test_groups_dropped_as_stale_and_a_blocked_event_loop_are_told() -> None:
    health = Health(SPEC)
    told: list[str] = []
    line: dict[str, Any] = {}
    for version in range(1, 4):
        health.event(DroppedEvent(node="trainer", parent="g", origins=(1, 2), reason="stale"))
        health.event(DroppedEvent(node="trainer", parent="h", origins=(3,), reason="filtered"))
        line, told = stepped(health, trained(version, 2), vitals(lag_s=8.0 if version == 3 else 0.0))
        assert line["stale_share"] == 0.5
    assert line["health"] == {"stale": 1, "lag": 1}
    assert "0.5 for 3 steps of the groups were dropped as stale" in told[0]
    assert "an event loop didn't come round for 8 s" in told[1]


def test_the_gates_of_a_pipeline_are_those_of_its_configuration(tmp_path: Path) -> None:
    fields = policy_gradient_fields(tmp_path, health=HealthGates(kl=High(warn=0.5, stop=2.0)))
    gates: dict[str, Gate] = {g.name: g for g in gates_of(grpo(GRPOConfig(**fields)))}
    assert (gates["kl"].warn, gates["kl"].stop) == (0.5, 2.0)
    assert gates.keys() == {"mismatch", "mismatch_share", *(g.name for g in GATES)}


def run_grpo(path: Path, *words: str, record: bool = False) -> tuple[int, RunDir]:
    policy_gradient_fields(path)
    command = ["run", "grpo", "--model", str(path / "tiny"), "--data", str(path / "sums.jsonl")]
    command += ["--reward", "function", "--reward.function", "tests.inline_runs:share_of_threes"]
    command += ["--reward.isolate", "false", "--sampling.max-new-tokens", "5", "--groups-per-step", "4"]
    command += ["--samples", "4", "--slots", "16", "--run-dir", str(path / "run"), "--record", str(record)]
    return main([*command, "--inline", "--wait-bound-s", "60", *words]), RunDir(path / "run")


def test_a_run_warns_once_notes_every_step_and_counts_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.WARNING)
    code, run = run_grpo(tmp_path, "--steps", "3", "--health.effective-samples.warn", "1")
    assert code == 0
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [line["health"] for line in lines] == [{"effective_samples": 1}] * 3
    assert caplog.text.count("health.effective_samples.warn is 1") == 1
    assert run.read_summary().health == {"effective_samples": 3}
    assert "effective_samples in 3 steps" in capsys.readouterr().out


def test_a_stop_comes_before_the_weights_are_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = ("--health.effective-samples", '{"warn": 1, "stop": 1}')
    code, run = run_grpo(tmp_path, "--steps", "3", *stop, record=True)
    assert code == 2
    assert run.metrics.read_text() == ""
    assert "step 1: 1 of the tokens weigh as much" in capsys.readouterr().err
    assert run.read_summary().state == "failed"
    (event,) = found(run)  # of a step that was never made
    assert (event.node, event.version, event.gate, event.level) == ("trainer", 1, "effective_samples", "stop")
    assert event.value == pytest.approx(1.0)
    assert [e for e in Lineage(str(run.path)).events if isinstance(e, Unhealthy)] == [event]
    assert audited(str(run.path)).findings == []


def found(run: RunDir) -> list[Unhealthy]:
    return [
        e for e in map(EVENT.validate_json, run.ledger.read_text().splitlines()) if isinstance(e, Unhealthy)
    ]


def test_what_a_gate_finds_stands_in_ledger_and_record_and_an_audit_finds_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, run = run_grpo(tmp_path, "--steps", "3", "--health.effective-samples.warn", "1", record=True)
    assert code == 0
    events = found(run)
    assert [(e.version, e.gate, e.level, e.bound) for e in events] == [
        (k, "effective_samples", "warn", 1.0) for k in (1, 2, 3)
    ]
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [e.value for e in events] == [line["effective_samples"] for line in lines]
    assert [e for e in Lineage(str(run.path)).events if isinstance(e, Unhealthy)] == events
    asked = indexed(str(run.path)).rows("select name, number, level, measure, value, bound from events")
    assert [(*row.values(),) for row in asked] == [
        ("effective_samples", e.version, "warn", e.measure, e.value, 1.0) for e in events
    ]
    capsys.readouterr()
    assert main(["lineage", str(run.path)]) == 0
    assert "3 warnings, 0 stops" in capsys.readouterr().out
    rows = dict(facts.health(subject(str(run.path))))
    assert rows["effective_samples"].startswith("warned: 3 steps, 1 to 3; effective_samples ")
    report = audited(str(run.path))
    assert report.findings == []
    assert report.done["health"] == "3 findings of gates"


def judged_again(run: RunDir, change: Callable[[Event], Event | None]) -> list[str]:
    """What the audit finds in a record whose events are others."""
    spec = run.read_graph()
    history = [e for old in Lineage(str(run.path)).history if (e := change(old)) is not None]
    return [f.what for f in found_again(history, spec, Graph.from_spec(spec), noted=True)]


def test_an_audit_tells_findings_that_do_not_follow_from_the_steps(tmp_path: Path) -> None:
    _, run = run_grpo(tmp_path, "--steps", "3", "--health.effective-samples.warn", "1", record=True)

    def second(**fields: object) -> Callable[[Event], Event | None]:
        return lambda e: e.model_copy(update=fields) if isinstance(e, Unhealthy) and e.version == 2 else e

    assert judged_again(run, lambda e: e) == []
    assert "is said to warn at 0.5; by the record it finds warn at" in judged_again(run, second(value=0.5))[0]
    assert "is said to stop at" in judged_again(run, second(level="stop"))[0]
    assert judged_again(run, second(gate="luck"))[0] == "gate luck is none of the graph's"
    (missing,) = judged_again(run, lambda e: None if isinstance(e, Unhealthy) and e.version == 2 else e)
    assert missing.endswith("bound 1; no event says so")
    lag = second(gate="lag", measure="lag_s", value=3.0, bound=5.0)
    assert "is said to warn at 3, which is within 5" in judged_again(run, lag)[0]
    assert "the graph has others" in judged_again(run, second(gate="lag", measure="lag_s", bound=1.0))[0]


def test_the_guide_says_of_every_gate_what_to_do() -> None:
    guide = (Path(__file__).parents[1] / "docs" / "health.md").read_text()
    for name in ("mismatch", *(g.name for g in GATES)):
        assert f"| `{name}` |" in guide
        assert f"\n### {name}\n" in guide
