"""`arriero plan`, as typed, and calibration from a run directory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arriero.components.recorded import RecordedRollouts
from arriero.engine.errors import UserError
from arriero.engine.planner.calibrate import advice, attained, calibrate, corrected, expected, one_more
from arriero.engine.planner.costs import Layout, TrainWork, train_step
from arriero.engine.planner.hardware import hardware
from arriero.engine.planner.models import model
from arriero.launchers.catalog import build, find, listed
from arriero.launchers.cli import main
from arriero.launchers.launch import inline
from arriero.launchers.options import LaunchOptions
from arriero.launchers.plan import calibration_of, plan_command
from arriero.launchers.rundir import RunDir, create, write_json
from arriero.schemas.ledger import Resumed
from arriero.schemas.run import RunOptions
from tests.toys import ToyGenerator, ToyTrainer, toy_graph

FROM_RUNS = ("offline", "imitate", "dpo_recorded", "distill_recorded")
DATA = {name: RecordedRollouts(path="not-read") for name in FROM_RUNS}
AIPO = ["aipo", "--model", "llama-3.1-8b", "--gpus", "8", "--sampling.max-new-tokens", "1024"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synchronous run of two generators of 0.2 s and a trainer of 0.3 s, four groups a step."""
    path = tmp_path_factory.mktemp("plan") / "run"
    graph = toy_graph(
        generator=ToyGenerator(seconds=0.2),
        trainer=ToyTrainer(steps=8, seconds=0.3),
        generators=2,
        staleness=0,
    )
    run, options = create(path), RunOptions(run_id="plan", heartbeat_s=0.1)
    spec = graph.check()
    write_json(run.graph, spec)
    write_json(run.options, options)
    assert inline(spec, options, run, LaunchOptions(quiet=True)) == 0
    return path


def test_plan_says_split_step_bottleneck_and_cost(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *AIPO]) == 0
    out = capsys.readouterr().out
    for word in (
        "train,",
        "generate",
        "step",
        "held up by",
        "one more device",
        "million tokens",
        "staleness 1",
    ):
        assert word in out


def test_plan_as_json_has_both_runs_and_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command([*AIPO, "--json", "--staleness", "2"]) == 0
    plan = json.loads(capsys.readouterr().out)
    late = plan["asynchronous"]
    assert late["staleness"] == 2
    assert late["train_devices"] + late["generate_devices"] <= 8
    assert late["step_s"] >= max(late["train_s"], late["generate_s"]) * 0.9
    assert plan["synchronous"]["usd_per_million_tokens"] > 0


