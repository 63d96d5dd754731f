"""A run in the forms of other programs, each read back by the program's own library."""

from __future__ import annotations

import json
import os
import pkgutil
import shutil
import subprocess
import sys
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints
from uuid import NAMESPACE_URL, uuid5

import pytest

from arriero.launchers.cli import main
from arriero.launchers.exports.command import FORMATS
from arriero.launchers.exports.subject import subject
from arriero.launchers.rundir import RunDir, write_json
from arriero.schemas.lineage import RunState
from arriero.schemas.manifest import Ancestor, CodeRevision
from tests.inline_runs import recorded_grpo


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return recorded_grpo(tmp_path_factory.mktemp("exported"))


def exported(run: RunDir, kind: str, out: Path) -> Path:
    assert main(["export", str(run.path), "--to", kind, "--out", str(out)]) == 0
    return out


def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON schema of a class of the client, which is generated from the specification: names and types.

    The client leaves out what is None, and keeps no key beside those of its classes.
    """
    attr: Any = import_module("attr")
    hints = get_type_hints(kind)
    fields = list(attr.fields(kind))
    return {
        "type": "object",
        "properties": {
            f.name: {} if f.name.endswith("acets") else schema_of_type(hints[f.name]) for f in fields
        },
        "required": [f.name for f in fields if f.default is attr.NOTHING],
        "additionalProperties": False,
    }


def schema_of_type(hint: Any) -> dict[str, Any]:
    """Of one field."""
    plain = {str: "string", int: "integer", float: "number", bool: "boolean"}
    if hint in plain:
        return {"type": plain[hint]}
    kinds = [k for k in get_args(hint) if k is not type(None)]
    if get_origin(hint) in (UnionType, Union):
        return {"anyOf": [schema_of_type(k) for k in kinds]}
    if get_origin(hint) is list:
        return {"type": "array", "items": schema_of_type(kinds[0])}
    if get_origin(hint) is dict:
        return {"type": "object", "additionalProperties": schema_of_type(kinds[1])}
    if issubclass(hint, Enum):
        return {"enum": [member.value for member in hint]}
    return schema_of(hint)


def taken_by_the_client(told: dict[str, Any], kind: Any) -> None:
    """It is what the class says, and makes one: the classes validate times, addresses and the id of a run.

    The client brings no JSON schema along, and the address of the real one isn't asked.
    """
    attr: Any = import_module("attr")
    jsonschema: Any = import_module("jsonschema")
    checker = jsonschema.Draft202012Validator(schema_of(kind))
    assert [f"{kind.__name__}{e.json_path}: {e.message}" for e in checker.iter_errors(told)] == []
    assert told.get("_schemaURL", told.get("schemaURL")) in (None, kind._get_schema()), kind
    fields = {f.name: f for f in attr.fields(kind)}
    kind(**{fields[k].alias: v for k, v in told.items() if fields[k].init})


def facet(told: dict[str, Any]) -> Any:
    """The class of the client that the schema of a facet names."""
    package: Any = import_module("openlineage.client.generated")
    name = told["_schemaURL"].rpartition("/")[2]
    modules = [import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    return next(getattr(m, name) for m in modules if hasattr(m, name))


def facets_of(event: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Names and contents of all of them, wherever in the event."""
    holders = [event["run"], event["job"], *event["inputs"], *event["outputs"]]
    return [pair for one in holders for pair in one.get("facets", {}).items()]


_STATES: dict[str, tuple[RunState | None, str]] = {
    "COMPLETE": ("finished", ""),
    "FAIL": ("failed", "trainer-0: CUDA out of memory"),
    "ABORT": ("stopped", ""),
    "goes on": (None, ""),
}


