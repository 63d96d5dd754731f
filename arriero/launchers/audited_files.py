"""The files of a run directory against its record: what the run was made of, what it reported and left."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from arriero.engine.errors import UserError
from arriero.engine.lineage.findings import Finding
from arriero.engine.lineage.reader import Lineage
from arriero.engine.lineage.shards import Shards
from arriero.engine.runtime.ledger import Ledger, LedgerError
from arriero.launchers.rundir import MARKS, RunDir
from arriero.launchers.stamping import model_sha256, stamps
from arriero.launchers.step_lines import measured
from arriero.launchers.summary import Account
from arriero.schemas.graph import GraphSpec
from arriero.schemas.ledger import EVENT
from arriero.schemas.manifest import CodeRevision, RunManifest
from arriero.schemas.run import RunSummary

FILES = "graph, manifest, options, code, ledger, metrics, summary, model"
T = TypeVar("T")

# What of a summary follows from the ledger; the rest is of clocks and processes.
_FOLLOWS = (
    "steps", "reward_first", "reward_last", "accuracy_before", "accuracy_after", "evaluations",
    "staleness_bound", "staleness_max", "groups_admitted", "groups_trained", "groups_dropped",
)  # fmt: skip


def is_run(run: RunDir) -> bool:
    """Whether the place that was asked about is a run directory, rather than a record alone."""
    return any((run.path / name).exists() for name in (*MARKS, "summary.json", "ledger.jsonl", "lineage"))


def readable(read: Callable[[], T]) -> T | None:
    """What is read; None where that can't be, as `files` tells."""
    try:
        return read()
    except UserError:
        return None


def files(record: Lineage, run: RunDir) -> Iterator[Finding]:
    """Each file against the entries that name its hash, or that it repeats."""
    yield from _made_of(record, run)
    yield from _ledger(record, run.ledger)
    spec, summary = readable(run.read_graph), readable(run.read_summary)
    if record.closed is not None and summary is None:
        yield _finding(run.summary, "isn't there, or can't be read; the record is closed")
    if summary is not None and spec is not None:
        yield from _summary(record, spec, run.summary, summary)
    yield from _metrics(record, run.metrics)
    yield from _model(record, run.model)


def unread(record: Lineage, run: RunDir) -> list[str]:
    """What can't be compared: only the owner can read it, it was left out of a copy, or nothing names it."""
    manifest = readable(run.read_manifest)
    codes = manifest.code if manifest is not None else ()
    diffs = [_diff(run, code) for code in codes if code.diff_sha256]
    found = [f"{path.name}: it isn't there to be read" for path in diffs if not os.access(path, os.R_OK)]
    if record.closed is not None and not record.closed.model and any(run.model.glob("*.safetensors")):
        found.append("model: the record names no hash of its files")
    return found


def index(record: Lineage) -> tuple[int, list[Finding]]:
    """How many shards of rows are kept for questions, and which of them the chain gives otherwise."""
    shards, count, found = Shards(record.url), 0, list[Finding]()
    for kept, now in shards.compared():
        count += 1
        name = f"{kept.before.entries:012d}"
        wrong = [] if kept.model_copy(update={"files": {}}) == now.about else [f"{name}.json"]
        for kind, table in (now.tables or {}).items():
            try:
                same = bool(shards.table(kept, kind).equals(table))
            except (OSError, ValueError):
                same = False
            wrong += [] if same else [f"{name}.{kind}.parquet"]
        if wrong:
            what = "isn't what the chain gives; remove it, and it is made anew"
            found.append(Finding(check="index", where=f"index/{wrong[0]}", what=what))
    return count, found


def heads(record: Lineage, run: RunDir, head: str) -> Iterator[Finding]:
    """The head against those that were kept: in the summary, in the model, and by whoever asks."""
    told = {"--head": head}
    if (summary := readable(run.read_summary)) is not None:
        told["summary.json"] = summary.lineage.head if summary.lineage else ""
        if record.closed is not None and summary.lineage is None and summary.state == record.closed.state:
            yield Finding(check="chain", where="summary.json", what="names no head of the record")
    known = {a.head for a in record.ends} | {record.anchor.head}
    for where, kept in told.items():
        if kept and kept not in known:
            what = f"names head {kept[:12]}, the record never ended with it, but with {_ends(record)}"
            yield Finding(check="chain", where=where, what=what)


def versions_of_rewards(record: Lineage, manifest: RunManifest) -> Iterator[Finding]:
    """Scores by a version of the reward that the manifest doesn't name; a run that went on may have two."""
    if record.resumed:
        return
    for name, g in record.groups.items():
        told = manifest.content.rewards.get(g.edge, "")
        if told and g.scores is not None and g.scores.reward_version not in ("", told):
            what = f"was scored by version {g.scores.reward_version}, the manifest has {told}"
            yield Finding(check="files", where=name, what=what)


