"""A run goes on in its own directory: the same numbers, and nothing lost or trained twice."""

# pyright: reportUnknownVariableType=false
# safetensors annotates only a part of what is called here.

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from arriero.engine.lineage.chain import ChainError
from arriero.engine.lineage.reader import Lineage
from arriero.engine.runtime.ledger import effective
from arriero.launchers.audit import audited
from arriero.launchers.cli import main
from arriero.launchers.resuming import go_on, prepared
from arriero.launchers.rundir import RunDir
from arriero.schemas.ledger import EVENT, Admitted, Resumed, Trained
from tests.inline_runs import saved
from tests.tiny_models import tiny_llama


@pytest.fixture
def task(tmp_path: Path) -> list[str]:
    """The words of a run on ten prompts, of which a step takes four: an epoch ends within a step."""
    rows = [json.dumps({"prompt": f"{a}+{a * 7}=", "answer": "3"}) for a in range(10)]
    (tmp_path / "sums.jsonl").write_text("\n".join(rows))
    model = saved(tiny_llama(seed=5, scale=12.0), tmp_path / "model")
    return [
        "--model", model, "--data", str(tmp_path / "sums.jsonl"), "--reward", "contains",
        "--reward.text", "3",
        "--sampling.max-new-tokens", "5", "--groups-per-step", "4", "--samples", "4", "--slots", "16",
        "--optimizer.lr", "1e-3", "--optimizer.warmup-steps", "1", "--checkpoints.every", "2",
        "--deterministic", "--inline", "--quiet",
    ]  # fmt: skip


def run(*words: str) -> int:
    return main(["run", *words])


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model" / "model.safetensors")


def measured(path: Path) -> list[Trained]:
    """Every step that counts: its prompts, tokens, reward, staleness and metrics."""
    lines = (path / "ledger.jsonl").read_bytes().splitlines()
    return [e for e in effective(map(EVENT.validate_json, lines)) if isinstance(e, Trained)]


def told(path: Path) -> list[int]:
    """The steps in metrics.jsonl."""
    return [int(json.loads(line)["step"]) for line in (path / "metrics.jsonl").read_text().splitlines()]


def history(path: Path) -> list[tuple[int, str]]:
    """Which prompt was admitted as which number."""
    return [(a.origin, a.id) for a in Lineage(str(path)).history if isinstance(a, Admitted)]


def on_record(path: Path) -> int:
    """Steps that the record has."""
    try:
        return len(Lineage(str(path)).steps)
    except (ChainError, OSError):
        return 0


def equal(a: Path, b: Path) -> bool:
    one, other = weights(a), weights(b)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("staleness", "record"), [(0, "true"), (0, "false"), (1, "true"), (2, "true")])
def test_some_steps_and_then_more_are_as_all_at_once(
    staleness: int, record: str, task: list[str], tmp_path: Path
) -> None:
    words = [*task, "--staleness", str(staleness), "--record", record]
    halves, whole = tmp_path / "halves", tmp_path / "whole"
    assert run("aipo", *words, "--steps", "6", "--run-dir", str(whole)) == 0
    assert run("aipo", *words, "--steps", "3", "--run-dir", str(halves)) == 0
    assert run("--resume", str(halves), "--steps", "6", "--allow-change", "steps") == 0
    summary = RunDir(halves).read_summary()
    assert (summary.state, summary.steps) == ("finished", 6)
    assert summary.groups_admitted == summary.groups_trained == 24
    assert measured(halves) == measured(whole)
    assert told(halves) == [1, 2, 3, 4, 5, 6]
    assert equal(halves, whole)
    if record == "true":
        assert history(halves) == history(whole)
        assert audited(str(halves)).findings == []


