"""A record as Arrow tables, for pandas and for SQL.

| table      | a row is                                                                                  |
|------------|-------------------------------------------------------------------------------------------|
| `steps`    | a version that was trained: its batch, staleness, reward, loss and all other measures       |
| `rollouts` | a response, as the last node left it: prompt, reward, outcome, versions that sampled it,    |
|            | length, place of its arrays; `raw` is the reward before shaping, if that is another         |
| `samples`  | a rollout in a batch: the step made from it, its reward there, place of its advantages        |
| `prompts`  | an admission: row, epoch, and what became of it                                              |
| `weights`  | a version that a loop carried, with its fingerprint                                          |
| `events`   | something that happened to the run: a restart, that it went on, how it failed                |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from arriero.engine.lineage.reader import Lineage
from arriero.schemas.ledger import Restarted, Resumed
from arriero.schemas.lineage import GroupEntry

if TYPE_CHECKING:
    import pyarrow as pa

NAMES = ("steps", "rollouts", "samples", "prompts", "weights", "events")
Rows = Iterator[tuple[Any, ...]]
Blocks = Iterator[tuple[Sequence[Any], ...]]  # of rows: their values, column by column


def table(lineage: Lineage, name: str) -> pa.Table:
    """One of `NAMES`. Raises KeyError for another name."""
    import pyarrow as pa

    types: dict[str, pa.DataType] = {"int64": pa.int64(), "double": pa.float64(), "string": pa.string()}
    columns, blocks = _TABLES[name]
    values: list[list[Any]] = [[] for _ in columns]
    for block in blocks(lineage):
        for column, found in zip(values, block, strict=True):
            column.extend(found)
    arrays: list[Any] = [
        pa.array(v, type=types[kind]) for v, kind in zip(values, columns.values(), strict=True)
    ]
    return pa.Table.from_arrays(arrays, names=list(columns))


def _steps(lineage: Lineage) -> Rows:
    for s in lineage.steps:
        yield (
            s.version, s.node, s.batch, s.tokens, s.staleness_max, s.staleness_mean, s.reward_mean,
            s.metrics.get("loss"), s.metrics.get("grad_norm"), json.dumps(s.metrics),
        )  # fmt: skip


def _one_by_one(rows: Callable[[Lineage], Rows]) -> Callable[[Lineage], Blocks]:
    """Rows as blocks of one each: for tables that aren't long."""
    return lambda lineage: (tuple((value,) for value in row) for row in rows(lineage))


def origins_of(group: GroupEntry) -> tuple[int, ...]:
    """The admission numbers it descends from: its prompt's, or its own if it was admitted as it is."""
    return group.prompt.origins or (group.scores.origins if group.scores else group.origins)


def whole_groups(lineage: Lineage) -> Iterator[GroupEntry]:
    """Each group once: as the last of those left it that passed it on (with a penalty, say)."""
    before = {p for g in lineage.groups.values() for p in (g.scores.parents if g.scores else ())}
    return (g for name, g in lineage.groups.items() if name not in before)


def _rollouts(lineage: Lineage) -> Blocks:
    """A block per group: a row at a time takes four times as long."""
    for g in whole_groups(lineage):
        s, n, p, t = g.scores, len(g.lengths), g.prompt, g.text
        starts = [*accumulate(g.lengths, initial=g.arrays.start)][:n]
        nothing = [None] * n
        yield (
            [f"{g.id}/{k}" for k in range(n)], [g.id] * n, range(n), [s.id if s else ""] * n, [p.id] * n,
            [p.row] * n, [p.epoch] * n, [p.split] * n, s.values if s else nothing,
            [o.value for o in s.outcomes] if s else nothing, [s.reward_version if s else ""] * n, g.lengths,
            g.sampled, g.oldest, g.newest, g.finishes, g.temperatures, g.seeds, [g.arrays.part] * n, starts,
            [f"{g.recorded}/{k}" if g.recorded else "" for k in range(n)],
            [next(iter(origins_of(g)), None)] * n, [t.part] * n, [t.start] * n, [t.size] * n,
            s.raw if s else nothing,
        )  # fmt: skip