@pytest.fixture(params=_STATES)
def events(
    run: RunDir, tmp_path: Path, request: pytest.FixtureRequest
) -> tuple[str, RunDir, list[dict[str, Any]]]:
    """All events of a run that ended so, with code from a repository and a run that it descends from."""
    shutil.copytree(run.path, tmp_path / "run")
    copy, (state, error) = RunDir(tmp_path / "run"), _STATES[request.param]
    code = CodeRevision(root="/src/arriero", commit="0123456789abcdef0123456789abcdef01234567", dirty=False)
    parent = Ancestor(option="model", run_id="r", run_dir="/runs/r", pipeline="grpo", sha256="ab" * 32)
    told = copy.read_manifest().model_copy(update={"code": (code,), "ancestors": (parent,)})
    write_json(copy.manifest, told)
    if state is None:
        copy.summary.unlink()
    else:
        write_json(copy.summary, copy.read_summary().model_copy(update={"state": state, "error": error}))
    out = exported(copy, "openlineage", tmp_path / "events.jsonl")
    return request.param, copy, [json.loads(line) for line in out.read_text().splitlines()]


def test_openlineage_events_of_every_state_are_those_of_the_clients_classes(
    events: tuple[str, RunDir, list[dict[str, Any]]],
) -> None:
    library: Any = import_module("openlineage.client.event_v2")
    end, _, made = events
    assert [e["eventType"] for e in made] == ["START", *([end] if end.isupper() else [])]
    for event in made:
        taken_by_the_client(event, library.RunEvent)
        taken_by_the_client(event["run"], library.Run)
        for _, told in facets_of(event):
            taken_by_the_client(told, facet(told))
    failed = {"errorMessage"} if end == "FAIL" else set[str]()
    assert {name for name, _ in facets_of(made[-1])} == failed | {
        "processing_engine", "executionParameters", "tags", "jobType", "documentation", "sourceCodeLocation",
        "version",
    }  # fmt: skip
    for wrong in ({"eventType": "BEGIN"}, {"eventTime": "today"}, {"job": None}, {"inputs": [{"name": 7}]}):
        with pytest.raises((AssertionError, ValueError)):
            taken_by_the_client(made[0] | wrong, library.RunEvent)
    with pytest.raises(ValueError, match="UUID"):
        taken_by_the_client({"runId": "7"}, library.Run)


def test_openlineage_events_name_the_run_its_data_and_its_record(run: RunDir, tmp_path: Path) -> None:
    out = exported(run, "openlineage", tmp_path / "events.jsonl")
    events = [json.loads(line) for line in out.read_text().splitlines()]
    for event in events:
        assert event["run"]["runId"] == str(uuid5(NAMESPACE_URL, run.read_manifest().run_id))
        assert str(run.path.parent / "sums.jsonl") in [i["name"] for i in event["inputs"]]
    made = {o["name"]: o["facets"].get("version", {}) for o in events[1]["outputs"]}
    assert made[str(run.lineage)]["datasetVersion"] == subject(str(run.path)).head
    given = {p["key"]: p["value"] for p in events[0]["run"]["facets"]["executionParameters"]["parameters"]}
    assert given["groups_per_step"] == "4"
    assert events[0]["job"]["facets"]["jobType"]["jobType"] == "TRAINING"


