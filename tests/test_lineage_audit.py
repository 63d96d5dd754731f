"""An honest record passes the audit; each of these forgeries is found, though most are hashed anew."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from arriero.engine.lineage.content import columns
from arriero.engine.lineage.reader import Lineage
from arriero.launchers.audit import audited
from arriero.launchers.cli import main
from arriero.launchers.rundir import RunDir
from arriero.schemas.ledger import Admitted, Restarted, Trained
from arriero.schemas.lineage import BatchEntry, Entry, GroupEntry, Noted, RunEntry, WeightsEntry
from arriero.schemas.messages import Outcome, ScoredGroup
from tests.lineage_forging import Array, Entries, hashes, rechained, with_arrays
from tests.lineage_runs import overwrite, recorded_run


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return recorded_run(tmp_path_factory.mktemp("honest") / "run")


@pytest.fixture
def run(honest: RunDir, tmp_path: Path) -> RunDir:
    """A copy, to be forged."""
    shutil.copytree(honest.path, tmp_path / "run")
    return RunDir(tmp_path / "run")


def found(run: RunDir) -> set[str]:
    return {f.check for f in audited(str(run.path)).findings}


def changed(kind: type[Entry], number: int, **fields: object) -> Callable[[Entries], Entries]:
    """Change fields of the entry `number` of its kind."""

    def change(entries: Entries) -> Entries:
        at = [k for k, e in enumerate(entries) if isinstance(e, kind)][number]
        return [e.model_copy(update=fields) if k == at else e for k, e in enumerate(entries)]

    return change


def test_an_honest_record_passes(honest: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    report = audited(str(honest.path))
    assert report.findings == []
    assert report.left == []
    assert report.done["rewards of reward"] == "60 computed again"  # 4 steps x 4 + 2 x 2 held out, of 3 each
    assert report.done["advantages of advantage"] == "4 batches computed again"
    assert main(["audit", str(honest.path)]) == 0
    assert "nothing found" in capsys.readouterr().out


# --- without hashing anew: the chain tells ----------------------------------------------------------------


def _edit(run: RunDir, change: Callable[[list[bytes]], list[bytes]]) -> None:
    (segment,) = (run.lineage / "chain").iterdir()
    segment.write_bytes(b"".join(change(segment.read_bytes().splitlines(keepends=True))))


def test_a_reward_that_was_edited_in_the_log_is_found(run: RunDir) -> None:
    _edit(run, lambda ls: [line.replace(b'"values":[1.0,0.0', b'"values":[1.0,1.0', 1) for line in ls])
    assert "chain" in found(run)


def test_an_entry_taken_out_of_the_log_is_found(run: RunDir) -> None:
    _edit(run, lambda ls: [line for k, line in enumerate(ls) if k != 10])
    assert "chain" in found(run)


def test_two_entries_that_changed_places_are_found(run: RunDir) -> None:
    _edit(run, lambda ls: [*ls[:8], ls[9], ls[8], *ls[10:]])
    assert "chain" in found(run)


def test_a_truncated_log_is_found(run: RunDir) -> None:
    _edit(run, lambda ls: ls[: len(ls) // 2])
    assert "chain" in found(run)


def test_a_log_cut_at_a_commit_that_closes_nothing_is_found(run: RunDir) -> None:
    _edit(run, lambda ls: ls[:-2])
    assert "chain" in found(run)


# --- hashed anew, all of it: the parts of the record contradict each other --------------------------------


def test_a_changed_reward_is_found_by_computing_it_again(run: RunDir) -> None:
    def change(entries: Entries) -> Entries:
        at = next(
            k
            for k, e in enumerate(entries)
            if isinstance(e, GroupEntry) and e.scores and not all(e.scores.values)
        )
        group = entries[at]
        assert isinstance(group, GroupEntry)
        assert group.scores
        ok = (Outcome.OK,) * 3
        scores = group.scores.model_copy(update={"values": (1.0, 1.0, 1.0), "outcomes": ok})
        entries[at] = group.model_copy(update={"scores": scores})
        return entries

    rechained(run, change)
    assert "rewards of reward" in found(run)


def test_a_reward_changed_in_group_and_batch_alike_is_found(run: RunDir) -> None:
    def change(entries: Entries) -> Entries:
        for k, e in enumerate(entries):
            if isinstance(e, BatchEntry):
                entries[k] = e.model_copy(update={"rewards": (1.0,) * len(e.rewards)})
            if isinstance(e, GroupEntry) and e.scores:
                scores = e.scores.model_copy(update={"values": (1.0,) * 3, "outcomes": (Outcome.OK,) * 3})
                entries[k] = e.model_copy(update={"scores": scores})
            if isinstance(e, Noted) and isinstance(e.event, Trained):
                entries[k] = Noted(event=e.event.model_copy(update={"reward_mean": 1.0}))
        return entries

    rechained(run, change)
    assert {"rewards of reward", "advantages of advantage"} <= found(run)


def test_a_removed_group_is_found(run: RunDir) -> None:
    def change(entries: Entries) -> Entries:
        at = next(k for k, e in enumerate(entries) if isinstance(e, GroupEntry) and e.prompt.split == "train")
        return entries[:at] + entries[at + 1 :]

    rechained(run, change)
    assert "steps" in found(run)


def test_a_missing_prompt_is_found(run: RunDir) -> None:
    def change(entries: Entries) -> Entries:
        return [
            e
            for e in entries
            if not (isinstance(e, Noted) and isinstance(e.event, Admitted) and e.event.origin == 3)
        ]

    rechained(run, change)
    assert "ledger" in found(run)


def test_a_prompt_that_never_came_back_is_found(run: RunDir) -> None:
    def change(entries: Entries) -> Entries:
        extra = Admitted(id="e0-r16", origin=16, split="train", epoch=0, row=16, min_version=0)
        return [entries[0], Noted(event=extra), *entries[1:]]

    rechained(run, change)
    assert "ledger" in found(run)


def test_swapped_steps_are_found(run: RunDir) -> None:
    def change(entries: Entries) -> Entries:
        first, second = [
            k for k, e in enumerate(entries) if isinstance(e, Noted) and isinstance(e.event, Trained)
        ][:2]
        entries[first], entries[second] = entries[second], entries[first]
        return entries

    rechained(run, change)
    assert "steps" in found(run)


def test_a_step_that_claims_another_batch_is_found(run: RunDir) -> None:
    def change(entries: Entries) -> Entries:
        at = [k for k, e in enumerate(entries) if isinstance(e, Noted) and isinstance(e.event, Trained)]
        one, two = entries[at[1]], entries[at[2]]
        assert isinstance(one, Noted)
        assert isinstance(two, Noted)
        assert isinstance(two.event, Trained)
        entries[at[1]] = Noted(event=one.event.model_copy(update={"batch": two.event.batch}))
        return entries

    rechained(run, change)
    assert {"steps", "weights"} <= found(run)


@pytest.mark.parametrize("file", ["manifest.json", "options.json", "graph.json"])
def test_an_edited_configuration_is_found(run: RunDir, file: str) -> None:
    text = (run.path / file).read_text()
    old, new = {"graph.json": ('"groups": 4', '"groups": 2')}.get(file, ('"seed": 0', '"seed": 1'))
    assert old in text
    (run.path / file).write_text(text.replace(old, new))
    assert "files" in found(run)


def test_an_edited_ledger_file_is_found(run: RunDir) -> None:
    run.ledger.write_text("".join(run.ledger.read_text().splitlines(keepends=True)[:-1]))
    assert found(run) == {"files"}


@pytest.mark.parametrize("name", ["tokens", "logprobs", "mask", "versions"])
def test_a_changed_array_is_found(run: RunDir, name: str) -> None:
    record = Lineage(str(run.lineage))
    group = next(iter(record.groups.values()))
    values = record.arrays(group)[name].copy()
    values[1] = {"tokens": 5, "logprobs": -0.25, "mask": False, "versions": 3}[name]
    overwrite(str(run.lineage), "rollouts", group.arrays, {name: values})
    assert "content" in found(run)


def test_a_log_probability_changed_with_its_hash_contradicts_its_batch(run: RunDir) -> None:
    def change(values: Array) -> None:
        values[1] = -0.25

    with_arrays(run, 0, "logprobs", change)
    assert "steps" in found(run)


def test_a_log_probability_above_zero_is_found(run: RunDir) -> None:
    def change(values: Array) -> None:
        values[1] = 0.25

    with_arrays(run, 0, "logprobs", change)
    assert "content" in found(run)


def test_a_missing_log_probability_is_found(run: RunDir) -> None:
    def change(values: Array) -> None:
        values[1] = np.nan

    with_arrays(run, 0, "logprobs", change)
    assert "content" in found(run)


def test_a_token_of_a_later_version_is_found(run: RunDir) -> None:
    def change(values: Array) -> None:
        values[values >= 0] += 3

    with_arrays(run, 0, "versions", change)
    assert {"tokens", "content"} <= found(run)


def test_a_staleness_above_the_bound_is_found(run: RunDir) -> None:
    def change(values: Array) -> None:
        values[values >= 0] = 0

    with_arrays(run, 15, "versions", change)
    assert "tokens" in found(run)


def test_a_changed_advantage_is_found(run: RunDir) -> None:
    record = Lineage(str(run.lineage))
    batch = next(iter(record.batches.values()))
    values = np.zeros(batch.advantages.size, np.float32)
    overwrite(str(run.lineage), "advantages", batch.advantages, {"values": values})
    assert {"steps", "advantages of advantage"} <= found(run)


@pytest.mark.parametrize(
    ("field", "value"), [("staleness_mean", 0.125), ("right_shares", (1.0,) * 4), ("reward_mean", 0.99)]
)
def test_a_step_that_tells_its_batch_prettier_is_found(run: RunDir, field: str, value: object) -> None:
    def change(entries: Entries) -> Entries:
        at = [k for k, e in enumerate(entries) if isinstance(e, Noted) and isinstance(e.event, Trained)][1]
        entry = entries[at]
        assert isinstance(entry, Noted)
        entries[at] = Noted(event=entry.event.model_copy(update={field: value}))
        return entries

    rechained(run, change)
    assert "steps" in found(run)


def test_a_group_that_is_said_to_come_of_another_prompt_is_found(run: RunDir) -> None:
    rechained(run, changed(GroupEntry, 3, origins=(9,)))
    assert "ledger" in found(run)


def test_a_version_left_out_is_found(run: RunDir) -> None:
    rechained(
        run, lambda entries: [e for e in entries if not (isinstance(e, WeightsEntry) and e.version == 2)]
    )
    assert "weights" in found(run)


def test_a_loss_made_prettier_is_found(run: RunDir) -> None:
    rechained(run, changed(WeightsEntry, 3, metrics={"loss": 0.0, "grad_norm": 0.5}))
    assert "weights" in found(run)


def test_a_group_recorded_once_more_under_another_name_is_found(run: RunDir) -> None:
    def change(entries: Entries) -> Entries:
        at = next(k for k, e in enumerate(entries) if isinstance(e, GroupEntry) and e.prompt.split == "train")
        group = entries[at]
        assert isinstance(group, GroupEntry)
        assert group.scores
        scores = group.scores.model_copy(update={"id": "again>reward", "parents": ("again",)})
        return [
            *entries[: at + 1], group.model_copy(update={"id": "again", "scores": scores}), *entries[at + 1 :]
        ]  # fmt: skip

    rechained(run, change)
    assert any("stands where" in f.what for f in audited(str(run.path)).findings)


@pytest.mark.parametrize("kind", [GroupEntry, BatchEntry])
def test_what_is_said_to_come_by_an_edge_that_the_graph_has_not_is_found(
    run: RunDir, kind: type[Entry]
) -> None:
    # Else it would be no node's reward, or batch, to be computed again.
    rechained(
        run,
        lambda es: [e.model_copy(update={"edge": "nowhere"}) if isinstance(e, kind) else e for e in es],
    )
    assert "edges" in found(run)


def test_scores_that_come_from_nothing_are_found(run: RunDir) -> None:
    def change(entries: Entries) -> Entries:
        for k, e in enumerate(entries):
            if isinstance(e, GroupEntry) and e.scores:
                scores = e.scores.model_copy(update={"parents": ("nobody",)})
                entries[k] = e.model_copy(update={"scores": scores})
        return entries

    rechained(run, change)
    assert found(run) == {"edges"}


def test_a_prompt_admitted_for_another_version_than_its_group_says_is_found(run: RunDir) -> None:
    def change(entries: Entries) -> Entries:
        for k, e in enumerate(entries):
            if isinstance(e, Noted) and isinstance(e.event, Admitted):
                entries[k] = Noted(event=e.event.model_copy(update={"min_version": 9}))
        return entries

    rechained(run, change)
    assert "ledger" in found(run)


def test_the_record_of_another_run_is_found(run: RunDir) -> None:
    rechained(run, lambda es: [es[0].model_copy(update={"run_id": "another"}), *es[1:]])
    told = [(f.where, f.what) for f in audited(str(run.path)).findings]
    assert told == [
        (name, "is of run run, the record of another") for name in ("manifest.json", "options.json")
    ]


def test_a_failure_in_a_run_that_is_said_to_have_finished_is_found(run: RunDir) -> None:
    failed = RunEntry(what="failed", detail="out of memory")
    rechained(run, lambda es: [*es[:-2], failed, *es[-2:]])
    assert found(run) == {"chain"}


def test_a_record_written_anew_without_a_contradiction_is_told_by_its_head(
    honest: RunDir, run: RunDir
) -> None:
    # A restart that nothing else tells of: only a head that was kept elsewhere can tell.
    kept = honest.read_summary().lineage
    assert kept is not None
    restart = Noted(event=Restarted(name="talker-0", number=1, why="it ran out of memory"))
    rechained(run, lambda entries: [entries[0], restart, *entries[1:]])
    assert found(run) == set()
    (finding,) = audited(str(run.path), head=kept.head).findings
    assert (finding.check, finding.where) == ("chain", "--head")


def test_the_report_can_be_read_by_machines(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    _edit(run, lambda ls: ls[:-2])
    assert main(["audit", str(run.path), "--json"]) == 1
    assert {f["check"] for f in json.loads(capsys.readouterr().out)["findings"]} >= {"chain"}


def test_hashes_are_of_the_bytes_of_the_arrays(honest: RunDir) -> None:
    record = Lineage(str(honest.path))
    name, entry = next(iter(record.groups.items()))
    group = record.group(name)
    assert isinstance(group, ScoredGroup)
    now = hashes(record, entry, columns(group.group.rollouts))
    assert now == {"shape_sha256": entry.shape_sha256, "tokens_sha256": entry.tokens_sha256}
