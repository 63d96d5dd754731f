"""The run directory: what a run is made of, what it reports and what it leaves.

graph.json options.json manifest.json    written before anything starts, and when the run goes on
metrics.jsonl ledger.jsonl logs/ tensorboard/ lineage/    appended while it runs
summary.json model/    when it is over
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from arriero.engine.errors import UserError
from arriero.schemas.graph import GraphSpec
from arriero.schemas.manifest import RunManifest
from arriero.schemas.run import RunOptions, RunSummary, VitalsFile

M = TypeVar("M", bound=BaseModel)

# One of these shows that a directory was made by a run, so that emptying it takes nothing else away.
MARKS = ("manifest.json", "graph.json", "options.json")

# What a run writes, apart from logs; of one that was started again, the earlier ones' lies below ATTEMPTS.
OUTPUTS = (
    "metrics.jsonl", "ledger.jsonl", "history.jsonl", "summary.json", "tensorboard", "lineage", "checkpoints",
)  # fmt: skip
ATTEMPTS = "attempts"


@dataclass(frozen=True)
class RunDir:
    """Paths inside a run directory, and its records."""

    path: Path

    @property
    def graph(self) -> Path:
        return self.path / "graph.json"

    @property
    def options(self) -> Path:
        return self.path / "options.json"

    @property
    def manifest(self) -> Path:
        return self.path / "manifest.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def vitals(self) -> Path:
        """What every replica said last, and how full every edge is; written while the run goes on."""
        return self.path / "vitals.json"

    @property
    def timeline(self) -> Path:
        """When what happened: for `arriero trace` and `arriero report`."""
        return self.path / "timeline.jsonl"

    @property
    def history(self) -> Path:
        """Of a run that goes on: what counts of its ledger."""
        return self.path / "history.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def prepared(self) -> Path:
        """There from when `--resume` has prepared the directory for a job until the job begins."""
        return self.path / "prepared"

    @property
    def cancelled(self) -> Path:
        """There if somebody cancelled the run on its cluster: then its end is no preemption."""
        return self.path / "cancelled"

    @property
    def scale(self) -> Path:
        """Requests of `arriero scale` and the answers to them."""
        return self.path / "scale"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def lineage(self) -> Path:
        return self.path / "lineage"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def model(self) -> Path:
        return self.path / "model"

    def begin(self, spec: GraphSpec, options: RunOptions, manifest: RunManifest) -> None:
        """Write what the run is made of; the manifest last, so that where it stands the others do too."""
        write_json(self.graph, spec, mode=0o600)  # a configuration may hold a password, unmasked here
        write_json(self.options, options)
        write_json(self.manifest, manifest)

    def begin_again(self, number: int, spec: GraphSpec, options: RunOptions, manifest: RunManifest) -> None:
        """As `begin`, for the `number`-th time that the run goes on; what it was made of before is kept."""
        for path in (self.graph, self.options, self.manifest):
            path.rename(path.with_stem(f"{path.stem}-before-{number}"))
        self.begin(spec, options, manifest)

    def read_graph(self) -> GraphSpec:
        """Raises UserError if the file is missing or is not a graph; so do the others."""
        return read_json(self.graph, GraphSpec)

    def read_options(self) -> RunOptions:
        return read_json(self.options, RunOptions)

    def read_manifest(self) -> RunManifest:
        return read_json(self.manifest, RunManifest)

    def read_vitals(self) -> VitalsFile:
        return read_json(self.vitals, VitalsFile)

    def read_summary(self) -> RunSummary:
        return read_json(self.summary, RunSummary)


def create(path: Path, *, overwrite: bool = False) -> RunDir:
    """An empty run directory at `path`, made if need be.

    Raises UserError for a used one unless `overwrite`, and always for one whose run goes on, one with other
    files, and where nothing can be written.
    """
    run = RunDir(path.absolute())
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        if any(run.path.iterdir()):
            _refuse_used(run, overwrite=overwrite)
            _empty(run.path)
        for folder in (run.logs, run.tensorboard):
            folder.mkdir()
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"{error.filename} is not a directory; choose another --run-dir") from error
    except OSError as error:
        raise UserError(f"{error.filename or path}: {error.strerror}; choose another --run-dir") from error
    return run


def reopen(path: Path) -> RunDir:
    """The directory of a run that has ended. Raises UserError for one that goes on, and for any other."""
    run = RunDir(path.absolute())
    run.read_manifest()
    if (pid := running(run)) is not None:
        raise UserError(f"{run.path} is in use by process {pid}; wait until that run ends")
    for folder in (run.logs, run.tensorboard):
        folder.mkdir(exist_ok=True)
    return run


def default_path(pipeline: str, now: datetime) -> Path:
    """`runs/<pipeline>-<time in UTC>`, numbered where that is taken."""
    first = Path("runs") / f"{pipeline}-{now.astimezone(UTC):%Y%m%d-%H%M%S}"
    path, number = first, 1
    while path.exists():
        number += 1
        path = first.with_name(f"{first.name}-{number}")
    return path


def write_json(path: Path, record: BaseModel, *, mode: int = 0o666) -> None:
    """Write the whole file or nothing; `mode` before the umask."""
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
        file.write(record.model_dump_json(indent=2) + "\n")
    part.replace(path)


def read_json(path: Path, kind: type[M]) -> M:
    """Raises UserError if the file can't be read or is no record of this kind."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}; is this a run directory?") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path} is no {kind.__name__}: {place}: {first['msg']}") from error


def _refuse_used(run: RunDir, *, overwrite: bool) -> None:
    if not any((run.path / mark).is_file() for mark in MARKS):
        raise UserError(f"{run.path} holds files that no run wrote; choose an empty or new --run-dir")
    if not overwrite:
        raise UserError(
            f"{run.path} has been used by a run; choose another --run-dir, or empty it with --overwrite"
        )
    if (pid := running(run)) is not None:
        raise UserError(
            f"{run.path} is in use by process {pid}; wait until it ends, or choose another --run-dir"
        )


def running(run: RunDir) -> int | None:
    """The process of the run that was started here, if it lives on this machine and has not ended the run."""
    import platform

    import psutil

    try:
        manifest = run.read_manifest()
    except UserError:
        return None  # it never came to start anything
    if run.summary.exists() or manifest.host != platform.node() or manifest.pid == os.getpid():
        return None
    try:
        begun = psutil.Process(manifest.pid).create_time()
    except psutil.Error:
        return None
    # A younger process with the same number is another one.
    return manifest.pid if begun <= manifest.started.timestamp() else None


def _empty(path: Path) -> None:
    for child in path.iterdir():
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()