def test_openlineage_events_of_every_state_are_valid_by_its_json_schema(
    events: tuple[str, RunDir, list[dict[str, Any]]],
) -> None:
    spec = Path(os.environ.get("OPENLINEAGE_SPEC", "/nowhere"))
    if not (spec / "OpenLineage.json").is_file():
        pytest.skip("OPENLINEAGE_SPEC doesn't name the folder spec/ of a checkout of OpenLineage")
    files = (spec / "OpenLineage.json", *(spec / "facets").glob("*.json"))
    schemas = {p.name: json.loads(p.read_text()) for p in files}

    def schema(uri: str) -> Any:
        # A facet may refer to another version of the core than the one that is there.
        return referencing.Resource.from_contents(schemas[uri.rpartition("/")[2]])

    referencing: Any = import_module("referencing")
    library: Any = import_module("jsonschema")
    registry = referencing.Registry(retrieve=schema)

    def problems(told: object, reference: str) -> list[str]:
        kind = library.Draft202012Validator
        checker = kind({"$ref": reference}, registry=registry, format_checker=kind.FORMAT_CHECKER)
        return [error.message for error in checker.iter_errors(told)]

    root, unknown = "https://openlineage.io/spec/2-0-2/OpenLineage.json", set[str]()
    _, _, made = events
    for event in made:
        assert problems(event, root) == []
        for _, told in facets_of(event):
            place = told["_schemaURL"].partition("#")[0].rpartition("/")[2]
            if place in schemas:
                assert problems(told, told["_schemaURL"]) == []
            else:
                unknown.add(place)
    assert unknown <= {"ExecutionParametersRunFacet.json"}  # newer than the rest
    assert problems(made[0] | {"eventType": "BEGIN"}, root)
    assert problems({**made[0], "run": {}}, root)


def test_prov_names_the_batch_and_the_weights_of_every_step(run: RunDir, tmp_path: Path) -> None:
    model: Any = import_module("prov.model")
    out = exported(run, "prov", tmp_path / "prov.json")
    document = model.ProvDocument.deserialize(str(out), format="json")
    derived = list(document.get_records(model.ProvDerivation))
    assert len(derived) == 3
    text = json.loads(out.read_text())
    assert len(text["activity"]) == 4
    versions = sorted(
        e["arriero:version"]["$"] if isinstance(e["arriero:version"], dict) else e["arriero:version"]
        for k, e in text["entity"].items()
        if "-weights-" in k
    )
    assert [int(v) for v in versions] == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_parameters_and_the_measures_of_every_step(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # is for sinks; nothing is sent there
    out = exported(run, "mlflow", tmp_path / "mlflow")
    mlflow: Any = import_module("mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{out / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("grpo")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["optimizer.lr"] == "1e-06"
    losses = client.get_metric_history(found.info.run_id, "train/loss")
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [(m.step, m.value) for m in losses] == [(n["step"], n["loss"]) for n in lines]
    assert {f.path for f in client.list_artifacts(found.info.run_id)} == {"manifest.json", "summary.json"}
    assert main(["export", str(run.path), "--to", "mlflow", "--out", str(out)]) == 2  # twice


def test_wandb_keeps_an_offline_run(run: RunDir, tmp_path: Path) -> None:
    # In a process of its own: its service outlives the call.
    command = [sys.executable, "-m", "arriero.launchers.cli", "export", str(run.path), "--to", "wandb"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], check=False, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.rglob("run-*.wandb")
    assert file.stat().st_size > 1000
    assert b"train/loss" in file.read_bytes()


def test_tensorboard_has_every_measure(run: RunDir, tmp_path: Path) -> None:
    out = exported(run, "tensorboard", tmp_path / "board")
    (file,) = out.iterdir()
    assert file.read_bytes().count(b"train/loss") == 3


def test_the_card_tells_what_the_run_was_made_of_and_how_to_prove_it(run: RunDir, tmp_path: Path) -> None:
    page = exported(run, "card", tmp_path / "card.md").read_text()
    about = subject(str(run.path))
    for word in (
        about.manifest.run_id, about.head, "| `groups_per_step` | `4` | command line |", "sums.jsonl",
        about.manifest.package_sha256[:16], "12 trained",
    ):  # fmt: skip
        assert word in page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "word"], f"--to word: one of {', '.join(FORMATS)}"),
        ([], "--to FORMAT: one of"),
        (["--form", "card"], "unknown option --form"),
        (["--to"], "--to needs a value"),
    ],
)
def test_a_wrong_export_is_refused_in_one_line(
    run: RunDir, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run.path), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_directory_that_is_no_run_is_not_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(tmp_path), "--to", "card"]) == 2
    assert "no manifest.json" in capsys.readouterr().err
