"""The tables of a record: what its entries say, kept a shard at a time and never trusted unseen."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from arriero.engine.lineage import chain, shards
from arriero.engine.lineage.files import Files
from arriero.engine.lineage.index import Index
from arriero.engine.lineage.queries import Questions
from arriero.engine.lineage.reader import Lineage
from arriero.engine.lineage.writer import Item, LineageWriter, Seen
from arriero.engine.runtime.ledger import Ledger
from arriero.launchers.cli import main
from arriero.launchers.rundir import RunDir
from arriero.launchers.ui.rollouts import one
from arriero.schemas.ledger import Admitted, DroppedEvent, Evaluated, Resumed, Trained
from arriero.schemas.messages import Weights
from tests.lineage_runs import OPENED, batch_of_groups, recorded_run, scored_group


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return recorded_run(tmp_path_factory.mktemp("indexed") / "run")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments, and so shards, of about two commits."""
    for module in (chain, shards):
        monkeypatch.setattr(module, "SEGMENT_BYTES", 8000)


def admitted(number: int, *, split: str = "train", version: int = 0) -> Admitted:
    name = f"p-{number}" if number >= 0 else f"held-{-number}@{version}"
    told: dict[str, Any] = {"split": split}
    return Admitted(id=name, origin=number, epoch=0, row=abs(number), min_version=version, **told)


def trained(version: int, batch: str, origins: Sequence[int], loss: float = 0.5) -> Trained:
    return Trained(
        node="trainer", version=version, batch=batch, origins=tuple(origins), tokens=18, staleness_max=0,
        staleness_mean=0, reward_mean=0.5, metrics={"loss": loss, "grad_norm": 2.0},
    )  # fmt: skip


def step(version: int, number: int) -> list[Item]:
    """What a step on group `number` leaves."""
    group = scored_group(number)
    batch = batch_of_groups([group])
    weights = Weights(id=f"{batch.id}>trainer", parents=(batch.id,), version=version)
    return [
        admitted(number), Seen("reward", group), Seen("advantage", batch),
        trained(version, batch.id, [number], 1 / version), Seen("weights", weights),
    ]  # fmt: skip


