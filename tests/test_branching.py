"""A run that branches off starts with the very weights of a version of another, and says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from arriero.engine.lineage.reader import Lineage
from arriero.launchers.cli import main
from arriero.launchers.rundir import RunDir
from tests.inline_runs import recorded_grpo

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    words = ["--optimizer.lr", "1e-2", "--checkpoints.every", "0"]
    return recorded_grpo(tmp_path_factory.mktemp("branched"), *words)


def prints(run: Path) -> list[str]:
    return [w.fingerprint for w in Lineage(str(run)).weights]


def test_a_branch_begins_with_the_weights_of_the_step_and_the_options_of_the_run(
    old: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new"
    words = ["run", "--from", f"{old.path}@2", "--steps", "1", "--optimizer.lr=2e-2", "--run-dir", str(new)]
    assert main(words) == 0
    assert prints(new)[0] == prints(old.path)[2]
    made = RunDir(new).read_manifest()
    before = old.read_manifest()
    assert (made.config["steps"], made.config["groups_per_step"]) == (1, before.config["groups_per_step"])
    (ancestor,) = made.ancestors
    assert (ancestor.run_id, ancestor.step, ancestor.took) == (before.run_id, 2, "model")

    newest = tmp_path / "newest"
    assert main(["run", "reinforce_pp", "--from", f"{new}@0", "--run-dir", str(newest)]) == 0
    assert prints(newest)[0] == prints(old.path)[2]
    capsys.readouterr()
    assert main(["lineage", str(newest)]) == 0
    shown = capsys.readouterr().out
    assert f"made from model of {made.run_id} at step 0" in shown
    assert f"    made from model of {before.run_id} at step 2" in shown
    assert main(["runs", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [r["from"] for r in rows] == [f"{before.run_id}@2", f"{made.run_id}@0"]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("RUN", "write RUN@STEP"),
        ("RUN@x", "write RUN@STEP"),
        ("RUN@9", "no step 9 of trainer is recorded; there are 1 to 3"),
        ("nowhere@1", "can't be read"),
    ],
)
def test_what_no_run_can_begin_with_is_refused(
    old: RunDir, target: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--from", target.replace("RUN", str(old.path))]) == 2
    assert said in capsys.readouterr().err


def test_a_branch_without_a_target_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "grpo", "--from"]) == 2
    assert "needs a value: RUN@STEP" in capsys.readouterr().err


def test_a_kept_branch_is_taken_up_again_only_as_it_was_made(
    old: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "--from", f"{old.path}@1", "--steps", "1", "--run-dir"]
    assert main([*words, str(tmp_path / "first")]) == 0
    assert main([*words, str(tmp_path / "second")]) == 0
    assert prints(tmp_path / "first")[0] == prints(tmp_path / "second")[0] == prints(old.path)[1]
    (file,) = (old.path / "branches" / f"{1:09}" / "model").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-2000] + bytes(2000))
    capsys.readouterr()
    assert main([*words, str(tmp_path / "third")]) == 2
    assert "isn't as it was made; remove it" in capsys.readouterr().err
