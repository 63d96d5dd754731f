"""`arriero audit RUN`: everything that a record can prove, proven again from the record alone.

Exit code 0 if nothing was found, 1 if something was, 2 if there is nothing to audit.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from arriero.engine.errors import GraphError, UserError
from arriero.engine.graph import Graph
from arriero.engine.lineage.audit import checks
from arriero.engine.lineage.findings import Finding
from arriero.engine.lineage.reader import Lineage
from arriero.launchers.audited_edges import on_edges
from arriero.launchers.audited_files import (
    FILES,
    files,
    heads,
    index,
    is_run,
    readable,
    unread,
    versions_of_rewards,
)
from arriero.launchers.audited_health import found_again
from arriero.launchers.audited_sampling import sampled
from arriero.launchers.audited_texts import texts
from arriero.launchers.inheritance import inherited
from arriero.launchers.lineage import opened
from arriero.launchers.recomputing import recomputed
from arriero.launchers.rundir import RunDir
from arriero.schemas.graph import GraphSpec
from arriero.schemas.ledger import Resumed, Unhealthy
from arriero.schemas.manifest import RunManifest

USAGE = """\
usage: arriero audit RUN [--head HASH] [--rescore] [--json]

Checks hash chain, ledger, content, steps, staleness of every token, weights and files of a run, and computes
rewards and advantages again. --head is the hash that the run showed at its end, kept elsewhere: it alone
tells a record that somebody has written anew from the true one. --rescore: the reward has been mended since;
compare all scores with those of the code of now, and list the steps that the others went into. Exit code 1 if
anything is wrong."""

_SHOWN = 10


@dataclass(kw_only=True)
class Report:
    """`done` says of each check what it went through, `left` what couldn't be checked and why."""

    run: str
    head: str
    done: dict[str, str] = field(default_factory=dict[str, str])
    left: list[str] = field(default_factory=list[str])
    findings: list[Finding] = field(default_factory=list[Finding])
    steps: list[int] = field(default_factory=list[int])  # that scores went into which come out otherwise


def audit(args: Sequence[str], show: Callable[[str], int]) -> int:
    """Report on `show`; the exit code. Raises UserError if there is no record."""
    if not args or {"--help", "-h"} & {*args}:
        return show(USAGE)
    place, rest = args[0], list(args[1:])
    as_json, rescore, head = "--json" in rest, "--rescore" in rest, ""
    rest = [word for word in rest if word not in ("--json", "--rescore")]
    if rest[:1] == ["--head"] and len(rest) == 2:
        head = rest[1]
    elif len(rest) == 1 and rest[0].startswith("--head="):
        head = rest[0].partition("=")[2]
    elif rest:
        raise UserError(f"unknown option {rest[0]}; see arriero audit --help")
    if any(word.partition("=")[0] == "--head" for word in args) and not re.fullmatch("[0-9a-f]{64}", head):
        raise UserError(
            f"--head {head or '(empty)'}: a head has 64 of the digits 0-9a-f, as the run showed it"
        )
    report = audited(place, head=head, rescore=rescore)
    code = show(json.dumps(asdict(report), indent=2) if as_json else _text(report))
    return code or int(bool(report.findings))


def audited(place: str, *, head: str = "", rescore: bool = False) -> Report:
    """Check the run at `place` (a run directory, or the URL of a record, of which less can be checked)."""
    record = opened(place)
    report = Report(run=place, head=record.anchor.head)
    run = RunDir(Path(place))
    spec = readable(run.read_graph)
    staleness = max((loop.staleness for loop in spec.loops), default=None) if spec else None
    producers = {loop.name: loop.producer for loop in spec.loops} if spec else {}
    for name, check in checks(staleness=staleness, producers=producers).items():
        report.findings += check(record)
        report.done[name] = _went_through(record, name)
    shards, wrong = index(record)
    report.findings += [*heads(record, run, head), *wrong]
    if shards:
        report.done["index"] = f"{shards} shards of the tables for questions"
    if head and head != record.anchor.head:
        told = "; ".join(record.since) or "nothing that it says"
        report.left.append(f"head {head[:12]} isn't the last one; since the record was first closed: {told}")
    if not is_run(run):
        report.left.append(
            "files, staleness bound, rewards and advantages: there is no run directory beside the record"
        )
        return report
    report.findings += files(record, run)
    report.done["files"] = FILES
    report.left += unread(record, run)
    if (manifest := readable(run.read_manifest)) is not None:
        count, wrong, unseen = inherited(record, manifest.ancestors)
        report.findings += [*wrong, *versions_of_rewards(record, manifest)]
        report.left += unseen
        if count:
            report.done["inherited"] = f"{count} groups of other runs"
    if spec is not None:
        report.findings += on_edges(record, spec)
        report.done["edges"] = f"{len(record.groups)} groups, {len(record.batches)} batches"
        report.findings += sampled(record, spec, manifest)
        report.done["sampling"] = f"{len(record.groups)} groups"
        _compute(report, record, spec, manifest, rescore=rescore)
    return report


