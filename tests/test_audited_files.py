"""What lies beside a record is audited too: files that went, were swapped, or tell something prettier."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from arriero.engine.lineage.chain import GENESIS, Chain, head_of, link
from arriero.engine.lineage.index import Index
from arriero.engine.lineage.reader import Lineage
from arriero.launchers.audit import audited
from arriero.launchers.cli import main
from arriero.launchers.rundir import RunDir, write_json
from arriero.launchers.stamping import model_sha256, stamp
from arriero.schemas.ledger import Evaluated
from arriero.schemas.lineage import (
    BatchEntry,
    Closed,
    Committed,
    Entry,
    GroupEntry,
    Noted,
    Reopened,
    WeightsEntry,
)
from arriero.schemas.manifest import CodeRevision, ContentHashes
from arriero.schemas.messages import Outcome
from tests.inline_runs import recorded_grpo
from tests.lineage_forging import rechained
from tests.lineage_runs import recorded_run


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return recorded_run(tmp_path_factory.mktemp("honest") / "run")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return recorded_grpo(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def run(honest: RunDir, tmp_path: Path) -> RunDir:
    shutil.copytree(honest.path, tmp_path / "run")
    return RunDir(tmp_path / "run")


def found(run: RunDir) -> set[tuple[str, str]]:
    return {(f.check, f.where) for f in audited(str(run.path)).findings}


@pytest.mark.parametrize(
    "name", ["graph.json", "manifest.json", "options.json", "ledger.jsonl", "metrics.jsonl", "summary.json"]
)
@pytest.mark.parametrize("left", [None, b"\xff\x00no json"])
def test_a_file_that_is_gone_or_garbage_is_a_finding_among_the_others(
    run: RunDir, name: str, left: bytes | None
) -> None:
    (run.path / name).unlink()
    if left is not None:
        (run.path / name).write_bytes(left)
    report = audited(str(run.path))
    assert ("files", name) in {(f.check, f.where) for f in report.findings}
    assert report.done["content"] == "60 rollouts"


@pytest.mark.parametrize("key", ["reward", "loss", "staleness_max", "tokens"])
def test_a_prettier_line_of_metrics_is_found(run: RunDir, key: str) -> None:
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    lines[2][key] = 7
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (finding,) = audited(str(run.path)).findings
    assert (finding.where, finding.what) == ("metrics.jsonl", f"step 3 has another {key} than on record")


def test_a_line_of_metrics_taken_out_is_found(run: RunDir) -> None:
    run.metrics.write_text("".join(run.metrics.read_text().splitlines(keepends=True)[1:]))
    assert found(run) == {("files", "metrics.jsonl")}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("reward_last", 0.975),
        ("accuracy_after", 1.0),
        ("groups_trained", 99),
        ("state", "stopped"),
        ("steps", 5),
    ],
)
def test_a_prettier_summary_is_found(run: RunDir, key: str, value: object) -> None:
    write_json(run.summary, run.read_summary().model_copy(update={key: value}))
    assert found(run) == {("files", "summary.json")}


def test_a_summary_that_names_no_head_any_more_is_found(run: RunDir) -> None:
    write_json(run.summary, run.read_summary().model_copy(update={"lineage": None}))
    assert found(run) == {("chain", "summary.json")}


# --- the model --------------------------------------------------------------------------------------------


def _swapped(model: Path) -> None:
    data = bytearray((model / "model.safetensors").read_bytes())
    data[-100:] = bytes(100)  # the head in front still names the record
    (model / "model.safetensors").write_bytes(bytes(data))


def _gone(model: Path) -> None:
    (model / "model.safetensors").unlink()


def _garbage(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"garbage")


def _another(model: Path) -> None:
    shutil.copyfile(model / "model.safetensors", model / "adapter.safetensors")


def _config(model: Path) -> None:
    (model / "config.json").write_text("{}")


@pytest.mark.parametrize("change", [_swapped, _gone, _garbage, _another, _config])
def test_a_model_that_the_run_did_not_leave_is_found(
    trained: RunDir, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    shutil.copytree(trained.path, tmp_path / "run")
    run = RunDir(tmp_path / "run")
    assert found(run) == set()
    change(run.model)
    ((check, where),) = found(run)
    assert (check, where.partition("/")[0]) == ("files", "model")


def test_the_hash_of_a_model_is_the_same_before_and_after_it_names_its_record(
    trained: RunDir, tmp_path: Path
) -> None:
    shutil.copytree(trained.model, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    head = head_of(str(trained.lineage)).encode()
    file.write_bytes(file.read_bytes().replace(head, b"0" * 64, 1))
    before = model_sha256(tmp_path / "model")
    stamp(tmp_path / "model", "a" * 64)
    assert model_sha256(tmp_path / "model") == before == model_sha256(trained.model)


def test_a_model_of_which_the_record_names_no_file_and_changes_that_cannot_be_read_are_not_checked(
    run: RunDir,
) -> None:
    run.model.mkdir()
    (run.model / "model.safetensors").write_bytes(b"of somebody")
    code = CodeRevision(root="/somewhere/mine", commit="0" * 40, dirty=True, diff_sha256="1" * 64)
    write_json(run.manifest, run.read_manifest().model_copy(update={"code": (code,)}))
    assert audited(str(run.path)).left == [
        "code-mine.diff: it isn't there to be read", "model: the record names no hash of its files"
    ]  # fmt: skip


# --- hashed anew ------------------------------------------------------------------------------------------


def test_a_held_out_prompt_that_is_said_to_be_answered_right_is_found(run: RunDir) -> None:
    def change(entries: list[Entry]) -> list[Entry]:
        for k, e in enumerate(entries):
            if isinstance(e, Noted) and isinstance(e.event, Evaluated):
                right = {"values": (1.0,) * 3, "outcomes": (Outcome.OK,) * 3}
                entries[k] = Noted(event=e.event.model_copy(update=right))
        return entries

    rechained(run, change)
    assert "held out" in {check for check, _ in found(run)}


def test_a_held_out_group_taken_out_is_found(run: RunDir) -> None:
    rechained(run, lambda es: [e for e in es if not (isinstance(e, GroupEntry) and e.prompt.split == "eval")])
    assert "held out" in {check for check, _ in found(run)}


def test_a_last_version_left_out_is_found(run: RunDir) -> None:
    rechained(run, lambda es: [e for e in es if not (isinstance(e, WeightsEntry) and e.version == 4)])
    assert "weights" in {check for check, _ in found(run)}


def test_a_batch_taken_out_is_found(run: RunDir) -> None:
    def change(entries: list[Entry]) -> list[Entry]:
        first = next(k for k, e in enumerate(entries) if isinstance(e, BatchEntry))
        return entries[:first] + entries[first + 1 :]

    rechained(run, change)
    assert "steps" in {check for check, _ in found(run)}


def _scores(run: RunDir, **fields: object) -> None:
    def change(entries: list[Entry]) -> list[Entry]:
        for k, e in enumerate(entries):
            if isinstance(e, GroupEntry) and e.scores:
                entries[k] = e.model_copy(update={"scores": e.scores.model_copy(update=fields)})
        return entries

    rechained(run, change)


def test_scores_of_a_reward_that_the_manifest_does_not_name_are_found(run: RunDir) -> None:
    # Else a reward could be hidden from being computed again by naming another version of it.
    groups = Lineage(str(run.path)).groups.values()
    (version,) = {g.scores.reward_version for g in groups if g.scores}
    content = ContentHashes(rewards={"reward": version})
    write_json(run.manifest, run.read_manifest().model_copy(update={"content": content}))
    assert found(run) == {("files", "manifest.json")}
    _scores(run, reward_version="f" * 16)
    assert {where for check, where in found(run) if check == "files"} > {"manifest.json"}


def test_a_group_said_to_be_of_a_run_that_the_manifest_does_not_name_is_found(run: RunDir) -> None:
    def change(entries: list[Entry]) -> list[Entry]:
        return [
            e.model_copy(update={"recorded": "elsewhere:g"}) if isinstance(e, GroupEntry) else e
            for e in entries
        ]

    rechained(run, change)
    assert "inherited" in {check for check, _ in found(run)}


def test_a_reward_without_a_verdict_counts_as_nothing(run: RunDir) -> None:
    _scores(run, outcomes=(Outcome.ERROR,) * 3, values=(1.0,) * 3)
    assert "rewards of reward" in {check for check, _ in found(run)}


@pytest.mark.parametrize("space", ["text", "rollouts", "advantages"])
def test_a_damaged_chunk_is_a_finding(run: RunDir, space: str) -> None:
    for chunk in (run.lineage / "rollouts" / space).glob("*/*/c/1"):
        chunk.write_bytes(b"garbage")
    report = audited(str(run.path))
    assert {f.check for f in report.findings} & {"content", "steps"}


def test_tables_for_questions_that_say_something_prettier_are_found(run: RunDir) -> None:
    parquet: Any = import_module("pyarrow.parquet")
    folder = run.lineage / "index"
    file, about = folder / f"{0:012d}.rollouts.parquet", folder / f"{0:012d}.json"
    assert audited(str(run.path)).findings == []
    made: Any = parquet.read_table(file)  # its signatures are partly unknown
    arrow: Any = import_module("pyarrow")
    column = made.column_names.index("reward")
    ones = arrow.array([1.0] * made.num_rows, made.schema.field("reward").type)
    before = hashlib.sha256(file.read_bytes()).hexdigest()
    parquet.write_table(made.set_column(column, made.schema.field("reward"), ones), file)
    after = hashlib.sha256(file.read_bytes()).hexdigest()
    about.write_text(about.read_text().replace(before, after))
    (said,) = Index(str(run.path)).sql("select min(reward) as least from rollouts").to_pylist()
    assert said == {"least": 1.0}
    assert found(run) == {("index", f"index/{0:012d}.rollouts.parquet")}


def test_an_index_that_hides_what_is_broken_is_found(run: RunDir) -> None:
    about = run.lineage / "index" / f"{0:012d}.json"
    about.write_text(about.read_text().replace('"state": "finished"', '"state": "failed"'))
    assert Index(str(run.path)).overview.state == "failed"
    assert found(run) == {("index", f"index/{0:012d}.json")}


def test_a_ledger_file_ahead_of_a_record_that_was_killed_is_no_forgery(run: RunDir) -> None:
    rechained(run, lambda es: es[:-2])
    with run.ledger.open("a") as file:
        file.write(run.ledger.read_text().splitlines()[0] + "\n")
    assert ("files", "ledger.jsonl") not in found(run)


def test_a_record_whose_components_are_no_more_is_audited_without_them(run: RunDir) -> None:
    text = run.graph.read_text()
    assert "tests.lineage_runs:Talker" in text
    run.graph.write_text(text.replace("tests.lineage_runs:Talker", "tests.lineage_runs:Gone"))
    report = audited(str(run.path))
    assert {(f.check, f.where) for f in report.findings} == {("files", "graph.json")}
    assert report.left[0].startswith("texts, rewards, advantages and health: ")
    assert report.done["tokens"]


# --- behind the end ---------------------------------------------------------------------------------------


def _appended(run: RunDir, *entries: Entry) -> str:
    """More entries behind the end of the chain, rightly hashed; the head before them."""
    before = head_of(str(run.lineage))
    end = Committed(ends=Chain(str(run.lineage)).last.ends)  # type: ignore[union-attr]  # it is closed
    Chain(str(run.lineage)).commit([*entries, end, Closed(state="finished")], end)
    return before


def test_a_configuration_exchanged_behind_the_end_is_found_though_the_old_head_is_known(run: RunDir) -> None:
    run.manifest.write_text(run.manifest.read_text().replace('"seed": 0', '"seed": 1'))
    first = Lineage(str(run.path)).opened
    assert first is not None
    digest = hashlib.sha256(run.manifest.read_bytes()).hexdigest()
    again = Reopened(
        cut_bytes=0, graph_digest=first.graph_digest, manifest_sha256=digest,
        options_sha256=first.options_sha256,
    )  # fmt: skip
    head = _appended(run, again)
    report = audited(str(run.path), head=head)
    assert "reopened" in [f.where.partition("(")[2][:8] for f in report.findings if f.check == "chain"]
    assert f"head {head[:12]} isn't the last one" in report.left[0]


def test_other_weights_of_a_version_that_was_there_are_found(run: RunDir) -> None:
    old = Lineage(str(run.path)).weights[-1]
    _appended(run, Reopened(cut_bytes=0), old.model_copy(update={"fingerprint": "e" * 32}))
    assert [f.where for f in audited(str(run.path)).findings if "twice" in f.what] == [
        f"version 4 of weights, with weights {old.fingerprint[:12]} and {'e' * 12},"
    ]


@pytest.mark.parametrize("head", ["", "6c0e9372f74e", "A" * 64])
def test_a_head_that_is_none_is_refused(run: RunDir, head: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(run.path), "--head", head]) == 2
    assert main(["audit", str(run.path), f"--head={head}"]) == 2
    assert "a head has 64 of the digits" in capsys.readouterr().err


def test_an_entry_of_another_format_is_named(run: RunDir) -> None:
    (segment,) = (run.lineage / "chain").iterdir()
    segment.write_bytes(segment.read_bytes().replace(b'"format":3', b'"format":2', 1))
    (finding,) = [f for f in audited(str(run.path)).findings if f.where == "chain"]
    assert (
        finding.what.startswith("entry 0 was changed") or "entry 0 is none that this arriero" in finding.what
    )


def test_a_record_of_an_older_format_is_said_to_be_one(tmp_path: Path) -> None:
    body = b'{"kind":"opened","format":2,"run_id":"r","graph_digest":""}'
    after = b'{"kind":"committed","ends":{}}'
    first = link(GENESIS, body)
    (tmp_path / "chain").mkdir()
    (tmp_path / "chain" / f"{0:012d}.jsonl").write_bytes(
        b"".join(
            text[:-1] + b',"hash":"' + head.encode() + b'"}\n'
            for text, head in ((body, first), (after, link(first, after)))
        )
    )
    told = "entry 0 is none that this arriero reads: the record has format 2, not 3"
    assert Lineage(str(tmp_path)).broken == told


def test_a_record_kept_elsewhere_is_found_from_its_run_directory(honest: RunDir, tmp_path: Path) -> None:
    shutil.copytree(honest.path, tmp_path / "run")
    run = RunDir(tmp_path / "run")
    options = run.read_options().model_copy(update={"record_url": str(tmp_path / "elsewhere")})
    run.lineage.rename(tmp_path / "elsewhere")
    write_json(run.options, options)
    assert found(run) == {("files", "options.json")}  # the only thing that was changed
    assert main(["lineage", str(run.path), "--step", "2"]) == 0