def _made_of(record: Lineage, run: RunDir) -> Iterator[Finding]:
    first = record.opened
    if first is None:
        return
    for path, digest in ((run.manifest, first.manifest_sha256), (run.options, first.options_sha256)):
        now = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""
        if now != digest:
            yield _finding(path, "isn't as it was when the run began")
    try:  # from the text, not the parsed graph: a later arriero may have added a field to it
        told = json.loads(run.graph.read_bytes())
        graph = json.dumps(told, sort_keys=True, separators=(",", ":"))
    except (OSError, ValueError) as error:
        yield _finding(run.graph, f"isn't there, or can't be read: {error!r:.120}")
        return
    if hashlib.sha256(graph.encode()).hexdigest() != first.graph_digest:
        yield _finding(run.graph, "isn't the graph that was run")
    manifest, options = readable(run.read_manifest), readable(run.read_options)
    for path, told in ((run.manifest, manifest), (run.options, options)):
        if told is not None and told.run_id != first.run_id:
            yield _finding(path, f"is of run {told.run_id}, the record of {first.run_id}")
    if manifest is not None and manifest.graph_digest != first.graph_digest:
        yield _finding(run.manifest, "names another graph than the record")
    for code in manifest.code if manifest is not None else ():
        path = _diff(run, code)
        if os.access(path, os.R_OK) and hashlib.sha256(path.read_bytes()).hexdigest() != code.diff_sha256:
            yield _finding(path, "isn't what the repository had changed, by the manifest")


def _ledger(record: Lineage, path: Path) -> Iterator[Finding]:
    try:
        with path.open("rb") as file:
            told = (EVENT.dump_json(EVENT.validate_json(line)) for line in file)
            same = all(next(told, b"") == EVENT.dump_json(event) for event in record.events)
            more = sum(1 for _ in told) if same else 0
    except (OSError, ValidationError) as error:
        yield _finding(path, f"isn't there, or can't be read: {error!s:.120}")
        return
    if not same or (more and record.closed is not None):  # it is written before the record
        yield _finding(path, "isn't the ledger that is on record")


def _summary(record: Lineage, spec: GraphSpec, path: Path, told: RunSummary) -> Iterator[Finding]:
    account, ledger = Account(spec), Ledger()
    for event in record.history:
        account.event(event, math.nan)
        with suppress(LedgerError):  # told by `ledger`
            ledger.apply(event)
    now = account.summary(ledger, state=told.state, error="", wall_s=0.0)
    for name in _FOLLOWS:
        then, due = getattr(told, name), getattr(now, name)
        if then != due:
            yield _finding(path, f"says {name} {then!s:.60}; by the record it is {due!s:.60}")
    if record.closed is not None and told.state != record.closed.state:
        yield _finding(path, f"says {told.state}, the record was closed as {record.closed.state}")


def _metrics(record: Lineage, path: Path) -> Iterator[Finding]:
    try:
        lines = [json.loads(line) for line in path.read_bytes().splitlines()]
        told = [(int(line["step"]), line) for line in lines]
    except (OSError, ValueError, TypeError, KeyError) as error:
        yield _finding(path, f"isn't there, or can't be read: {error!r:.120}")
        return
    # A kill may come between a step and its line; what goes on from there doesn't write it again.
    if record.closed is not None and not record.resumed and len(told) != len(record.steps):
        yield _finding(path, f"tells of {len(told)} steps, the record of {len(record.steps)}")
    for step in record.steps:
        due = measured(step)
        lines = [line for version, line in told if version == step.version]
        if lines and not any(all(line.get(k) == v for k, v in due.items()) for line in lines):
            wrong = [k for k, v in due.items() if lines[0].get(k) != v]
            yield _finding(path, f"step {step.version} has another {', '.join(wrong)} than on record")


def _model(record: Lineage, model: Path) -> Iterator[Finding]:
    """The files that the run left, by their hashes and by the head that they name."""
    closed = record.closed
    told = closed.model if closed is not None else {}
    now = model_sha256(model)
    for name, digest in told.items():
        if now.get(name) != digest:
            what = "isn't the file that the run left" if name in now else "isn't there any more"
            yield _finding(model / name, what)
    for name in now.keys() - told.keys() if told else ():
        if name.endswith(".safetensors"):
            yield _finding(model / name, "isn't a file that the run left")
    known = {a.head for a in record.ends}
    for name, head in stamps(model).items():
        if head not in known:
            what = f"names head {head[:12]}, the record never ended with it: these weights are of another run"
            yield _finding(model / name, what)


def _diff(run: RunDir, code: CodeRevision) -> Path:
    """What the repository had changed."""
    return run.path / f"code-{Path(code.root).name}.diff"


def _finding(path: Path, what: str) -> Finding:
    where = f"model/{path.name}" if path.parent.name == "model" else path.name
    return Finding(check="files", where=where, what=what)


def _ends(record: Lineage) -> str:
    return ", ".join(a.head[:12] for a in record.ends or [record.anchor])
