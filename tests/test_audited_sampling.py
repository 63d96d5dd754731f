"""Rollouts not sampled as the graph samples, an index that leads elsewhere, rewards that fail now."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from arriero.engine.lineage.reader import Lineage
from arriero.launchers.audit import audited
from arriero.launchers.cli import main
from arriero.launchers.rundir import RunDir
from arriero.launchers.runs import differences, read
from arriero.schemas.ledger import Admitted
from arriero.schemas.lineage import BatchEntry, Entry, GroupEntry, Noted
from arriero.schemas.messages import ScoredGroup
from tests.inline_runs import recorded, recorded_grpo
from tests.lineage_forging import rechained
from tests.lineage_runs import overwrite


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return recorded_grpo(tmp_path_factory.mktemp("sampled"))


@pytest.fixture
def run(trained: RunDir, tmp_path: Path) -> RunDir:
    shutil.copytree(trained.path, tmp_path / "run")
    return RunDir(tmp_path / "run")


def found(run: RunDir, check: str) -> list[str]:
    return [f.what for f in audited(str(run.path)).findings if f.check == check]


def groups(**fields: object) -> Callable[[list[Entry]], list[Entry]]:
    """Change fields of every group."""
    return lambda entries: [e.model_copy(update=fields) if isinstance(e, GroupEntry) else e for e in entries]


def test_an_honest_run_sampled_as_its_graph_says(run: RunDir) -> None:
    report = audited(str(run.path))
    assert report.findings == []
    assert report.done["sampling"] == "12 groups"


def test_another_temperature_is_found_though_group_and_batch_agree(run: RunDir) -> None:
    def change(entries: list[Entry]) -> list[Entry]:
        return [
            e.model_copy(update={"temperatures": (0.3,) * len(e.lengths)})
            if isinstance(e, GroupEntry | BatchEntry)
            else e
            for e in entries
        ]

    rechained(run, change)
    assert found(run, "sampling")[0] == "was sampled at temperature 0.3, the graph says 1.0"


def test_another_temperature_in_the_groups_alone_contradicts_the_batches(run: RunDir) -> None:
    number = len(next(iter(Lineage(str(run.path)).groups.values())).lengths)
    rechained(run, groups(temperatures=(0.3,) * number))
    assert "temperature 1.0 in the batch and 0.3 in its group" in found(run, "steps")[0]


def test_seeds_of_another_run_or_given_twice_are_found(run: RunDir) -> None:
    seeds = next(iter(Lineage(str(run.path)).groups.values())).seeds
    rechained(run, groups(seeds=tuple(s + 1 for s in seeds)))
    assert len(found(run, "sampling")) == 12
    rechained(run, groups(seeds=(seeds[0],) * len(seeds)))
    assert len(found(run, "sampling")) == 12


def test_a_prompt_said_to_be_another_row_than_its_id_names_is_found(run: RunDir) -> None:
    def change(entries: list[Entry]) -> list[Entry]:
        for k, e in enumerate(entries):
            if isinstance(e, GroupEntry) and e.prompt.id == "e0-r3":
                entries[k] = e.model_copy(update={"prompt": e.prompt.model_copy(update={"row": 4})})
            if isinstance(e, Noted) and isinstance(e.event, Admitted) and e.event.id == "e0-r3":
                entries[k] = Noted(event=e.event.model_copy(update={"row": 4}))
        return entries

    rechained(run, change)
    assert found(run, "sampling") == ["its prompt e0-r3 is said to be row 4 of epoch 0"]


@pytest.mark.parametrize("name", ["rows", "rewards"])
def test_an_index_of_the_rollouts_that_leads_elsewhere_is_found(run: RunDir, name: str) -> None:
    record = Lineage(str(run.path))
    place, _ = record.indexed[1]
    values = record.index(place)[name].copy()
    overwrite(str(run.lineage), "index", place, {name: np.zeros_like(values) + 1})
    assert found(run, "content") == ["says other places or rewards than the record"]
    shutil.rmtree(run.lineage / "rollouts" / "index")
    assert len(found(run, "content")) == len(record.indexed)


_SCORE = "def score(prompt, rollout):\n    return {}\n"


def test_a_reward_that_fails_now_is_no_verdict_on_those_of_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "half_right.py"
    code.write_text(_SCORE.format("float(rollout.text[:1] in '0123456789')"))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    run = recorded_grpo(tmp_path, "--reward.function", "half_right:score")
    code.write_text(_SCORE.format("1 / 0 if rollout.text.startswith('3') else 1.0"))
    del sys.modules["half_right"]
    report = audited(str(run.path), rescore=True)
    (left,) = report.left
    assert "for which there was no verdict now: error: " in left
    assert "division by zero" in left
    assert not [f for f in report.findings if "(error)" in f.what]


def test_rewards_are_computed_again_through_the_penalty_that_is_taken_off_them(tmp_path: Path) -> None:
    run = recorded("dapo", tmp_path, "--overlong-buffer", "3")
    report = audited(str(run.path))
    assert (report.findings, report.left) == ([], [])
    record = Lineage(str(run.path))
    shaped = [record.group(key) for key, entry in record.groups.items() if entry.edge == "overlong"]
    pairs = [
        (s, r)
        for g in shaped
        if isinstance(g, ScoredGroup)
        for s, r in zip(g.scores, g.group.rollouts, strict=True)
    ]
    assert report.done["rewards of overlong"] == f"{len(pairs)} computed again"
    longest, buffer = 5, 3  # sampled tokens; the last ones cost up to 1
    for score, rollout in pairs:
        assert score.raw is not None
        over = max(int(rollout.mask.sum()) - (longest - buffer), 0)
        assert score.value == pytest.approx(score.raw - over / buffer)
    assert any(score.value != score.raw for score, _ in pairs)

    def without_penalty(entries: list[Entry]) -> list[Entry]:
        return [
            e.model_copy(update={"scores": e.scores.model_copy(update={"values": e.scores.raw})})
            if isinstance(e, GroupEntry) and e.scores is not None and e.edge == "overlong"
            else e
            for e in entries
        ]

    rechained(run, without_penalty)
    assert any(told.startswith("reward ") for told in found(run, "rewards of overlong"))


def test_a_record_in_memory_is_refused_before_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--record-url", "memory://record"]
    with pytest.raises(AssertionError):
        recorded_grpo(tmp_path, *words)
    assert "record_url=memory://record: what is in memory goes with the process" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_report_of_a_redacted_run_is_removed_and_what_else_may_quote_it_named(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run.path)]) == 0
    (run.path / "attempts").mkdir()
    assert main(["lineage", "redact", str(run.path), "--row", "3"]) == 0
    said = capsys.readouterr().out
    assert f"removed {run.path / 'report.html'}, which was made of the record" in said
    assert f"{run.path / 'attempts'}" in said.rpartition("not looked through")[2]
    assert not (run.path / "report.html").exists()


def test_a_checkpoint_of_a_redacted_run_can_be_branched_from(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = sorted(int(p.name) for p in (run.path / "checkpoints" / "trainer").iterdir())
    assert main(["lineage", "redact", str(run.path), "--all"]) == 0
    words = ["run", "--steps", "1", "--run-dir"]
    assert main([*words, str(tmp_path / "new"), "--from", f"{run.path}@{steps[-1]}"]) == 0
    prints = [w.fingerprint for w in Lineage(str(run.path)).weights]
    assert Lineage(str(tmp_path / "new")).weights[0].fingerprint == prints[steps[-1]]
    assert main([*words, str(tmp_path / "other"), "--from", f"{run.path}@1"]) == 2
    assert "step 1 can't be taken again: " in capsys.readouterr().err


def test_a_branch_has_the_tokenizer_of_its_run_and_other_data_are_a_difference(
    run: RunDir, tmp_path: Path
) -> None:
    data = next(Path(f.path) for f in run.read_manifest().inputs if f.path.endswith("sums.jsonl"))
    text = data.read_text()
    data.write_text(text.replace("0+0=", "0+1="))
    try:
        assert main(["run", "--from", f"{run.path}@0", "--run-dir", str(tmp_path / "new")]) == 0
    finally:
        data.write_text(text)
    differ = differences(read(run.path), read(tmp_path / "new"))
    assert [key for key in differ if key.startswith("tokenizers")] == []
    assert "inputs.prompts.path" in differ
