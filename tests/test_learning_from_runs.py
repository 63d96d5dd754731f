"""A recorded run is data for others: offline RL, imitation, pairs, distillation; lineage points back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from arriero.components.recorded import RecordedRollouts
from arriero.components.selection import BestResponses, RankedPairs
from arriero.engine.errors import UserError
from arriero.engine.lineage.index import Index
from arriero.engine.lineage.queries import Questions
from arriero.engine.lineage.reader import Lineage
from arriero.launchers.audit import audited
from arriero.launchers.cli import main
from arriero.launchers.rundir import RunDir
from arriero.schemas.messages import Batch, Dropped, ScoredGroup
from tests.drive import kept, outputs, stream
from tests.inline_runs import recorded_grpo
from tests.lineage_runs import overwrite, scored_group

torch.set_num_threads(1)


def started(*words: str) -> int:
    return main(["run", *words, "--inline", "--quiet", "--wait-bound-s", "60"])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return recorded_grpo(tmp_path_factory.mktemp("source"))


LEARNERS = {
    "offline": ["--groups-per-step", "4"],
    "imitate": ["--groups-per-step", "2", "--at-least", "0.1", "--truncated", "true"],
    "dpo_recorded": ["--pairs-per-step", "2"],
    "distill_recorded": ["--groups-per-step", "4"],
}


@pytest.mark.parametrize("name", LEARNERS)
def test_what_learns_from_a_run_names_the_rollouts_it_was_made_from(
    name: str, source: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(source.path.parent / "tiny")
    teacher = ["--teacher", str(source.model)] if name == "distill_recorded" else []
    words = [name, "--model", model, "--data", str(source.path), *LEARNERS[name], *teacher]
    assert started(*words, "--steps", "2", "--run-dir", str(tmp_path / "new")) == 0
    then, now = Lineage(str(source.path)), Lineage(str(tmp_path / "new"))
    assert then.opened is not None
    for version in (1, 2):
        answer = Questions(Index(now.url)).step(version)
        assert answer.rollouts
        assert answer.prompts
        for row in answer.rollouts:
            run_id, _, old = row.recorded.partition(":")
            assert run_id == then.opened.run_id
            group, _, number = old.rpartition("/")
            entry = next(g for g in then.groups.values() if g.id == group)
            was, is_now = whole(then, group), whole(now, row.id.rpartition("/")[0])
            assert is_now.group.rollouts[int(number)].tokens.tobytes() == (
                was.group.rollouts[int(number)].tokens.tobytes()
            )
            assert entry.scores is not None
            assert row.reward == entry.scores.values[int(number)]
    report = audited(str(tmp_path / "new"))
    assert report.findings == []
    assert "groups of other runs" in report.done["inherited"]
    capsys.readouterr()
    assert main(["lineage", str(tmp_path / "new")]) == 0
    assert f"made from record of {then.opened.run_id} in {source.path} (data.path)" in capsys.readouterr().out
    (ancestor,) = [a for a in RunDir(tmp_path / "new").read_manifest().ancestors if a.took == "record"]
    assert ancestor.sha256 == then.anchor.head


def test_a_group_that_is_not_the_one_it_is_said_to_be_is_found(source: RunDir, tmp_path: Path) -> None:
    shutil.copytree(source.path, old := tmp_path / "old")
    words = ["offline", "--model", str(source.path.parent / "tiny"), "--data", str(old)]
    assert started(*words, "--groups-per-step", "4", "--steps", "1", "--run-dir", str(tmp_path / "new")) == 0
    record = Lineage(str(old))
    for entry in record.groups.values():
        tokens = record.arrays(entry)["tokens"].copy()
        tokens[-1] += 1
        overwrite(record.url, "rollouts", entry.arrays, {"tokens": tokens})
    report = audited(str(tmp_path / "new"))
    assert {f.check for f in report.findings} == {"inherited"}
    assert "has other tokens or log-probs than" in report.findings[0].what
    shutil.rmtree(old)
    report = audited(str(tmp_path / "new"))
    assert report.findings == []
    assert report.left[0].startswith("groups of")


def whole(record: Lineage, group: str) -> ScoredGroup:
    name = next(k for k, g in record.groups.items() if g.id == group)
    found = record.group(name)
    assert isinstance(found, ScoredGroup)
    return found


@pytest.mark.parametrize("steps_at_once", [0, 1])
async def test_every_training_group_of_a_run_comes_once_in_an_epoch(
    source: RunDir, steps_at_once: int
) -> None:
    data = RecordedRollouts(path=str(source.path), epochs=2, stream=steps_at_once)
    groups = kept(await outputs(data.run()))
    record = Lineage(str(source.path))
    trained = [g.id for g in record.groups.values() if g.prompt.split == "train"]
    for epoch in range(2):
        found = [g.group.recorded.partition(":")[2] for g in groups if g.group.prompt.epoch == epoch]
        assert sorted(found) == sorted(trained)
    assert all(set(r.versions[r.mask].tolist()) == {0} for g in groups for r in g.group.rollouts)


async def test_nothing_is_learned_from_a_group_that_was_changed(source: RunDir, tmp_path: Path) -> None:
    shutil.copytree(source.path, old := tmp_path / "old")
    record = Lineage(str(old))
    entry = next(g for g in record.groups.values() if g.prompt.split == "train")
    overwrite(record.url, "rollouts", entry.arrays, {"tokens": record.arrays(entry)["tokens"] + 1})
    with pytest.raises(UserError, match="isn't what was recorded: its tokens or log-probs were changed"):
        await outputs(RecordedRollouts(path=str(old)).run())


async def test_nothing_is_learned_from_a_record_whose_chain_is_broken(source: RunDir, tmp_path: Path) -> None:
    """A reward changed in the segment, its hash left as it was."""
    shutil.copytree(source.path, old := tmp_path / "old")
    segment = next((old / "lineage").rglob("*.jsonl"))
    text = segment.read_text()
    assert '"values":[0.0' in text
    segment.write_text(text.replace('"values":[0.0', '"values":[1.0', 1))
    with pytest.raises(UserError, match=r"nothing is learned from a damaged record: entry .* was changed"):
        await outputs(RecordedRollouts(path=str(old)).run())


async def test_a_directory_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a run with a record nor a file of data"):
        await outputs(RecordedRollouts(path=str(tmp_path)).run())


def valued(number: int, *values: float) -> ScoredGroup:
    group = scored_group(number, size=len(values))
    scores = [s.model_copy(update={"value": v}) for s, v in zip(group.scores, values, strict=True)]
    return group.model_copy(update={"scores": tuple(scores)})


async def chosen(component: Any, *groups: ScoredGroup) -> tuple[list[Batch], list[Dropped]]:
    made = await outputs(component.run(stream(groups, ScoredGroup)))
    return kept(made), [m for m in made if isinstance(m, Dropped)]


async def test_the_best_responses_are_taken_and_groups_without_a_good_one_dropped() -> None:
    best = BestResponses(groups=2, keep=2, at_least=0.5, truncated=True)
    groups = [valued(0, 0.1, 0.9, 0.6, 0.7), valued(1, 0.4, 0.3), valued(2, 0.5, 0.1)]
    (batch,), (dropped,) = await chosen(best, *groups)
    assert [s.reward for s in batch.samples] == [0.9, 0.7, 0.5]
    assert dropped.parent == groups[1].id
    assert batch.parents == (groups[0].id, groups[2].id)
    assert all(np.array_equal(s.advantages, s.mask.astype(np.float32)) for s in batch.samples)


async def test_a_pair_is_the_best_response_and_then_the_worst() -> None:
    pairs = RankedPairs(pairs=2, margin=0.2)
    groups = [valued(0, 0.1, 0.9, 0.6), valued(1, 0.4, 0.3), valued(2, 0.0, 1.0)]
    (batch,), (dropped,) = await chosen(pairs, *groups)
    assert [s.reward for s in batch.samples] == [0.9, 0.1, 1.0, 0.0]
    assert [float(s.advantages[s.mask][0]) for s in batch.samples] == [1.0, -1.0, 1.0, -1.0]
    assert dropped.parent == groups[1].id


async def test_a_record_written_as_lines_is_the_same_data(source: RunDir, tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    assert main(["export", str(source.path), "--to", "rollouts", "--out", str(file)]) == 0
    run = kept(await outputs(RecordedRollouts(path=str(source.path), epochs=1, shuffle=False).run()))
    lines = kept(await outputs(RecordedRollouts(path=str(file), epochs=1, shuffle=False).run()))
    by_prompt = {(g.group.prompt.text, g.group.rollouts[0].tokens.tobytes()): g for g in lines}
    for a in run:
        b = by_prompt[a.group.prompt.text, a.group.rollouts[0].tokens.tobytes()]
        assert [s.value for s in a.scores] == [s.value for s in b.scores]
        for x, y in zip(a.group.rollouts, b.group.rollouts, strict=True):
            assert x.tokens.tobytes() == y.tokens.tobytes()
            assert x.logprobs.tobytes() == y.logprobs.tobytes()
