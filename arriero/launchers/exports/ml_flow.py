"""A run in a local MLflow store: parameters, measures by step, results as tags, and its files.

The store is SQLite, which MLflow keeps up; its folders of files it has given up.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from arriero.engine.errors import UserError
from arriero.launchers.exports.subject import Subject
from arriero.launchers.step_lines import Scalars

T = TypeVar("T")

_METRICS, _PARAMETERS = 1000, 100  # that MLflow takes at once
_LONGEST = 6000  # characters of a parameter
_RUN = "arriero.run_id"


class Live:
    """The run at `uri`, else at MLFLOW_TRACKING_URI, else in a store at `path`; step by step as it is made.

    A run that goes on is the same one there.
    """

    def __init__(self, about: Subject, path: Path, uri: str = "") -> None:
        import_module("sqlalchemy")  # mlflow asks for it late, and in a sentence of its own
        mlflow: Any = import_module("mlflow")
        self._entities: Any = import_module("mlflow.entities")
        path.mkdir(parents=True, exist_ok=True)
        uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or _local(path)
        self._client = mlflow.MlflowClient(uri)
        experiment = _experiment(self._client, about.pipeline, path, uri)
        known = self._client.search_runs([experiment], f"tags.`{_RUN}` = '{about.manifest.run_id}'")
        self.found = bool(known)
        self.name = str(known[0].info.run_id) if known else self._begun(experiment, about)

    def step(self, step: int, time_s: float, found: Scalars) -> None:
        metrics = [
            self._entities.Metric(_key(tag), value, round(time_s * 1000), step) for tag, value in found
        ]
        for some in _pieces(metrics, _METRICS):
            self._client.log_batch(self.name, metrics=list(some))

    def finish(self, about: Subject) -> str:
        """With what the run came to."""
        tags = {"arriero.head": about.head} if about.head else {}
        tags |= {f"arriero.{k}": str(v) for k, v in about.results().items()}
        tags |= {f"arriero.made_from.{k}": a.run_id for k, a in enumerate(about.manifest.ancestors)}
        for key, value in tags.items():
            self._client.set_tag(self.name, key, value)
        for file in (about.run.manifest, about.run.summary):  # the graph may hold a password
            if file.exists():
                self._client.log_artifact(self.name, str(file))
        state = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}.get(about.state, "RUNNING")
        ended = about.ended
        self._client.set_terminated(self.name, state, round(ended.timestamp() * 1000) if ended else None)
        return self.name

    def _begun(self, experiment: str, about: Subject) -> str:
        run = self._client.create_run(
            experiment,
            start_time=round(about.manifest.started.timestamp() * 1000),
            run_name=about.manifest.run_id,
            tags={_RUN: about.manifest.run_id, "arriero.graph": about.manifest.graph_digest},
        )
        name = str(run.info.run_id)
        for some in _pieces(list(about.parameters().items()), _PARAMETERS):
            params = [self._entities.Param(_key(k), v[:_LONGEST]) for k, v in some]
            self._client.log_batch(name, params=params)
        return name


def write(about: Subject, path: Path) -> str:
    live = Live(about, path, _local(path))  # wherever sinks write to: an export stays here
    if live.found:
        raise UserError(f"{path} holds run {about.manifest.run_id} already; choose another --out")
    for step, time_s, found in about.measures():
        live.step(step, time_s, found)
    return f"run {live.finish(about)} of experiment {about.pipeline} in {_local(path)}"


def _local(path: Path) -> str:
    return f"sqlite:///{path / 'mlflow.db'}"


def _experiment(client: Any, name: str, path: Path, uri: str) -> str:
    known = client.get_experiment_by_name(name)
    if known is not None:
        return str(known.experiment_id)
    files = (path / "files").as_uri() if uri.startswith("sqlite:") else None  # else the server knows where
    return str(client.create_experiment(name, artifact_location=files))


def _key(name: str) -> str:
    return re.sub(r"[^\w./ -]", "_", name)


def _pieces(values: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
