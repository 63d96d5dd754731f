"""Questions to a record, in both directions; the manifest's hashes; runs listed and compared."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from arriero.engine.errors import UserError
from arriero.engine.lineage.index import Index
from arriero.engine.lineage.queries import Questions
from arriero.engine.lineage.views import NAMES
from arriero.engine.lineage.writer import Item, LineageWriter, Seen
from arriero.launchers.cli import main
from arriero.launchers.inputs import input_files, package_sha256
from arriero.launchers.rundir import RunDir
from arriero.launchers.runs import differences, first_difference, read
from arriero.schemas.graph import GraphSpec, NodeSpec
from arriero.schemas.ledger import Restarted, Resumed, Trained
from arriero.schemas.lineage import RunEntry
from arriero.schemas.manifest import ContentHashes
from arriero.schemas.messages import Weights
from tests.lineage_runs import OPENED, batch_of_groups, recorded_run, scored_group


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return recorded_run(tmp_path_factory.mktemp("asked") / "run")


@pytest.fixture(scope="module")
def ask(run: RunDir) -> Questions:
    return Questions(Index(str(run.path)))


def test_a_step_names_what_it_was_made_from(ask: Questions) -> None:
    answer = ask.step(2)
    assert [(s.version, s.before, s.after) for s in answer.steps] == [
        (2, answer.steps[0].before, answer.steps[0].after)
    ]
    assert len(answer.rollouts) == 12
    assert sorted(p.row for p in answer.prompts) == sorted({r.row for r in answer.rollouts})
    assert {p.became for p in answer.prompts} == {"trained in 2"}
    right = [r for r in answer.rollouts if r.outcome == "ok"]
    assert {r.reward for r in right} == {1.0}


def test_every_direction_leads_back(ask: Questions) -> None:
    for rollout in ask.step(3).rollouts:
        assert [s.version for s in ask.rollout(rollout.id).steps] == [3]
        assert rollout.id in [r.id for r in ask.prompt(rollout.prompt).rollouts]
        assert rollout.id in [r.id for r in ask.row(rollout.row).rollouts]
    after = ask.step(3).steps[0].after
    assert ask.step(4).steps[0].before == after


def test_a_held_out_prompt_went_into_no_step(ask: Questions) -> None:
    answer = ask.prompt("held-0@0")
    assert answer.steps == []
    assert [p.became for p in answer.prompts] == ["evaluated"]


@pytest.mark.parametrize(
    ("question", "said"),
    [
        (["--step", "99"], "no step 99 is recorded; there are 1 to 4"),
        (["--rollout", "nobody/0"], "no rollout or group 'nobody/0' is recorded"),
        (["--prompt", "nobody"], "no prompt nobody was admitted"),
        (["--weights", "ffffffff"], "no version 'ffffffff' is recorded"),
        (["--step", "two"], "--step takes a number, not 'two'"),
        (["--sql", "select x from steps"], "the tables are steps, rollouts"),
        (["--sql", "select 1", "--step", "1"], "one question at a time"),
        (["--stp", "1"], "unknown option --stp"),
        (["--step", "1", "--step", "2"], "--step is given twice"),
        (["--step", "1", "--limit", "-1"], "--limit takes a number from 1 on"),
        (["--step", "1", "--picture", "/nowhere/x.svg"], "there is no directory /nowhere"),
    ],
)
def test_a_question_without_an_answer_says_what_there_is(
    run: RunDir, capsys: pytest.CaptureFixture[str], question: list[str], said: str
) -> None:
    assert main(["lineage", str(run.path), *question]) == 2
    assert said in capsys.readouterr().err


def test_a_directory_without_a_record_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("lineage", "audit"):
        assert main([command, str(tmp_path)]) == 2
        assert "holds no record" in capsys.readouterr().err


def test_the_command_shows_tables_json_and_pictures(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lineage", str(run.path)]) == 0
    assert "steps     4, versions 1 to 4" in capsys.readouterr().out
    assert main(["lineage", str(run.path), "--step", "1"]) == 0
    assert "rollouts: 12" in capsys.readouterr().out
    assert main(["lineage", str(run.path), "--step", "1", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rollouts"]) == 12
    for name, mark in (("x.mmd", "flowchart LR"), ("x.svg", "<svg")):
        assert main(["lineage", str(run.path), "--step", "1", "--picture", str(tmp_path / name)]) == 0
        assert mark in (tmp_path / name).read_text()


def test_sql_and_arrow_give_the_same_rows(run: RunDir) -> None:
    index = Index(str(run.path))
    for name in NAMES:
        (found,) = index.sql(f"select count(*) as n from {name}").to_pylist()
        assert found["n"] == index.table(name).num_rows > -(name == "events")  # nothing has happened to it
    joined = (
        "select version, avg(r.reward) from samples s join rollouts r on rollout = r.id group by 1 order by 1"
    )
    assert [row["version"] for row in index.sql(joined).to_pylist()] == [1, 2, 3, 4]


def test_a_query_reads_the_tables_and_touches_no_other_file(run: RunDir, tmp_path: Path) -> None:
    index, other = Index(str(run.path)), tmp_path / "other.csv"
    other.write_text("a\n1\n")
    for query in (
        f"copy (select 1) to '{tmp_path / 'written.csv'}'", f"select * from read_csv('{other}')",
        f"attach '{tmp_path / 'x.db'}'", "set enable_external_access = true",
        f"select * from glob('{tmp_path}/*')",
    ):  # fmt: skip
        with pytest.raises(UserError):
            index.sql(query)
    assert [p.name for p in tmp_path.iterdir()] == ["other.csv"]


def test_a_rollout_that_several_nodes_passed_on_is_one_row_with_the_last_reward(tmp_path: Path) -> None:
    scored = scored_group(0)
    less = tuple(s.model_copy(update={"value": s.value - 0.25}) for s in scored.scores)
    short = scored.stamped(id=f"{scored.id}>overlong", parents=(scored.id,), origins=scored.origins)
    short = short.model_copy(update={"scores": less})
    batch = batch_of_groups([short])
    trained = Trained(
        node="trainer", version=1, batch=batch.id, origins=(0,), tokens=1, staleness_max=0, staleness_mean=0,
        reward_mean=0.25,
    )  # fmt: skip
    writer = LineageWriter(str(tmp_path), OPENED)
    writer.commit(
        [Seen("rollouts", scored.group), Seen("reward", scored), Seen("overlong", short),
         Seen("advantage", batch), trained]
    )  # fmt: skip
    answer = Questions(Index(str(tmp_path))).step(1)
    assert [(r.id, r.reward) for r in answer.rollouts] == [
        (f"{scored.group.id}/0", 0.75), (f"{scored.group.id}/1", -0.25),
    ]  # fmt: skip
    assert Index(str(tmp_path)).overview.rollouts == 2


def test_the_weights_before_and_after_a_step_are_those_of_its_own_loop(tmp_path: Path) -> None:
    writer = LineageWriter(str(tmp_path), OPENED)
    for loop, mark in (("policy", "a"), ("critic", "b")):
        items: list[Item] = []
        for version in (0, 1):
            parents = (f"batch-{loop}",) if version else ()
            items.append(Seen(loop, Weights(id=f"{loop}-{version}", parents=parents, version=version)))
        trained = Trained(
            node=mark, version=1, batch=f"batch-{loop}", origins=(), tokens=0, staleness_max=0,
            staleness_mean=0, reward_mean=0,
        )  # fmt: skip
        writer.commit([*items, trained])
    assert [(s.node, s.before, s.after) for s in Questions(Index(str(tmp_path))).step(1).steps] == [
        ("a", "policy-0", "policy-1"), ("b", "critic-0", "critic-1"),
    ]  # fmt: skip


def test_a_damaged_record_says_so_before_anything_else(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run.path, tmp_path / "run")
    (segment,) = (tmp_path / "run" / "lineage" / "chain").iterdir()
    segment.write_bytes(segment.read_bytes().replace(b'"row":1', b'"row":9', 1))
    assert main(["lineage", str(tmp_path / "run")]) == 0
    assert "DAMAGED" in capsys.readouterr().out


def test_json_is_json_whatever_a_query_gives(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    query = "select 'nan'::double as a, 'inf'::double as b"
    assert main(["lineage", str(run.path), "--json", "--sql", query]) == 0
    assert json.loads(capsys.readouterr().out) == [{"a": None, "b": None}]
    assert main(["lineage", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 4


def test_a_redacted_rollout_is_said_to_be_so(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run.path, tmp_path / "run")
    (tmp_path / "run" / "report.html").write_text("2 + 2")
    assert main(["lineage", "redact", str(tmp_path / "run"), "--all"]) == 0
    assert "report.html" in capsys.readouterr().out
    assert main(["lineage", str(tmp_path / "run"), "--step", "1", "--text", "--limit", "1"]) == 0
    assert capsys.readouterr().out.endswith("/0\n  redacted\n")


def test_restarts_and_how_a_run_failed_are_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = LineageWriter(str(tmp_path), OPENED)
    writer.commit([Restarted(name="generator-0", number=1, why="SIGKILL")])
    writer.commit(
        [Resumed(number=1, versions={"trainer": 4}, why="preempted"), RunEntry(what="failed", detail="x")]
    )
    writer.close("failed")
    about = Index(str(tmp_path)).sql("select kind, name, number, detail from events")
    assert about.to_pylist() == [
        {"kind": "restarted", "name": "generator-0", "number": 1, "detail": "SIGKILL"},
        {"kind": "resumed", "name": "", "number": 1, "detail": "trainer from version 4; preempted"},
        {"kind": "failed", "name": "", "number": 0, "detail": "x"},
    ]
    assert main(["lineage", str(tmp_path)]) == 0
    assert "1 restarts of a process, 1 of the whole run" in capsys.readouterr().out


# --- runs -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        recorded_run(place / f"run-{seed}", seed=seed)
    return place


def test_runs_are_listed_and_filtered(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(folder), "--json"]) == 0
    assert [r["state"] for r in json.loads(capsys.readouterr().out)] == ["finished", "finished"]
    assert main(["runs", str(folder), "--where", "optimizer.lr=2e-1", "--json"]) == 0
    (only,) = json.loads(capsys.readouterr().out)
    assert only["run"].endswith("run-1")
    assert main(["runs", str(folder), "--where", "optimizer.lr=7"]) == 0
    assert "no such run" in capsys.readouterr().out


def test_a_run_that_cannot_be_read_does_not_hide_the_others(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder, tmp_path / "runs")
    (tmp_path / "runs" / "run-0" / "summary.json").write_text("garbage")
    assert main(["runs", str(tmp_path / "runs")]) == 0
    shown = capsys.readouterr().out
    assert "run-1" in shown
    assert f"left out: {tmp_path / 'runs' / 'run-0'}: " in shown


def test_two_runs_are_compared(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (read(folder / f"run-{k}") for k in (0, 1))
    assert differences(a, b) == {"seed": (0, 1), "optimizer.lr": (0.1, 0.2)}
    picture = tmp_path / "curves.svg"
    assert main(["runs", str(a.path), str(b.path), "--picture", str(picture)]) == 0
    assert "optimizer.lr" in capsys.readouterr().out
    assert "<svg" in picture.read_text()


def test_a_reward_whose_file_has_changed_is_a_difference(folder: Path) -> None:
    a = read(folder / "run-0")
    before, after = (ContentHashes(rewards={"reward": digest}) for digest in ("0" * 16, "1" * 16))
    old, new = (replace(a, manifest=a.manifest.model_copy(update={"content": c})) for c in (before, after))
    assert differences(old, old) == {}
    assert differences(old, new) == {"rewards.reward": ("0" * 16, "1" * 16)}


def test_the_first_step_that_differs_is_found(folder: Path) -> None:
    a, b = (read(folder / f"run-{k}") for k in (0, 0))
    assert first_difference(a, b) is None
    b.steps[3]["loss"] = 7.0
    assert first_difference(a, b) == (3, {"loss": (a.steps[3]["loss"], 7.0)})


# --- the manifest -----------------------------------------------------------------------------------------


def test_the_files_that_a_configuration_names_are_hashed(tmp_path: Path) -> None:
    data, model = tmp_path / "data.jsonl", tmp_path / "model"
    data.write_text("{}\n")
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    node = NodeSpec(
        name="source", component="x:Y", role="source", output="x:Z",
        config={"data": {"$type": "x:D", "path": str(data)}, "model": str(model), "text": "dog"},
    )  # fmt: skip
    found = input_files(GraphSpec(name="g", nodes=(node,)))
    # printf '{}\n' | sha256sum; printf '{}' | sha256sum
    assert {(f.key, f.sha256) for f in found} == {
        ("source.data.path", "ca3d163bab055381827226140568f3bef7eaac187cebd76878e0b63e9e442356"),
        ("source.model", "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"),
    }


def test_the_hash_of_the_package_is_that_of_its_files() -> None:
    assert package_sha256() == package_sha256()
    assert len(package_sha256()) == 64