def _samples(lineage: Lineage) -> Blocks:
    """A block per batch."""
    steps = {s.batch: s.version for s in lineage.steps}
    for b in lineage.batches.values():
        n = len(b.group)
        ids = [lineage.groups[g].id if g in lineage.groups else "" for g in b.groups]
        rollouts = [f"{ids[g]}/{r}" if r >= 0 else "" for g, r in zip(b.group, b.rollout, strict=True)]
        starts = [*accumulate(b.lengths, initial=b.advantages.start)][:n]
        yield (
            [steps.get(b.id)] * n, [b.id] * n, range(n), [b.groups[g] for g in b.group], rollouts, b.rewards,
            b.origin, b.lengths, [b.advantages.part] * n, starts,
        )  # fmt: skip


def _events(lineage: Lineage) -> Rows:
    for e in lineage.events:
        match e:
            case Restarted():
                yield "restarted", e.name, e.number, e.why
            case Resumed():
                told = ", ".join(f"{node} from version {v}" for node, v in e.versions.items())
                yield "resumed", "", e.number, "; ".join(t for t in (told, e.why, *e.changed) if t)
            case _:
                pass
    for entry in lineage.run:
        yield entry.what, "", 0, entry.detail


def _prompts(lineage: Lineage) -> Rows:
    trained = {k: s.version for s in reversed(lineage.steps) for k in s.origins}
    dropped = {k: d for d in lineage.dropped for k in d.origins}
    for a in lineage.admitted:
        drop = dropped.get(a.origin)
        yield (
            a.id, a.origin, a.split, a.epoch, a.row, a.min_version, trained.get(a.origin),
            drop and drop.reason, drop and drop.node, drop and drop.detail,
        )  # fmt: skip


def _weights(lineage: Lineage) -> Rows:
    for w in lineage.weights:
        yield w.loop, w.id, w.version, w.fingerprint, (w.parents[0] if w.parents else "")


_TABLES: dict[str, tuple[dict[str, str], Callable[[Lineage], Blocks]]] = {
    "steps": (
        {
            "version": "int64", "node": "string", "batch": "string", "tokens": "int64",
            "staleness_max": "int64", "staleness_mean": "double", "reward_mean": "double", "loss": "double",
            "grad_norm": "double", "metrics": "string",
        },
        _one_by_one(_steps),
    ),
    "rollouts": (
        {
            "id": "string", "group": "string", "number": "int64", "scored": "string", "prompt": "string",
            "row": "int64", "epoch": "int64", "split": "string", "reward": "double", "outcome": "string",
            "reward_version": "string", "length": "int64", "sampled": "int64", "oldest": "int64",
            "newest": "int64", "finish": "string", "temperature": "double", "seed": "int64", "part": "int64",
            "start": "int64", "recorded": "string", "origin": "int64",
            "text_part": "int64", "text_start": "int64", "text_size": "int64", "raw": "double",
        },
        _rollouts,
    ),
    "samples": (
        {
            "version": "int64", "batch": "string", "number": "int64", "scored": "string", "rollout": "string",
            "reward": "double", "origin": "int64", "length": "int64", "advantage_part": "int64",
            "advantage_start": "int64",
        },
        _samples,
    ),
    "prompts": (
        {
            "id": "string", "origin": "int64", "split": "string", "epoch": "int64", "row": "int64",
            "min_version": "int64", "trained_in": "int64", "dropped": "string", "dropped_by": "string",
            "detail": "string",
        },
        _one_by_one(_prompts),
    ),
    "weights": (
        {"loop": "string", "id": "string", "version": "int64", "fingerprint": "string", "batch": "string"},
        _one_by_one(_weights),
    ),
    "events": (
        {"kind": "string", "name": "string", "number": "int64", "detail": "string"},
        _one_by_one(_events),
    ),
}  # fmt: skip
