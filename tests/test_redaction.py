"""What is redacted is gone, the chain and all else can still be proven, and the audit says so."""

from __future__ import annotations

import json
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arriero.components.policy import load_tokenizer
from arriero.engine.lineage.reader import Lineage
from arriero.engine.lineage.writer import LineageWriter, Seen
from arriero.launchers.audit import audited
from arriero.launchers.cli import main
from arriero.launchers.rundir import RunDir
from arriero.schemas.ledger import Admitted, Resumed
from arriero.schemas.messages import ScoredGroup
from tests.inline_runs import recorded_grpo, tiny_model
from tests.lineage_runs import OPENED, overwrite, recorded_run, scored_group


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return recorded_run(tmp_path_factory.mktemp("honest") / "run")


@pytest.fixture
def run(honest: RunDir, tmp_path: Path) -> RunDir:
    shutil.copytree(honest.path, tmp_path / "run")
    return RunDir(tmp_path / "run")


def test_a_redacted_prompt_is_gone_and_everything_else_still_proven(
    honest: RunDir, run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    before = Lineage(str(run.path))
    (name,) = [k for k, g in before.groups.items() if g.prompt.row == 3 and g.prompt.split == "train"]
    step = next(s for s in before.steps if name in before.batches[s.batch].groups)
    assert main(["lineage", "redact", str(run.path), "--row", "3", "--reason", "asked to"]) == 0
    assert "redacted 1 groups" in capsys.readouterr().out

    after = Lineage(str(run.path))
    assert isinstance(group := after.group(name), ScoredGroup)
    assert {group.group.prompt.text, *(r.text for r in group.group.rollouts)} == {""}
    entry = after.groups[name]
    arrays = after.arrays(entry)
    assert not arrays["tokens"].any()
    assert np.nan_to_num(arrays["logprobs"]).any() == np.False_
    assert not any(after.text(entry.text))
    assert entry == before.groups[name]
    assert after.trained_batch(step).samples  # its shape, rewards and advantages are left
    other = after.text(after.groups[next(k for k in after.groups if k != name)].text)
    assert b"2 + 2" in other or b"1 + 3" in other

    report = audited(str(run.path))
    assert report.findings == []
    assert "1 REDACTED: asked to" in report.done["content"]
    assert report.left == ["rewards of reward: 1 groups are redacted"]
    assert report.done["advantages of advantage"] == "4 batches computed again"
    assert report.done["rewards of reward"] == "57 computed again"
    kept = honest.read_summary().lineage
    assert kept is not None
    assert report.head != kept.head
    assert audited(str(run.path), head=kept.head).findings == []


def test_redaction_is_no_cover_for_another_change(run: RunDir) -> None:
    assert main(["lineage", "redact", str(run.path), "--row", "3"]) == 0
    record = Lineage(str(run.path))
    gone = next(k for k in record.groups if k in record.redacted)
    entry = record.groups[gone]
    arrays = record.arrays(entry)
    for name, value, what in (
        ("versions", 3, "its mask or versions were changed"),
        ("tokens", 5, "is said to be redacted, and some of its content is there"),
    ):
        values = arrays[name].copy()
        values[1] = value
        overwrite(str(run.lineage), "rollouts", entry.arrays, {name: values})
        assert what in [f.what for f in audited(str(run.path)).findings if f.check == "content"]
        overwrite(str(run.lineage), "rollouts", entry.arrays, {name: arrays[name]})
    assert audited(str(run.path)).findings == []


def test_everything_can_be_redacted_and_done_twice_changes_nothing(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert main(["lineage", "redact", str(run.path), "--all"]) == 0
    first, second = [
        line.rpartition(" ")[2] for line in capsys.readouterr().out.splitlines() if "now" in line
    ]
    assert first == second
    report = audited(str(run.path))
    assert report.findings == []
    assert "20 REDACTED" in report.done["content"]
    for file in (run.lineage / "rollouts" / "text").rglob("c/*"):
        assert b"2 + 2" not in file.read_bytes()


def test_supervised_text_goes_from_records_and_batches(tmp_path: Path) -> None:
    data, path = tmp_path / "sums.jsonl", tmp_path / "run"
    data.write_text("".join(f'{{"prompt": "{k}+1=", "response": "{k + 1}"}}\n' for k in range(4)))
    words = ["run", "sft", "--model", tiny_model(tmp_path / "tiny"), "--data", str(data), "--steps", "2"]
    words += ["--examples-per-step", "2", "--inline", "--quiet", "--run-dir", str(path)]
    assert main(words) == 0
    before = Lineage(str(path))
    secret = {k for k, r in before.records.items() if b'"prompt":"2+1="' in before.text(r.text)}
    assert main(["lineage", "redact", str(path), "--row", "2"]) == 0
    after = Lineage(str(path))
    assert {k for k, r in after.records.items() if not any(after.text(r.text))} == secret
    trained = [s for b in after.batches for s in after.batch(b).samples]
    assert {s.group for s in trained} & secret
    assert all(s.tokens.any() == (s.group not in secret) for s in trained)
    assert audited(str(path)).findings == []


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (["kto", "--examples-per-step", "4"], {"response": "{k}{k}{k}", "label": True}),
        (["kto", "--examples-per-step", "4"], {"chosen": "{k}{k}{k}", "rejected": "9"}),
        (["dpo", "--pairs-per-step", "4"], {"chosen": "{k}{k}{k}", "rejected": "9"}),
    ],
)
def test_a_judged_response_goes_with_its_row_also_from_beside_other_prompts(
    words: list[str], fields: dict[str, object], tmp_path: Path
) -> None:
    data, path = tmp_path / "judged.jsonl", tmp_path / "run"
    rows = [
        {"prompt": f"{k}+1=", **{f: v.format(k=k) if isinstance(v, str) else v for f, v in fields.items()}}
        for k in range(4)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["run", *words, "--model", tiny_model(tmp_path / "tiny"), "--data", str(data), "--steps", "2"]
    assert main([*command, "--inline", "--quiet", "--run-dir", str(path)]) == 0
    tokenizer: Any = load_tokenizer(tmp_path / "tiny")
    ids: list[int] = tokenizer.encode("222", add_special_tokens=False)

    def told() -> int:
        """Samples with the response of row 2 in them."""
        record = Lineage(str(path))
        samples = [s for b in record.batches for s in record.batch(b).samples]
        return sum(s.tokens[s.mask][: len(ids)].tolist() == ids for s in samples)

    assert told() >= 2
    assert main(["lineage", "redact", str(path), "--row", "2"]) == 0
    assert told() == 0
    assert audited(str(path)).findings == []


def test_a_trained_policy_is_audited_after_redaction_of_a_group(tmp_path: Path) -> None:
    run = recorded_grpo(tmp_path)
    name = next(iter(Lineage(str(run.path)).groups))
    assert main(["lineage", "redact", str(run.path), "--group", name]) == 0
    assert audited(str(run.path)).findings == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "say what to redact"),
        (["--row", "3", "--all"], "say what to redact"),
        (["--row", "999"], "no row 999 is on record"),
        (["--prompt", "x"], "no prompt x is on record"),
        (["--rows", "1"], "unknown option --rows"),
    ],
)
def test_a_redaction_of_nothing_is_refused(
    run: RunDir, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    head = Lineage(str(run.path)).anchor
    assert main(["lineage", "redact", str(run.path), *words]) == 2
    assert said in capsys.readouterr().err
    assert Lineage(str(run.path)).anchor == head


SECRET = "a secret that nobody may keep"


def _spoken(number: int, words: str, *, size: int = 2) -> ScoredGroup:
    scored = scored_group(number, size=size)
    rollouts = tuple(r.model_copy(update={"text": words}) for r in scored.group.rollouts)
    return scored.model_copy(update={"group": scored.group.model_copy(update={"rollouts": rollouts})})


def _kept(folder: Path) -> bytes:
    """All that the record's arrays hold, unpacked."""
    zstd: Any = import_module("numcodecs.zstd")
    chunks = [p for p in (folder / "rollouts").rglob("*") if p.is_file() and not p.name.startswith("zarr")]
    return b"".join(bytes(zstd.Zstd().decode(p.read_bytes())) for p in chunks)


def test_what_was_made_anew_after_a_crash_is_redacted_too(tmp_path: Path) -> None:
    writer = LineageWriter(str(tmp_path), OPENED)
    admitted = Admitted(id="p-0", origin=0, split="train", epoch=0, row=0, min_version=0)
    writer.commit([admitted, Seen("reward", _spoken(0, SECRET))])
    writer.commit([Resumed(number=1, versions={"trainer": 0})])
    writer.commit([Seen("reward", _spoken(0, "another answer"))])
    writer.close("finished")
    assert SECRET.encode() in _kept(tmp_path)
    assert main(["lineage", "redact", str(tmp_path), "--row", "0"]) == 0
    assert SECRET.encode() not in _kept(tmp_path)
    assert b"another answer" not in _kept(tmp_path)


@pytest.mark.parametrize("how", ["reopened", "redacted"])
def test_what_an_unfinished_commit_left_behind_is_removed(tmp_path: Path, how: str) -> None:
    writer = LineageWriter(str(tmp_path), OPENED)
    admitted = Admitted(id="p-0", origin=0, split="train", epoch=0, row=0, min_version=0)
    writer.commit([admitted, Seen("reward", scored_group(0))])
    (segment,) = (tmp_path / "chain").iterdir()
    whole = segment.read_bytes()
    writer.commit([Seen("reward", _spoken(1, SECRET * 1000))])  # in parts of their own
    segment.write_bytes(whole)  # killed before the chain had it
    del writer
    (tmp_path / "rollouts" / "text" / "0" / "bytes" / "c" / "9.part").write_bytes(SECRET.encode())
    if how == "reopened":
        LineageWriter(str(tmp_path), OPENED)
    else:
        assert main(["lineage", "redact", str(tmp_path), "--all"]) == 0
    assert SECRET.encode() not in _kept(tmp_path)
    assert (scored_group(0).group.rollouts[0].text.encode() in _kept(tmp_path)) == (how == "reopened")


def test_redaction_writes_each_chunk_once(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    replace = Path.replace

    def counted(self: Path, target: Path) -> Path:
        written.append(str(target))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", counted)
    assert main(["lineage", "redact", str(run.path), "--all"]) == 0
    chunks = [p for p in written if "/c/" in p]
    assert len(chunks) == len({*chunks}) > 0
