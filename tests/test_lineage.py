"""The record of a run: what goes in comes out bit for bit, whoever is killed when."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arriero.engine.codec import encode
from arriero.engine.lineage.chain import Chain, ChainError, head_of, lines
from arriero.engine.lineage.content import SALT_BYTES, prompt_text
from arriero.engine.lineage.reader import Lineage
from arriero.engine.lineage.writer import LineageWriter, Seen
from arriero.launchers.cli import main
from arriero.schemas.lineage import BatchEntry, Committed, GroupEntry, RunEntry, ScoresEntry, WeightsEntry
from arriero.schemas.messages import Batch, Example, Message, Record, RolloutGroup, Said, ScoredGroup, Weights
from tests import records
from tests.lineage_runs import OPENED, batch_of_groups, scored_group


def test_a_scored_group_comes_back_bit_for_bit(tmp_path: Path) -> None:
    group = scored_group(3, size=4)
    writer = LineageWriter(str(tmp_path), OPENED)
    writer.commit([Seen("reward", group)])
    assert encode(Lineage(str(tmp_path)).group(group.id)) == encode(group)


@settings(max_examples=15)
@given(st.lists(records.scored_groups, min_size=1, max_size=3, unique_by=lambda g: g.id))
def test_whatever_is_a_valid_group_comes_back(
    tmp_path_factory: pytest.TempPathFactory, groups: list[ScoredGroup]
) -> None:
    folder = str(tmp_path_factory.mktemp("any"))
    writer = LineageWriter(folder, OPENED)
    writer.commit([Seen("reward", g) for g in groups])
    lineage = Lineage(folder)
    assert [encode(lineage.group(g.id)) for g in groups] == [encode(g) for g in groups]


@settings(max_examples=15)
@given(records.batches)
def test_whatever_is_a_valid_batch_comes_back(tmp_path_factory: pytest.TempPathFactory, batch: Batch) -> None:
    folder = str(tmp_path_factory.mktemp("any"))
    LineageWriter(folder, OPENED).commit([Seen("advantage", batch)])
    assert encode(Lineage(folder).batch(batch.id)) == encode(batch)


def test_every_field_of_a_record_has_a_place_in_its_entry() -> None:
    content = {
        "rollouts",
        "group",
        "scores",
        "samples",
        "manifest",
    }  # taken apart further; bytes by their hash
    kept: dict[type[Record], type[Message]] = {
        RolloutGroup: GroupEntry, ScoredGroup: ScoresEntry, Batch: BatchEntry, Weights: WeightsEntry,
    }  # fmt: skip
    for record, entry in kept.items():
        assert {*record.model_fields} <= {*entry.model_fields} | content, record


def test_a_conversation_comes_back_and_is_part_of_the_hash_of_its_prompt(tmp_path: Path) -> None:
    scored = scored_group(0)
    said = (Said(role="system", content="be brief"), Said(role="user", content="question"))
    prompt = scored.group.prompt.model_copy(update={"messages": said})
    scored = scored.model_copy(update={"group": scored.group.model_copy(update={"prompt": prompt})})
    writer = LineageWriter(str(tmp_path), OPENED)
    writer.commit([Seen("reward", scored)])
    assert encode(Lineage(str(tmp_path)).group(scored.id)) == encode(scored)
    assert prompt_text(prompt) != prompt_text(scored_group(0).group.prompt)


@pytest.mark.parametrize("apart", [False, True])
def test_the_tokens_of_a_batch_are_stored_once(tmp_path: Path, apart: bool) -> None:
    groups = [scored_group(k, size=4) for k in range(3)]
    batch = batch_of_groups(groups)
    writer = LineageWriter(str(tmp_path), OPENED)
    if apart:
        writer.commit([Seen("reward", g) for g in groups])
        writer.commit([Seen("advantage", batch)])
    else:
        writer.commit([Seen("advantage", batch), *(Seen("reward", g) for g in groups)])
    lineage = Lineage(str(tmp_path))
    assert encode(lineage.batch(batch.id)) == encode(batch)
    entry = lineage.batches[batch.id]
    assert entry.own.size == 0
    assert entry.rollout == (0, 1, 2, 3) * 3
    assert entry.advantages.size == sum(len(s.tokens) for s in batch.samples)


def test_equal_rollouts_of_one_group_are_told_apart_by_their_order(tmp_path: Path) -> None:
    group = scored_group(0, size=2, same=True)
    writer = LineageWriter(str(tmp_path), OPENED)
    writer.commit([Seen("reward", group), Seen("advantage", batch_of_groups([group]))])
    assert next(iter(Lineage(str(tmp_path)).batches.values())).rollout == (0, 1)


def test_a_record_without_arrays_keeps_its_text(tmp_path: Path) -> None:
    example = Example(id="e0-r7", prompt="2 + 2 =", response="4", row=7)
    LineageWriter(str(tmp_path), OPENED).commit([Seen("examples", example)])
    lineage = Lineage(str(tmp_path))
    entry = lineage.records["e0-r7"]
    assert Example.model_validate_json(lineage.text(entry.text)[SALT_BYTES:]) == example


def test_a_record_grows_by_commits_on_a_file_system_that_only_takes_whole_objects() -> None:
    url = "memory://lineage-whole"
    groups = [scored_group(k) for k in range(4)]
    writer = LineageWriter(url, OPENED)
    for group in groups:
        writer.commit([Seen("reward", group)])
    lineage = Lineage(url)
    assert not lineage.broken
    assert [encode(lineage.group(g.id)) for g in groups] == [encode(g) for g in groups]


def test_an_append_that_outgrows_the_chunks_begins_a_part_with_larger_ones(tmp_path: Path) -> None:
    small, large = scored_group(0, length=10), scored_group(1, length=20_000)
    writer = LineageWriter(str(tmp_path), OPENED)
    for group in (small, large):
        writer.commit([Seen("reward", group)])
    lineage = Lineage(str(tmp_path))
    assert [lineage.groups[g.id].arrays.part for g in (small, large)] == [0, 1]
    assert [encode(lineage.group(g.id)) for g in (small, large)] == [encode(g) for g in (small, large)]
    chunks = list((tmp_path / "rollouts" / "rollouts" / "1" / "tokens" / "c").iterdir())
    assert len(chunks) == 1, "a commit is one object per array"


def test_any_zarr_reader_finds_a_rollout_through_the_index(tmp_path: Path) -> None:
    zarr: Any = import_module("zarr")

    groups = [scored_group(k, size=2) for k in range(3)]
    writer = LineageWriter(str(tmp_path), OPENED)
    writer.commit([Seen("reward", g) for g in groups[:2]])
    writer.commit([Seen("reward", groups[2])])
    root = zarr.open_group(str(tmp_path / "rollouts"), mode="r")
    rows = np.asarray(root["index/0/rows"])
    part, start, size = rows[-1] if rows[-1].any() else rows[rows.any(axis=1)][-1]
    tokens = np.asarray(root[f"rollouts/{part}/tokens"])[start : start + size]
    assert tokens.tolist() == groups[2].group.rollouts[1].tokens.tolist()


# --- the chain --------------------------------------------------------------------------------------------


def _filled(folder: Path, commits: int = 5) -> Path:
    writer = LineageWriter(str(folder), OPENED)
    for k in range(commits):
        writer.commit([Seen("reward", scored_group(k))])
    (segment,) = (folder / "chain").iterdir()
    return segment


@pytest.mark.parametrize("cut", [1, 40, 700])
def test_a_torn_tail_is_cut_to_the_last_whole_commit(tmp_path: Path, cut: int) -> None:
    segment = _filled(tmp_path)
    segment.write_bytes(segment.read_bytes()[:-cut])
    assert len(Lineage(str(tmp_path)).groups) == 4, "a reader leaves the torn commit out"
    writer = LineageWriter(str(tmp_path), OPENED)
    assert [writer.knows("reward", scored_group(k).id) for k in range(5)] == [True] * 4 + [False]
    writer.commit([Seen("reward", scored_group(4))])
    lineage = Lineage(str(tmp_path))
    assert not lineage.broken
    assert [encode(lineage.group(scored_group(k).id)) for k in range(5)] == [
        encode(scored_group(k)) for k in range(5)
    ]


def test_a_tail_torn_behind_whole_entries_is_no_damage(tmp_path: Path) -> None:
    segment = _filled(tmp_path)
    whole = segment.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    segment.write_bytes(whole + whole.splitlines(keepends=True)[-2] + last[:20])
    lineage = Lineage(str(tmp_path))
    assert (lineage.broken, len(lineage.groups)) == ("", 5)


def test_a_line_damaged_before_later_commits_is_told_and_not_taken_for_a_torn_tail(tmp_path: Path) -> None:
    segment = _filled(tmp_path)
    found = segment.read_bytes().splitlines(keepends=True)
    first = next(k for k, line in enumerate(found) if line.startswith(b'{"kind":"group"'))
    found[first] = found[first][:-9] + b"\n"  # the first of its commit
    segment.write_bytes(b"".join(found))
    assert f"entry {first} isn't whole" in Lineage(str(tmp_path)).broken
    with pytest.raises(ChainError, match="isn't whole"):
        LineageWriter(str(tmp_path), OPENED)


def test_a_commit_that_the_disk_refused_half_way_leaves_nothing_behind(tmp_path: Path) -> None:
    segment = _filled(tmp_path, commits=1)
    writer = LineageWriter(str(tmp_path), OPENED)
    whole = segment.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 1000, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            writer.commit([RunEntry(what="note", detail="x" * 4000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert segment.read_bytes() == whole
    writer.commit([RunEntry(what="note", detail="x" * 4000)])
    assert not Lineage(str(tmp_path)).broken


def test_a_commit_that_returned_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []

    def spy(handle: int, sync: Callable[[int], None] = os.fsync) -> None:
        synced.append(re.sub(r"\.[^./]+\.part$", "", str(Path(f"/proc/self/fd/{handle}").readlink())))
        sync(handle)

    monkeypatch.setattr(os, "fsync", spy)
    writer = LineageWriter(str(tmp_path / "record"), OPENED)
    for k in range(2):
        synced.clear()
        began = time.time_ns()
        group = scored_group(k)
        writer.commit([Seen("reward", group), Seen("advantage", batch_of_groups([group]))])
        changed = [p for p in (tmp_path / "record").rglob("*") if p.stat().st_mtime_ns >= began]
        # What zarr says of a group of arrays isn't needed to read them.
        groups = {p for p in changed if p.name == "zarr.json" and not (p.parent / "c").is_dir()}
        assert {str(p) for p in changed if p not in groups} <= {*synced}
        assert synced[-1].endswith(".jsonl")


def test_a_changed_byte_before_the_tail_is_no_torn_tail(tmp_path: Path) -> None:
    segment = _filled(tmp_path)
    data = bytearray(segment.read_bytes())
    at = data.index(b'"row":1')
    data[at + 6] = ord("9")
    segment.write_bytes(bytes(data))
    with pytest.raises(ChainError, match="doesn't follow"):
        LineageWriter(str(tmp_path), OPENED)
    assert "was changed" in Lineage(str(tmp_path)).broken


def test_a_long_chain_stands_in_segments(tmp_path: Path) -> None:
    chain = Chain(str(tmp_path))
    chain.commit([OPENED], Committed())
    for k in range(5):
        chain.commit([RunEntry(what=f"note {k}", detail="x" * (2 << 20))], Committed())
    assert len(list((tmp_path / "chain").iterdir())) == 3
    assert len(list(lines(str(tmp_path)))) == 12
    assert head_of(str(tmp_path)) == chain.anchor.head
    chain.release()
    assert Chain(str(tmp_path)).anchor == chain.anchor


def test_a_record_has_one_writer_at_a_time(tmp_path: Path) -> None:
    writer = LineageWriter(str(tmp_path), OPENED)
    with pytest.raises(ChainError, match="is being written to by another process"):
        Chain(str(tmp_path))
    assert main(["lineage", "redact", str(tmp_path), "--all"]) == 2
    writer.commit([Seen("reward", scored_group(0))])
    writer.close("finished")
    Chain(str(tmp_path))


def test_a_writer_notices_that_its_chain_was_written_to(tmp_path: Path) -> None:
    # A machine that was cut off and comes back: no lock reaches so far.
    writer = LineageWriter(str(tmp_path), OPENED)
    (segment,) = (tmp_path / "chain").iterdir()
    other = segment.read_bytes() * 2
    segment.write_bytes(other)
    with pytest.raises(ChainError, match="somebody else has written to this record"):
        writer.commit([Seen("reward", scored_group(0))])
    assert segment.read_bytes() == other


def test_a_place_without_a_record_is_named(tmp_path: Path) -> None:
    with pytest.raises(ChainError, match="holds no record; run with --record"):
        Lineage(str(tmp_path))


# --- kill -9 ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_leaves_every_commit_that_returned(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    told: list[str] = []
    for life in range(12):
        command = [sys.executable, "-m", "tests.lineage_runs", str(tmp_path / "record"), str(len(told))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1], text=True)
        assert process.stdout is not None
        first = process.stdout.readline().strip()
        time.sleep(float(rng.uniform(0, 0.15)))
        process.send_signal(signal.SIGKILL)
        told += [first, *process.stdout.read().split()]
        process.communicate()
        lineage = Lineage(str(tmp_path / "record"))
        assert not lineage.broken
        assert not lineage.twice
        missing = [name for name in told if name not in lineage.groups]
        assert not missing, f"life {life}"
        number = len(told) - 1
        assert encode(lineage.group(told[-1])) == encode(scored_group(number, size=3))
        told = sorted(lineage.groups, key=lambda name: int(name.split("-")[1].split(">")[0]))