def _compute(
    report: Report, record: Lineage, spec: GraphSpec, manifest: RunManifest | None, *, rescore: bool
) -> None:
    """Health, texts, rewards and advantages, if the components of the graph are still there."""
    try:
        graph = Graph.from_spec(spec)
    except (GraphError, UserError) as error:
        report.left.append(f"texts, rewards, advantages and health: {error}")
        return
    if any(isinstance(e, Resumed) and e.changed for e in record.events):
        report.left.append(
            "health and texts: the run went on with something changed, perhaps its gates or model"
        )
    else:
        history = [*record.history]
        noted = record.opened is not None and record.opened.health
        report.findings += found_again(history, spec, graph, noted=noted)
        report.done["health"] = f"{sum(isinstance(e, Unhealthy) for e in history)} findings of gates"
        read = texts(record, spec, graph, manifest)
        report.findings += read.findings
        report.left += read.left
        if read.count:
            report.done["texts"] = f"{read.count} rollouts read again"
    for name, told, findings, left in asyncio.run(recomputed(record, spec, graph, manifest, rescore=rescore)):
        report.findings += findings
        if name.startswith("rewards of"):
            report.steps += _steps_of(record, {f.where for f in findings})
        report.left += left
        if told:
            report.done[name] = told


def _steps_of(record: Lineage, rollouts: set[str]) -> list[int]:
    """The versions that these rollouts (`group/number`) went into."""
    found: set[int] = set()
    for step in record.steps:
        if (entry := record.batches.get(step.batch)) is None:
            continue  # told by `steps`
        ids = {
            f"{record.groups[entry.groups[g]].id}/{r}"
            for g, r in zip(entry.group, entry.rollout, strict=True)
            if entry.groups[g] in record.groups
        }
        if ids & rollouts:
            found.add(step.version)
    return sorted(found)


def _went_through(record: Lineage, check: str) -> str:
    rollouts = sum(len(g.lengths) for g in record.groups.values())
    return {
        "chain": f"{record.anchor.entries} entries",
        "ledger": f"{sum(1 for _ in record.admitted)} prompts, {sum(1 for _ in record.dropped)} drops",
        "content": f"{rollouts} rollouts"
        + (f", {len(record.redacted)} REDACTED: {'; '.join(record.reasons)}" if record.redacted else ""),
        "steps": f"{len(record.steps)} steps",
        "tokens": f"{sum(s.tokens for s in record.steps)} tokens",
        "weights": f"{len(record.weights)} versions",
        "held out": f"{sum(1 for _ in record.evaluated)} prompts",
    }[check]


def _text(report: Report) -> str:
    lines = [f"audit of {report.run}, head {report.head}"]
    bad = {f.check for f in report.findings}
    lines += [
        f"  {'FAILED' if name in bad else 'ok':<7} {name:<11} {told}" for name, told in report.done.items()
    ]
    lines += [f"  not checked: {what}" for what in report.left]
    if not report.findings:
        return "\n".join([*lines, "nothing found"])
    lines.append(f"{len(report.findings)} found:")
    lines += [f"  {f.check}: {f.where}: {f.what}" for f in report.findings[:_SHOWN]]
    if (more := len(report.findings) - _SHOWN) > 0:
        lines.append(f"  and {more} more; --json shows all")
    if report.steps:
        steps, clean = ", ".join(map(str, report.steps)), report.steps[0] - 1
        lines.append(f"steps with such rewards: {steps}; the last version without: {clean}")
    return "\n".join(lines)