def rows(place: object, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = Index(str(place)).table(name).to_pylist()
    return found


def agree(place: Path) -> None:
    """The tables say what the record says when all of it is read at once."""
    record, index = Lineage(str(place)), Index(str(place))
    for name, told in {
        "steps": [(s.version, s.node, s.batch, s.metrics.get("loss")) for s in record.steps],
        "prompts": [(a.id, a.origin, a.split, a.row, a.min_version) for a in record.admitted],
        "weights": [(w.loop, w.id, w.version, w.fingerprint) for w in record.weights],
    }.items():
        columns = {
            "steps": ("version", "node", "batch", "loss"),
            "prompts": ("id", "origin", "split", "row", "min_version"),
            "weights": ("loop", "id", "version", "fingerprint"),
        }[name]
        assert [tuple(r[c] for c in columns) for r in index.table(name).to_pylist()] == told
    ledger = Ledger()
    for event in record.history:
        ledger.apply(event)
    prompts: list[dict[str, Any]] = index.table("prompts").to_pylist()
    training = [p for p in prompts if p["split"] == "train"]
    assert sum(p["trained_in"] is not None for p in training) == ledger.trained
    assert sum(p["dropped"] is not None for p in training) == ledger.dropped.total()
    for p in prompts:
        steps = [s.version for s in record.steps if p["origin"] in s.origins]
        drops = [d for d in record.dropped if p["origin"] in d.origins]
        assert p["trained_in"] == (steps[0] if steps else None)
        assert (p["dropped"], p["dropped_by"]) == (
            (drops[-1].reason, drops[-1].node) if drops else (None, None)
        )
    groups = {g.scores.id if g.scores else g.id: g for g in record.groups.values()}
    passed = {p for g in groups.values() for p in (g.scores.parents if g.scores else ())}
    rollouts: list[dict[str, Any]] = index.table("rollouts").to_pylist()
    assert {(r["id"], r["reward"], r["length"], r["start"]) for r in rollouts} == {
        (f"{g.id}/{k}", g.scores.values[k] if g.scores else None, n, g.arrays.start + sum(g.lengths[:k]))
        for name, g in groups.items() if name not in passed for k, n in enumerate(g.lengths)
    }  # fmt: skip
    made = {s.batch: s.version for s in record.steps}
    samples: list[dict[str, Any]] = index.table("samples").to_pylist()
    assert {(s["batch"], s["number"], s["version"], s["rollout"]) for s in samples} == {
        (b.id, k, made.get(b.id), f"{groups[b.groups[b.group[k]]].id}/{r}" if r >= 0 else "")
        for b in record.batches.values() for k, r in enumerate(b.rollout)
    }  # fmt: skip
    o = index.overview
    assert (o.anchor, o.state, o.broken) == (
        record.anchor,
        record.closed.state if record.closed else "",
        record.broken,
    )
    assert (o.steps, o.admitted, o.dropped, o.evaluated, o.redacted) == (
        len(record.steps),
        *(sum(1 for _ in of) for of in (record.admitted, record.dropped, record.evaluated)),
        len(record.redacted),
    )  # fmt: skip
    assert (o.rollouts, o.groups) == (len(rollouts), len({r["group"] for r in rollouts}))


def test_the_tables_of_a_run_say_what_its_record_says(run: RunDir) -> None:
    agree(run.path)
    assert len(rows(run.path, "rollouts")) == 60  # 4 steps x 4 groups of 3, and 2 x 2 held out
    assert [r["version"] for r in rows(run.path, "steps")] == [1, 2, 3, 4]


@pytest.mark.parametrize("anew", [False, True])
def test_what_a_run_that_went_on_has_undone_is_in_no_table(tmp_path: Path, *, anew: bool) -> None:
    writer = LineageWriter(str(tmp_path), OPENED)
    for version in (1, 2, 3):
        writer.commit(step(version, version - 1))
    held = [admitted(-k, split="eval", version=3) for k in (1, 2)]
    answer = Evaluated(id="held-1@3", origin=-1, version=3, values=(1.0,), outcomes=("ok",))  # type: ignore[arg-type]  # as JSON has it
    ended = [DroppedEvent(node="trainer", parent=f"p-{k}", origins=(k,), reason="end_of_run") for k in (3, 4)]
    lost = DroppedEvent(node="generator", parent="held-2@3", origins=(-2, 5), reason="invalid")
    writer.commit([*held, *(admitted(k) for k in (3, 4, 5)), answer, *ended, lost])
    writer.commit([Resumed(number=1, versions={"trainer": 1}, anew=anew)])
    writer.commit([*step(2, 3)[1:], admitted(-1, split="eval", version=2)] if not anew else step(2, 6))
    writer.commit([Resumed(number=2, versions={"trainer": 2})])
    agree(tmp_path)
    assert [r["version"] for r in rows(tmp_path, "steps")] == [1, 2]
    assert [r["kind"] for r in rows(tmp_path, "events")] == ["resumed", "resumed"]
    dropped = {r["origin"] for r in rows(tmp_path, "prompts") if r["dropped"]}
    assert dropped == ({3, 4, 5} if anew else {5})


def test_of_what_was_recorded_twice_the_last_counts(tmp_path: Path) -> None:
    writer = LineageWriter(str(tmp_path), OPENED)
    writer.commit(step(1, 0))
    writer.commit([Resumed(number=1, versions={"trainer": 0})])
    writer.commit(step(1, 0)[1:])
    agree(tmp_path)
    assert len(rows(tmp_path, "rollouts")) == len(rows(tmp_path, "samples")) == 2


# --- shards -----------------------------------------------------------------------------------------------


def kept(folder: Path) -> dict[str, int]:
    """When each file of the index was written."""
    return {p.name: p.stat().st_mtime_ns for p in (folder / "index").glob("*")}


@pytest.mark.usefixtures("small")
def test_a_writer_keeps_the_rows_of_each_full_shard_and_of_the_last_at_the_end(tmp_path: Path) -> None:
    writer = LineageWriter(str(tmp_path), OPENED)
    for version in range(1, 9):
        writer.commit(step(version, version - 1))
    segments = sorted(p.stem for p in (tmp_path / "chain").iterdir())
    assert len(segments) > 2
    assert sorted(p.stem for p in (tmp_path / "index").glob("*.json")) == segments[:-1]
    agree(tmp_path)
    assert sorted(p.stem for p in (tmp_path / "index").glob("*.json")) == segments[:-1]  # the last one grows
    writer.close("finished")
    before = kept(tmp_path)
    assert {name.partition(".")[0] for name in before} == {*segments}
    agree(tmp_path)
    assert kept(tmp_path) == before


@pytest.mark.usefixtures("small")
def test_a_shard_that_cannot_be_kept_costs_no_other(tmp_path: Path) -> None:
    writer = LineageWriter(str(tmp_path), OPENED)
    (tmp_path / "index" / "000000000000.events.parquet").mkdir(parents=True)
    for version in range(1, 9):
        writer.commit(step(version, version - 1))
    writer.close("finished")
    segments = sorted(p.stem for p in (tmp_path / "chain").iterdir())
    assert sorted(p.stem for p in (tmp_path / "index").glob("*.json")) == segments[1:]
    agree(tmp_path)


def test_a_number_that_no_table_holds_does_not_end_the_recording(tmp_path: Path) -> None:
    writer = LineageWriter(str(tmp_path), OPENED)
    writer.commit([admitted(2**63)])
    writer.close("finished")
    assert next(Lineage(str(tmp_path)).admitted).row == 2**63


@pytest.mark.usefixtures("small")
def test_a_question_to_a_run_that_goes_on_makes_only_the_rows_that_are_new(tmp_path: Path) -> None:
    writer = LineageWriter(str(tmp_path), OPENED)
    for version in range(1, 6):
        writer.commit(step(version, version - 1))
    shutil.rmtree(tmp_path / "index")
    agree(tmp_path)  # a reader keeps what a writer hasn't
    before = kept(tmp_path)
    assert before
    for version in range(6, 11):
        writer.commit(step(version, version - 1))
        agree(tmp_path)
    assert {name: kept(tmp_path)[name] for name in before} == before
    assert len(kept(tmp_path)) > len(before)


@pytest.mark.usefixtures("small")
def test_a_writer_that_takes_a_record_up_goes_on_with_its_shards(tmp_path: Path) -> None:
    for version in range(1, 7):
        writer = LineageWriter(str(tmp_path), OPENED)
        writer.commit(step(version, version - 1))
        del writer
    agree(tmp_path)
    LineageWriter(str(tmp_path), OPENED).close("stopped")
    assert Index(str(tmp_path)).overview.state == "stopped"
    agree(tmp_path)


def test_small_segments_share_a_shard(tmp_path: Path) -> None:
    # As where a store can't append: a segment for each commit. 4 MiB are 4194304 bytes.
    sizes = [("a", 4194303), ("b", 1), ("c", 5000000), ("d", 1), ("e", 2)]
    assert shards.grouped(sizes) == [["a", "b"], ["c"], ["d", "e"]]
    writer = LineageWriter("memory://shards", OPENED)
    for version in (1, 2, 3):
        writer.commit(step(version, version - 1))
    writer.close("finished")
    index = Index("memory://shards")
    assert [r["version"] for r in index.table("steps").to_pylist()] == [1, 2, 3]
    assert next(shards.Shards("memory://shards").read()).tables is None  # kept


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("what", ["events.parquet", "rollouts.parquet", "json"])
@pytest.mark.parametrize("left", [None, b"garbage"])
def test_a_shard_that_is_gone_or_damaged_is_made_anew_alone(
    tmp_path: Path, what: str, left: bytes | None
) -> None:
    writer = LineageWriter(str(tmp_path), OPENED)
    for version in range(1, 9):
        writer.commit(step(version, version - 1))
    writer.close("finished")
    before = kept(tmp_path)
    first = sorted(before)[0].partition(".")[0]
    file = tmp_path / "index" / f"{first}.{what}"
    file.unlink() if left is None else file.write_bytes(left)
    agree(tmp_path)
    after = kept(tmp_path)
    assert {n for n in before if before[n] != after[n]} == {n for n in before if n.startswith(first)}


@pytest.mark.usefixtures("small")
def test_damage_is_told_as_one_who_reads_all_of_the_chain_tells_it(tmp_path: Path) -> None:
    writer = LineageWriter(str(tmp_path), OPENED)
    for version in range(1, 9):
        writer.commit(step(version, version - 1))
    writer.close("finished")
    second = sorted((tmp_path / "chain").iterdir())[1]
    whole = second.read_bytes()
    for damaged in (
        whole.replace(b'"reward_mean":0.5', b'"reward_mean":0.7', 1), whole[200:], whole[:-5],
        whole.replace(b'"kind":"group"', b'"kind":"troup"', 1),
    ):  # fmt: skip
        second.write_bytes(damaged)
        told = Lineage(str(tmp_path)).broken
        assert told
        assert Index(str(tmp_path)).overview.broken == told
    second.unlink()
    assert Index(str(tmp_path)).overview.broken == Lineage(str(tmp_path)).broken != ""
    second.write_bytes(whole)
    assert Index(str(tmp_path)).overview.broken == ""
    agree(tmp_path)


def test_a_torn_tail_is_left_out(tmp_path: Path) -> None:
    writer = LineageWriter(str(tmp_path), OPENED)
    writer.commit(step(1, 0))
    (segment,) = (tmp_path / "chain").iterdir()
    segment.write_bytes(segment.read_bytes() + segment.read_bytes()[:300])
    agree(tmp_path)


def test_a_record_that_cannot_be_written_to_is_asked_all_the_same(run: RunDir, tmp_path: Path) -> None:
    shutil.copytree(run.path, tmp_path / "run")
    index = tmp_path / "run" / "lineage" / "index"
    shutil.rmtree(index)
    index.write_text("in the way")
    assert len(Questions(Index(str(tmp_path / "run"))).step(2).rollouts) == 12


def test_a_redaction_is_seen_by_the_next_question(run: RunDir, tmp_path: Path) -> None:
    shutil.copytree(run.path, tmp_path / "run")
    assert Index(str(tmp_path / "run")).overview.redacted == 0
    assert main(["lineage", "redact", str(tmp_path / "run"), "--row", "3"]) == 0
    assert Index(str(tmp_path / "run")).overview.redacted == 1


def test_a_record_answers_for_itself_alone_whatever_its_folder_is_called(tmp_path: Path) -> None:
    for name, groups in {"run[1]*?": 1, "run1-other": 3}.items():  # as a pattern the one means the other too
        writer = LineageWriter(str(tmp_path / name), OPENED)
        for k in range(groups):
            writer.commit(step(k + 1, k))
        writer.close("finished")
    assert len(rows(tmp_path / "run[1]*?", "rollouts")) == len(scored_group(0).scores)
    assert Index(str(tmp_path / "run[1]*?")).sql("select count(*) as n from steps").to_pylist() == [{"n": 1}]


def test_two_processes_that_keep_the_same_shard_at_once_both_put_a_whole_one_there(tmp_path: Path) -> None:
    one, other = Files(str(tmp_path), "index"), Files(str(tmp_path), "index")
    one.stage("0.json", b"whole")
    other.stage("0.json", b"whole")
    one.settle()
    other.settle()
    assert (other.read("0.json"), other.below()) == (b"whole", ["0.json"])


def test_what_each_turn_earned_stands_in_the_tables_and_beside_the_rollout(tmp_path: Path) -> None:
    group = scored_group(3)
    played = group.scores[0].model_copy(update={"turns": (0.25, 0.75)})
    writer = LineageWriter(str(tmp_path), OPENED)
    writer.commit(
        [admitted(3), Seen("reward", group.model_copy(update={"scores": (played, group.scores[1])}))]
    )
    writer.commit(step(1, 4))
    writer.close("finished")
    index = Index(str(tmp_path))
    told = {row["id"]: row["turns"] for row in index.rows("select id, turns from rollouts")}
    name = f"{group.group.id}/0"
    assert told.pop(name) == [0.25, 0.75]
    assert not any(told.values())
    assert one(index, name, None).turns == (0.25, 0.75)