def test_plan_takes_other_generators_and_all_options_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "plan.png"
    more = [
        "--generator-hardware",
        "h20",
        "--dispatch",
        "skew",
        "--reallocate",
        "--generate-fp8",
        "--plot",
        str(picture),
    ]
    assert plan_command([*AIPO, *more]) == 0
    assert "reallocated, in turns" in capsys.readouterr().out
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--gpus", "8"], "plan needs a pipeline first"),
        (["sft", "--model", "llama-3.1-8b"], "sft has no loop"),
        (["aipo", "--model", "nix"], "neither a directory with config.json nor one of"),
        ([*AIPO, "--hardware", "h1"], "hardware h1 is not known"),
        ([*AIPO, "--dispatch", "odd"], "even or skew"),
        ([*AIPO, "--mean-tokens", "5000"], "must be below"),
        (["--from"], "needs a run directory"),
    ],
)
def test_a_mistake_is_answered_in_one_line(args: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_command(args)


def test_help_lists_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command(["--help"]) == 0
    assert "--generator-hardware" in capsys.readouterr().out


def test_a_run_is_predicted_from_its_own_times(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = calibration_of(run_dir)
    # Between two heartbeats: up to one firing is counted in part.
    assert found.times["generator"].mean == pytest.approx(0.2, rel=0.1)
    assert found.times["trainer"].mean == pytest.approx(0.3, rel=0.15)
    predicted = found.predicted().step_s()
    assert predicted >= found.bound().seconds * 0.999
    assert predicted == pytest.approx(
        2 * found.times["generator"].mean + found.times["trainer"].mean, rel=0.02
    )
    # Messages and a busy machine take time that no component counts.
    assert predicted < found.step_s * 1.1
    assert plan_command(["--from", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert "measured" in out
    assert "one more   generator" in out


def test_the_summary_of_a_run_has_prediction_and_bound_beside_its_measured_step(run_dir: Path) -> None:
    """Four prompts on two generators of 0.2 s, then a trainer of 0.3 s, in turns: 0.7 s."""
    summary = RunDir(run_dir).read_summary()
    assert summary.step_s is not None
    assert summary.predicted_step_s is not None
    assert summary.bound_step_s is not None
    in_turn = 2 * summary.firing_s["generator"] + summary.firing_s["trainer"]
    assert 0.65 <= summary.bound_step_s <= summary.predicted_step_s * 1.001
    assert summary.predicted_step_s == pytest.approx(in_turn, rel=0.02)
    assert summary.step_s > 0.9 * summary.bound_step_s  # a busy machine makes some firings longer than others
    assert {n.partition(":")[0] for n in summary.bound_nodes} >= {"generator", "trainer"}
    found = calibration_of(run_dir)
    assert {n: t.mean for n, t in found.times.items()} == pytest.approx(summary.firing_s)


def test_a_run_that_goes_on_is_calibrated_from_its_versions_so_far(run_dir: Path) -> None:
    run = RunDir(run_dir)
    metrics = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    found = calibrate(run.read_graph(), metrics, [], {}, {})
    # A heartbeat may come in the middle of the first and the last of six firings.
    assert found.times["trainer"].mean == pytest.approx(0.3, rel=0.35)
    assert found.times["generator"].mean == pytest.approx(0.2, rel=0.2)


def test_a_synchronous_run_is_told_to_overlap(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = calibration_of(run_dir)
    first = advice(found)[0]
    assert first.change == "staleness 1 instead of 0"
    assert first.step_s == pytest.approx(
        2 * found.times["generator"].mean, rel=0.05
    )  # four prompts, two replicas
    assert main(["plan", f"--from={run_dir}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["advice"][0]["change"] == first.change


def test_one_more_on_each_side_is_simulated(run_dir: Path) -> None:
    """Four prompts on three generators still take two rounds; half the training time comes off in full."""
    found = calibration_of(run_dir)
    worth, now = one_more(found), found.predicted().step_s()
    assert worth.keys() == {"generator", "reward", "trainer"}
    assert worth["generator"].step_s == pytest.approx(now, rel=0.01)
    assert worth["trainer"].step_s == pytest.approx(now - found.times["trainer"].mean / 2, rel=0.01)


def test_a_directory_that_is_no_run_and_a_run_too_short_are_refused(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is this a run directory"):
        calibration_of(tmp_path)
    with pytest.raises(UserError, match="at least 4 are needed"):
        calibrate(calibration_of(run_dir).spec, [], [], {}, {})


def test_a_run_that_went_on_is_calibrated_from_what_came_since(run_dir: Path) -> None:
    """Else the hours between its two parts would be the length of a step."""
    run = RunDir(run_dir)
    whole = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    later = [{**m, "step": m["step"] + len(whole), "time": m["time"] + 3600} for m in whole]
    went_on = [Resumed(number=1, versions={"trainer": len(whole)})]
    before = calibrate(run.read_graph(), whole, [], {}, {})
    found = calibrate(run.read_graph(), [*whole, *later], went_on, {}, {})
    assert found.versions == len(whole)
    assert found.step_s == pytest.approx(before.step_s)
    with pytest.raises(UserError, match=f"made 1 versions since it went on from version {len(whole)}"):
        calibrate(run.read_graph(), [*whole, later[0]], went_on, {}, {})


def test_a_run_whose_components_told_nothing_is_refused(run_dir: Path) -> None:
    run = RunDir(run_dir)
    metrics = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    silent = [{k: v for k, v in m.items() if k in ("step", "time")} for m in metrics]
    with pytest.raises(UserError, match="over before its components told"):
        calibrate(run.read_graph(), silent, [], {}, {})


def test_a_run_corrects_the_rate_of_its_device(run_dir: Path) -> None:
    """The toy trainer sleeps for 0.3 s: a processor that took as long for its 24 tokens would be slow."""
    found, cpu, shape = calibration_of(run_dir), hardware("cpu"), model("qwen2.5-1.5b")
    slow = corrected(found, cpu, shape, "fp32")
    assert found.tokens == 4 * 2 * 3
    work = TrainWork(tokens=24, context=3, precision="fp32", recompute=False)
    assert train_step(shape, slow, Layout(), work).total == pytest.approx(found.times["trainer"].mean)
    with pytest.raises(UserError, match="trained no sampled tokens"):
        corrected(replace(found, tokens=0.0), cpu, shape, "fp32")
    with pytest.raises(UserError, match="no component of the run has a model"):
        plan_command([*AIPO, "--calibrate", str(run_dir)])


def test_a_measured_component_corrects_the_device() -> None:
    slower = attained(hardware("h100"), modelled_s=1.0, measured_s=2.0)
    assert slower.matmul_share == hardware("h100").matmul_share / 2
    with pytest.raises(UserError, match="positive times"):
        attained(hardware("h100"), modelled_s=0.0, measured_s=2.0)


STAGE = {"data": {"parts": [{"path": "not-read"}]}}
NEEDED: dict[str, dict[str, Any]] = {
    "archer": {"environment": {"kind": "question"}},
    "pretrain_rl": {"stage": "sft", "pretrain": STAGE, "sft": STAGE},
}


@pytest.mark.parametrize("name", sorted(listed()))
def test_every_pipeline_has_a_prediction_above_its_bound(name: str) -> None:
    """Also those without a loop, where a step is an output of the last node."""
    config_type, needed = find(name).config_type, {"model": "m", "teacher": "t", "reward_model": "r"}
    known = getattr(config_type, "__pydantic_fields__", {})
    fields: dict[str, Any] = {k: v for k, v in needed.items() if k in known} | NEEDED.get(name, {})
    spec = build(find(name), config_type(data=DATA.get(name, "not-read"), **fields)).spec()
    predicted_s, least = expected(spec, {n.name: 0.01 * (k + 1) for k, n in enumerate(spec.nodes)}, {})
    assert least.seconds * (1 - 1e-6) <= predicted_s < 3 * least.seconds