def test_a_run_that_was_broken_off_between_checkpoints_goes_on_as_if_nothing_had_been(
    task: list[str], tmp_path: Path
) -> None:
    """With whatever of checkpoints, record and ledger a kill leaves; every third step ends an epoch."""
    words = [*task, "--staleness", "1", "--steps", "30"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run("aipo", *words, "--run-dir", str(whole)) == 0
    command = [sys.executable, "-m", "arriero", "run", "aipo", *words, "--run-dir", str(broken)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while on_record(broken) < 3:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
    assert not (broken / "summary.json").exists()
    assert run("--resume", str(broken)) == 0
    assert measured(broken) == measured(whole)
    assert history(broken) == history(whole)
    assert equal(broken, whole)
    assert audited(str(broken)).findings == []
    events = Lineage(str(broken)).events
    (resumed,) = [e for e in events if isinstance(e, Resumed)]
    assert resumed.changed == ()
    assert 3 <= resumed.versions["trainer"] < 30


def test_a_stopped_run_goes_on_after_a_second_stop_too(task: list[str], tmp_path: Path) -> None:
    words = [*task, "--staleness", "1"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run("aipo", *words, "--steps", "6", "--run-dir", str(whole)) == 0
    assert run("aipo", *words, "--steps", "2", "--run-dir", str(parts)) == 0
    for steps in ("4", "6"):
        assert run("--resume", str(parts), "--steps", steps, "--allow-change", "steps") == 0
    assert measured(parts) == measured(whole)
    assert equal(parts, whole)
    assert sorted(p.name for p in parts.glob("manifest*.json")) == [
        "manifest-before-1.json", "manifest-before-2.json", "manifest.json",
    ]  # fmt: skip
    assert [e.number for e in Lineage(str(parts)).events if isinstance(e, Resumed)] == [1, 2]


def test_more_generators_and_rewards_make_no_difference(task: list[str], tmp_path: Path) -> None:
    words = [*task, "--staleness", "1"]
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert run("aipo", *words, "--steps", "6", "--run-dir", str(whole)) == 0
    assert run("aipo", *words, "--steps", "3", "--run-dir", str(halves)) == 0
    more = ["--generators", "3", "--rewards", "2", "--allow-change", "generators,rewards,steps"]
    assert run("--resume", str(halves), "--steps", "6", *more) == 0
    assert measured(halves) == measured(whole)
    assert equal(halves, whole)


def test_a_difference_is_refused_and_shown_or_allowed_and_recorded(
    task: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    assert run("grpo", *task, "--steps", "2", "--run-dir", str(path)) == 0
    before = {p.name: p.read_bytes() for p in path.iterdir() if p.is_file()}
    with (tmp_path / "sums.jsonl").open("a") as file:
        file.write('\n{"prompt": "1+1=", "answer": "2"}')
    capsys.readouterr()
    assert run("--resume", str(path), "--steps", "4", "--optimizer.lr", "2e-3") == 2
    said = capsys.readouterr().err
    assert "optimizer.lr: 0.001 -> 0.002" in said
    assert "steps: 2 -> 4" in said
    assert "input.prompts.path.sums.jsonl: " in said
    assert "--allow-change" in said
    assert {p.name: p.read_bytes() for p in path.iterdir() if p.is_file()} == before
    allowed = ["--allow-change", "optimizer", "--allow-change", "steps", "--allow-change", "input"]
    assert run("--resume", str(path), "--steps", "4", "--optimizer.lr", "2e-3", *allowed) == 0
    (resumed,) = [e for e in Lineage(str(path)).events if isinstance(e, Resumed)]
    assert "optimizer.lr: 0.001 -> 0.002" in resumed.changed
    assert resumed.anew
    assert len(measured(path)) == 4
    assert audited(str(path)).findings == []


def test_a_run_of_which_something_has_changed_goes_on_from_a_checkpoint(
    task: list[str], tmp_path: Path
) -> None:
    """Steps behind the checkpoint were taken with the old rate; taken again they would be others."""
    versions: list[int] = []
    for name, changed in (("same", []), ("other", ["--optimizer.lr", "2e-3", "--allow-change", "optimizer"])):
        path = tmp_path / name
        assert run("grpo", *task, "--steps", "3", "--run-dir", str(path)) == 0
        shutil.rmtree(path / "checkpoints" / "trainer" / "000000003")
        more = ["--steps", "4", "--allow-change", "steps"]
        assert run("--resume", str(path), *(changed or []), *(more if changed else [])) == 0
        (resumed,) = [e for e in Lineage(str(path)).events if isinstance(e, Resumed)]
        versions.append(resumed.versions["trainer"])
    assert versions == [3, 2]


def test_a_run_that_had_finished_is_said_to_have_nothing_left_to_do(
    task: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    loud = [word for word in task if word != "--quiet"]
    assert run("grpo", *loud, "--steps", "2", "--run-dir", str(path)) == 0
    capsys.readouterr()
    assert run("--resume", str(path)) == 0
    assert f"note: {path} finished with step 2, so only checkpoints that are gone" in capsys.readouterr().err
    assert RunDir(path).read_summary().steps == 2


def test_a_change_that_older_versions_dont_survive_is_refused(
    task: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    assert run("aipo", *task, "--steps", "2", "--run-dir", str(path)) == 0
    capsys.readouterr()
    allowed = ["--optimizer.lr", "2e-3", "--steps", "4", "--allow-change", "optimizer,steps"]
    assert run("--resume", str(path), *allowed) == 2
    said = capsys.readouterr().err
    assert "optimizer.lr: a deterministic run with staleness above 0 samples with versions before" in said


def test_what_cant_be_resumed_is_said_in_one_line(
    task: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    assert (
        run("aipo", *task, "--staleness", "1", "--record", "false", "--steps", "2", "--run-dir", str(path))
        == 0
    )
    for words, why in (
        (["--resume", str(tmp_path / "nowhere")], "can't be read"),
        (["--resume"], "--resume needs the directory of a run"),
        (["--resume", str(path), "--allow-change", "steps"], "nothing of it has changed"),
        (["--resume", str(path)], "which only a record brings back"),
        (["grpo", "--resume", str(path)], "is a run of aipo"),
    ):
        capsys.readouterr()
        assert run(*words) == 2
        assert why in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_run_goes_on_with_another_number_of_ranks(
    task: list[str], tmp_path: Path, before: int, after: int
) -> None:
    words = [w for w in task if w != "--inline"] + ["--staleness", "0"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run("aipo", *words, "--steps", "4", "--run-dir", str(whole)) == 0
    assert run("aipo", *words, "--steps", "2", "--ranks", str(before), "--run-dir", str(parts)) == 0
    other = ["--ranks", str(after), "--allow-change", "steps,ranks"]
    assert run("--resume", str(parts), "--steps", "4", *other) == 0
    found, expected = measured(parts), measured(whole)
    assert [(e.version, e.origins) for e in found] == [(e.version, e.origins) for e in expected]
    assert [e.metrics["loss"] for e in found] == pytest.approx(
        [e.metrics["loss"] for e in expected], abs=1e-4
    )
    one, same = weights(parts), weights(whole)
    # Sums over ranks come in another order; Adam makes the most of a difference in its first steps.
    assert all(torch.allclose(one[name], same[name], atol=1e-3) for name in same)
    assert [f"{f.check}: {f.what}" for f in audited(str(parts)).findings] == []


def test_an_attempt_that_dies_before_its_first_event_is_followed_by_one_that_looks_anew(
    task: list[str], tmp_path: Path
) -> None:
    """What `--resume` has prepared counts for one attempt of a job; the next goes on from what it finds."""
    assert run("aipo", *task, "--steps", "2", "--run-dir", str(tmp_path / "run")) == 0
    left = RunDir(tmp_path / "run")
    spec, options = left.read_graph(), left.read_options()
    first = go_on(spec, options, left)
    left.prepared.touch()
    assert prepared(left) == first
    assert prepared(left) is None
    second = go_on(spec, options, left, why="the job was started again")
    assert second.versions == first.versions == {"trainer": 2}
    told = [EVENT.validate_json(line) for line in left.ledger.read_bytes().splitlines()]
    assert [event for event in told if isinstance(event, Resumed)] == [second]  # the record lacks the first
    assert prepared(left) is None
