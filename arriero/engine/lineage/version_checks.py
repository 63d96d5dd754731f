"""Checks of versions of the weights: who sampled with which, who made them, how good they were."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

import numpy as np

from arriero.engine.lineage.findings import Finding
from arriero.engine.lineage.reader import Lineage
from arriero.engine.runtime.guard import held_out, sampled_otherwise
from arriero.schemas.ledger import Evaluated, Trained
from arriero.schemas.messages import Batch, ScoredGroup


def whole_batch(record: Lineage, name: str) -> Batch | None:
    """The batch, if all of it can be read."""
    try:
        return record.batch(name)
    except (KeyError, ValueError, IndexError, OSError):
        return None


def tokens(record: Lineage, bound: int | None) -> Iterator[Finding]:
    """Whether every token is of a version that was there, and no staler than the bound."""
    for step in record.steps:
        if (batch := whole_batch(record, step.batch)) is None:
            continue  # told by `steps`
        where, replaced = f"step {step.version} of {step.node}", step.version - 1
        samples = record.left_of(batch, step).samples
        versions = [s.versions[s.mask] for s in samples if s.versions is not None and not s.replayed]
        found = np.concatenate(versions) if versions else np.zeros(0, np.int32)
        if not found.size:
            continue
        if bound is not None and int(found.max()) > replaced:
            yield Finding(
                check="tokens", where=where, what=f"a token of version {found.max()} replaced {replaced}"
            )
        stale = max(replaced - int(found.min()), 0)
        if bound is not None and stale > bound:
            yield Finding(
                check="tokens", where=where, what=f"a token is {stale} versions old, the bound is {bound}"
            )
        if len(versions) == len(samples) and stale != step.staleness_max:
            yield Finding(
                check="tokens", where=where, what=f"says a staleness of {step.staleness_max}, it is {stale}"
            )


def weights(record: Lineage, producers: Mapping[str, str]) -> Iterator[Finding]:
    """Whether versions follow each other, each made by a step of the node that its loop carries them from."""
    made: Counter[str] = Counter()
    by_version: defaultdict[int, list[Trained]] = defaultdict(list)
    for step in record.steps:
        by_version[step.version].append(step)
    for w in record.weights:
        where = f"version {w.version} of {w.loop}"
        if w.version != made[w.loop]:
            yield Finding(check="weights", where=where, what=f"comes where version {made[w.loop]} is due")
        made[w.loop] += 1
        steps = [s for s in by_version[w.version] if producers.get(w.loop, s.node) == s.node]
        if not w.version:
            continue
        if not steps:
            yield Finding(check="weights", where=where, what="no step made it")
        elif w.parents != (steps[0].batch,):
            yield Finding(
                check="weights", where=where, what=f"comes from {w.parents}, its step from {steps[0].batch}"
            )
        elif not _same(w.metrics, steps[0].metrics):
            yield Finding(check="weights", where=where, what="its measures aren't those of its step")
    yield from _last_versions(record, producers, made)


def _last_versions(
    record: Lineage, producers: Mapping[str, str], made: Mapping[str, int]
) -> Iterator[Finding]:
    """Whether every version that a step made was announced, and none sampled that wasn't."""
    if record.closed is not None and record.closed.state == "finished":
        for loop, node in producers.items():
            last = max((s.version for s in record.steps if s.node == node), default=0)
            if made.get(loop, 0) <= last:
                what = f"carried no version {made.get(loop, 0)}, and {node} has made {last}"
                yield Finding(check="weights", where=loop, what=what)
    newest = max((w.version for w in record.weights), default=None)
    for name, g in record.groups.items():
        if newest is not None and max(g.newest, default=-1) > newest:
            yield Finding(
                check="weights", where=name, what=f"was sampled by version {max(g.newest)}, which there isn't"
            )


def _same(a: dict[str, float], b: dict[str, float]) -> bool:
    return a.keys() == b.keys() and all(a[k] == b[k] or (a[k] != a[k] and b[k] != b[k]) for k in a)


def held_out_prompts(record: Lineage) -> Iterator[Finding]:
    """Whether the scores that came back of held-out prompts are those of their recorded groups."""
    groups: dict[int, list[str]] = {}
    for name, g in record.groups.items():
        if g.prompt.split == "eval" and g.scores is not None:
            for origin in g.prompt.origins:
                groups.setdefault(origin, []).append(name)
    whole = record.closed is not None and record.closed.state == "finished"
    for event in record.evaluated:
        where = f"held-out prompt {event.id}"
        names = groups.get(event.origin, [])
        if not names and whole and record.groups:
            yield Finding(check="held out", where=where, what="came back, and its group isn't on record")
        elif names and event not in [back for name in names if (back := _back(record, name)) is not None]:
            yield Finding(
                check="held out",
                where=where,
                what="came back with other scores or versions than its group has",
            )
        for why in filter(None, (_otherwise(record, name) for name in names)):
            yield Finding(check="held out", where=where, what=f"came back, {why}")


def _otherwise(record: Lineage, name: str) -> str:
    """As `sampled_otherwise` says of a recorded group."""
    try:
        group = record.group(name)
    except (KeyError, ValueError, IndexError, OSError):
        return ""
    return sampled_otherwise(group) if isinstance(group, ScoredGroup) else ""


def _back(record: Lineage, name: str) -> Evaluated | None:
    """The event of a recorded group; None if it can't be read, as `content` tells."""
    try:
        return held_out(record.group(name))
    except (KeyError, ValueError, IndexError, OSError):
        return None
