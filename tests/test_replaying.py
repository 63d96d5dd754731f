"""A recorded step comes out again bit for bit; a change of anything it rests on is found; forks differ."""

from __future__ import annotations

import json
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from arriero.components.losses import AIPO
from arriero.components.trainer import Trainer
from arriero.engine.errors import UserError
from arriero.engine.lineage.reader import Lineage
from arriero.launchers.audit import audited
from arriero.launchers.cli import main
from arriero.launchers.replay import RecordedTrainer, retaken
from arriero.launchers.replaying import changed
from arriero.launchers.rundir import RunDir
from tests.inline_runs import recorded_grpo
from tests.lineage_runs import overwrite

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return recorded_grpo(
        tmp_path_factory.mktemp("replayed"), "--optimizer.lr", "1e-2", "--checkpoints.every", "2"
    )


@pytest.fixture
def run(honest: RunDir, tmp_path: Path) -> RunDir:
    shutil.copytree(honest.path, tmp_path / "run")
    return RunDir(tmp_path / "run")


def replayed(run: RunDir, *words: str) -> tuple[int, Any]:
    capture: list[str] = []

    def show(text: str) -> int:
        capture.append(text)
        return 0

    from arriero.launchers.replaying import replay

    code = replay([str(run.path), *words, "--threads", "1", "--json"], show)
    return code, json.loads(capture[0])


@pytest.mark.parametrize("from_checkpoint", [False, True])
def test_a_step_comes_out_again_bit_for_bit(run: RunDir, from_checkpoint: bool) -> None:
    checkpoints = run.path / "checkpoints" / "trainer"
    assert sorted(int(p.name) for p in checkpoints.iterdir()) == [2, 3]
    if not from_checkpoint:
        shutil.rmtree(checkpoints)
    code, (step,) = replayed(run, "--step", "3")
    assert code == 0
    recorded = Lineage(str(run.path)).steps[2].metrics
    assert step["now"]["loss"] == recorded["loss"]
    assert step["now"]["grad_norm"] == recorded["grad_norm"] > 0
    assert len(step["weights"]) == 32
    assert step["weights"] == step["recorded_weights"] != replayed(run, "--step", "2")[1][0]["weights"]


def test_all_steps_come_out_again_and_the_first_that_does_not_is_named(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run.path / "checkpoints")
    code, steps = replayed(run, "--until-divergence")
    assert (code, [s["step"] for s in steps]) == (0, [1, 2, 3])
    record = Lineage(str(run.path))
    batch = record.batches[record.steps[1].batch]
    values = record.advantages(batch).copy()
    values[np.flatnonzero(values)[0]] *= 2
    overwrite(str(run.lineage), "advantages", batch.advantages, {"values": values})
    code, steps = replayed(run, "--until-divergence")
    assert (code, [s["step"] for s in steps], [s["same"] for s in steps]) == (1, [1, 2], [True, False])
    assert main(["replay", str(run.path), "--step", "2", "--threads", "1"]) == 1
    assert "step 2 differs from the record" in capsys.readouterr().out


def test_another_model_than_that_of_the_run_is_told_before_any_step(run: RunDir) -> None:
    from tests.inline_runs import peaked_model

    shutil.rmtree(run.path / "checkpoints")
    graph = json.loads(run.graph.read_text())
    node = next(n for n in graph["nodes"] if n["name"] == "trainer")
    node["config"]["model"] = peaked_model(run.path / "other")
    run.graph.write_text(json.dumps(graph))
    code, (step,) = replayed(run, "--until-divergence")
    assert (code, step["step"], list(step["differences"])) == (1, 0, ["weights"])


def test_a_step_with_redacted_rollouts_is_refused(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run.path / "checkpoints")
    record = Lineage(str(run.path))
    name = record.batches[record.steps[0].batch].groups[0]
    assert main(["lineage", "redact", str(run.path), "--group", name]) == 0
    assert main(["replay", str(run.path), "--step", "2"]) == 2
    assert "step 1 can't be taken again" in capsys.readouterr().err


def test_a_fork_changes_what_it_is_told_to_and_the_rest_is_as_it_was(
    honest: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["fork", str(honest.path), "--step", "2", "--threads", "1", "--json"]
    assert main([*words, "--change", "optimizer.lr=2e-2"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["measures"]["loss"][0] == told["measures"]["loss"][1] == told["measures"]["loss"][2]
    assert told["measures"]["lr"][2] == 2 * told["measures"]["lr"][1]
    # Adam's steps are in proportion to the learning rate.
    assert told["update"]["forked"] == pytest.approx(2 * told["update"]["replayed"], rel=1e-3)
    assert told["update"]["cosine"] == pytest.approx(1, abs=1e-6)
    assert main([*words[:-1], "--change", "aggregation=token_mean"]) == 0
    assert "cosine of both" in capsys.readouterr().out


def test_a_change_of_what_a_trainer_lacks_is_refused() -> None:
    trainer = Trainer(model="m", loss=AIPO(rho=2.0), steps=1)
    other = changed(trainer, [("loss.rho", "4"), ("minibatches", "2")])
    assert (other.loss, other.minibatches) == (AIPO(rho=4.0), 2)
    for key, said in (
        ("loss.roh", r"did you mean loss.rho\?"),
        ("los.rho", "los is no part of the trainer"),
        ("loss.$type", "has no such field"),
    ):
        with pytest.raises(UserError, match=said):
            changed(trainer, [(key, "1")])
    with pytest.raises(UserError, match="doesn't take this configuration"):
        changed(trainer, [("loss.rho", "-1")])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["replay", "RUN"], "needs --step K or --until-divergence"),
        (["replay", "RUN", "--step", "9"], "no step 9 of trainer is recorded; there are 1 to 3"),
        (["replay", "RUN", "--step", "0"], "--step takes a whole number from 1 on"),
        (["replay", "RUN", "--step", "1", "--tolerance", "2"], "--tolerance takes a number"),
        (["fork", "RUN", "--step", "1"], "at least one --change"),
        (["fork", "RUN", "--step", "1", "--change", "rho"], "write KEY=VALUE"),
        (["replay", "--step", "1"], "needs a run directory first"),
    ],
)
def test_what_cannot_be_replayed_is_told_in_one_line(
    honest: RunDir, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(honest.path) if w == "RUN" else w for w in words]) == 2
    assert said in capsys.readouterr().err


def test_the_model_names_the_record_that_it_was_made_by(run: RunDir, tmp_path: Path) -> None:
    library: Any = import_module("safetensors.torch")
    opened: Any = import_module("safetensors")
    anchor = run.read_summary().lineage
    assert anchor is not None
    file = run.model / "model.safetensors"
    with opened.safe_open(file, "pt") as stored:
        assert stored.metadata() == {"format": "pt", "lineage_head": anchor.head}
    assert audited(str(run.path)).findings == []
    names = library.load_file(file).keys()
    other = recorded_grpo(tmp_path / "other", "--optimizer.lr", "1e-3")
    shutil.copy(other.model / "model.safetensors", file)
    found = {(f.check, f.where) for f in audited(str(run.path)).findings}
    assert found == {("files", "model/model.safetensors")}
    assert library.load_file(file).keys() == names


def test_steps_before_the_one_asked_for_are_taken_from_the_record(honest: RunDir) -> None:
    run = RecordedTrainer(str(honest.path), threads=1)
    assert run.loose == ""
    assert [s.version for s in retaken(run, 2, 3)] == [2, 3]
