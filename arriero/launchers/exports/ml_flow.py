"""A run in a local MLflow store: parameters, measures by step, results as tags, and its files.

The store is SQLite, which MLflow keeps up; its folders of files it has given up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from arriero.engine.errors import UserError
from arriero.launchers.exports.subject import Subject

T = TypeVar("T")

_METRICS, _PARAMETERS = 1000, 100  # that MLflow takes at once
_LONGEST = 6000  # characters of a parameter
_RUN = "arriero.run_id"


def write(about: Subject, path: Path) -> str:
    import_module("sqlalchemy")  # mlflow asks for it late, and in a sentence of its own
    mlflow: Any = import_module("mlflow")
    path.mkdir(parents=True, exist_ok=True)
    client = mlflow.MlflowClient(f"sqlite:///{path / 'mlflow.db'}")
    experiment = _experiment(client, about.pipeline, path)
    run_id = about.manifest.run_id
    if client.search_runs([experiment], f"tags.`{_RUN}` = '{run_id}'"):
        raise UserError(f"{path} holds run {run_id} already; choose another --out")
    run = client.create_run(
        experiment, start_time=round(about.manifest.started.timestamp() * 1000), run_name=run_id
    )
    name = run.info.run_id
    _log(client, name, about)
    for file in (about.run.manifest, about.run.summary):  # the graph may hold a password
        if file.exists():
            client.log_artifact(name, str(file))
    state = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}.get(about.state, "RUNNING")
    ended = about.ended
    client.set_terminated(name, state, round(ended.timestamp() * 1000) if ended else None)
    return f"run {name} of experiment {about.pipeline} in sqlite:///{path / 'mlflow.db'}"


def _log(client: Any, name: str, about: Subject) -> None:
    entities: Any = import_module("mlflow.entities")
    for some in _pieces(list(about.parameters().items()), _PARAMETERS):
        client.log_batch(name, params=[entities.Param(_key(k), v[:_LONGEST]) for k, v in some])
    metrics = [
        entities.Metric(_key(tag), value, round(time_s * 1000), step)
        for step, time_s, found in about.measures()
        for tag, value in found
    ]
    for some in _pieces(metrics, _METRICS):
        client.log_batch(name, metrics=list(some))
    tags = {_RUN: about.manifest.run_id, "arriero.graph": about.manifest.graph_digest}
    tags |= {"arriero.head": about.head} if about.head else {}
    tags |= {f"arriero.{k}": str(v) for k, v in about.results().items()}
    tags |= {f"arriero.made_from.{k}": a.run_id for k, a in enumerate(about.manifest.ancestors)}
    for key, value in tags.items():
        client.set_tag(name, key, value)


def _experiment(client: Any, name: str, path: Path) -> str:
    known = client.get_experiment_by_name(name)
    if known is not None:
        return str(known.experiment_id)
    return str(client.create_experiment(name, artifact_location=(path / "files").as_uri()))


def _key(name: str) -> str:
    return re.sub(r"[^\w./ -]", "_", name)


def _pieces(values: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
