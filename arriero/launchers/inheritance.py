"""Whether what a run says that it took from the records of others is what stands there."""

from __future__ import annotations

from collections.abc import Sequence

from arriero.engine.lineage.chain import ChainError, lines
from arriero.engine.lineage.findings import Finding
from arriero.engine.lineage.reader import Lineage
from arriero.schemas.lineage import GroupEntry
from arriero.schemas.manifest import Ancestor

_SAME = ("tokens", "mask", "logprobs")  # versions are 0 in the run that learns


def inherited(record: Lineage, ancestors: Sequence[Ancestor]) -> tuple[int, list[Finding], list[str]]:
    """How many groups were compared with those they name; what isn't so, and what can't be looked at."""
    findings: list[Finding] = []
    left: list[str] = []
    count = 0
    named_runs = {a.run_id for a in ancestors if a.took == "record"}
    for name, entry in record.groups.items():
        run, _, _ = entry.recorded.partition(":")
        if run and run not in named_runs:
            what = f"is said to be {entry.recorded}; the manifest names no record of that run"
            findings.append(Finding(check="inherited", where=name, what=what))
    for a in ancestors:
        if a.took != "record":
            continue
        try:
            old = Lineage(a.run_dir)
        except (ChainError, OSError, ValueError) as error:
            left.append(f"groups of {a.run_id}: {error}")
            continue
        if a.sha256 not in {line.hash for line in lines(old.url)}:
            what = f"named with head {a.sha256[:12]}, which its chain never had"
            findings.append(Finding(check="inherited", where=a.run_id, what=what))
        named = {f"{a.run_id}:{g.id}": name for name, g in old.groups.items() if g.scores}
        for name, entry in record.groups.items():
            run, _, _ = entry.recorded.partition(":")
            if run == a.run_id and name not in record.redacted:
                count += 1
                then = old.groups.get(named.get(entry.recorded, ""))
                if what := _otherwise(record, entry, old, then):
                    findings.append(Finding(check="inherited", where=name, what=what))
    return count, findings, left


def _otherwise(record: Lineage, entry: GroupEntry, old: Lineage, then: GroupEntry | None) -> str:
    """What differs between a group and the recorded one that it was; empty for nothing."""
    if then is None or then.scores is None or entry.scores is None:
        return f"is said to be {entry.recorded}, which isn't on record there"
    if then.scores.id in old.redacted:
        return ""
    if (entry.lengths, entry.scores.values) != (then.lengths, then.scores.values):
        return f"has other lengths or rewards than {entry.recorded}"
    ours, theirs = record.arrays(entry), old.arrays(then)
    if any(ours[name].tobytes() != theirs[name].tobytes() for name in _SAME):
        return f"has other tokens or log-probs than {entry.recorded}"
    return ""
