"""What a record says that was shown and said, against the tokens that the policy read and gave."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from arriero.engine.lineage.reader import Lineage
from arriero.launchers.audit import Report, audited
from arriero.launchers.cli import main
from arriero.launchers.rundir import RunDir
from arriero.schemas.lineage import GroupEntry
from arriero.schemas.messages import ScoredGroup
from tests.inline_runs import recorded_episodes, recorded_grpo
from tests.lineage_forging import Array, Entries, rechained, with_arrays, with_texts


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return recorded_grpo(tmp_path_factory.mktemp("texts"))


@pytest.fixture
def run(trained: RunDir, tmp_path: Path) -> RunDir:
    shutil.copytree(trained.path, tmp_path / "run")
    return RunDir(tmp_path / "run")


def found(run: RunDir) -> list[str]:
    return [f.what for f in audited(str(run.path)).findings if f.check == "texts"]


def test_every_response_of_an_honest_run_is_what_its_tokens_say(trained: RunDir) -> None:
    report = audited(str(trained.path))
    assert report.findings == []
    assert report.done["texts"] == "48 rollouts read again"  # three steps on four groups of four


def test_a_response_said_to_be_another_than_its_tokens_is_found(run: RunDir) -> None:
    # The reward counts threes, so that with one letter for another it stays what it was.
    record = Lineage(str(run.lineage))
    groups = [g for name in record.groups if isinstance(g := record.group(name), ScoredGroup)]
    said = [r.text for g in groups for r in g.group.rollouts]
    old = next(t for t in said if len(t) > 3 and "3" not in t and t.isalnum())
    with_texts(run, old, new := old[:-1] + ("a" if old[-1] != "a" else "b"))
    assert found(run) == [f"says {new}, its tokens say {old}"]


def test_a_prompt_said_to_be_another_than_the_policy_read_is_found(run: RunDir) -> None:
    with_texts(run, '"0+0="', '"0+1="')
    assert found(run) == ["its first tokens aren't those of its prompt"] * 4


def test_tokens_that_no_tokenizer_knows_are_found_and_end_no_audit(run: RunDir) -> None:
    def change(tokens: Array) -> None:
        tokens[-1] = -5

    with_arrays(run, 0, "tokens", change)
    assert any("can't be read by the tokenizer" in what for what in found(run))


def left(report: Report) -> list[str]:
    return [what for what in report.left if what.startswith("texts")]


def test_without_the_tokenizer_of_the_run_nothing_is_read(run: RunDir, trained: RunDir) -> None:
    tokenizer = trained.path.parent / "tiny" / "tokenizer.json"
    before = tokenizer.read_bytes()
    try:
        tokenizer.write_bytes(before + b"\n")
        report = audited(str(run.path))
        assert "texts" not in report.done
        assert "is another than the run's" in left(report)[0]
    finally:
        tokenizer.write_bytes(before)


def test_what_is_redacted_is_not_read(run: RunDir) -> None:
    name = next(iter(Lineage(str(run.lineage)).groups.values())).id
    assert main(["lineage", "redact", str(run.path), "--group", name, "--reason", "asked for"]) == 0
    report = audited(str(run.path))
    assert report.findings == []
    assert report.done["texts"] == "44 rollouts read again"


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return recorded_episodes(tmp_path_factory.mktemp("episodes"))


def test_episodes_are_read_and_played_again(played: RunDir) -> None:
    report = audited(str(played.path))
    assert report.findings == []
    assert report.done["texts"] == "48 rollouts read again"
    assert report.done["rewards of episodes"] == "48 computed again"


def test_an_episode_said_to_be_worth_more_is_found_by_playing_it_again(
    played: RunDir, tmp_path: Path
) -> None:
    shutil.copytree(played.path, tmp_path / "run")
    run = RunDir(tmp_path / "run")

    def change(entries: Entries) -> Entries:
        at = next(k for k, e in enumerate(entries) if isinstance(e, GroupEntry) and e.scores)
        group = entries[at]
        assert isinstance(group, GroupEntry)
        assert group.scores
        better = tuple(v + 1 for v in group.scores.values)
        scores = group.scores.model_copy(update={"values": better})
        entries[at] = group.model_copy(update={"scores": scores})
        return entries

    rechained(run, change)
    wrong = [f.what for f in audited(str(run.path)).findings if f.check == "rewards of episodes"]
    assert len(wrong) == 4
    assert all("computed again" in what and "by turns" in what for what in wrong)
