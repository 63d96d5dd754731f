"""A record as Arrow tables, for pandas and for SQL.

| table      | a row is                                                                                  |
|------------|-------------------------------------------------------------------------------------------|
| `steps`    | a version that was trained: its batch, staleness, reward, loss and all other measures       |
| `rollouts` | a response: prompt, reward, outcome, versions that sampled it, length, place of its arrays   |
| `samples`  | a rollout in a batch: the step that was made from it, its reward there                       |
| `prompts`  | an admission: row, epoch, and what became of it                                              |
| `weights`  | a version that a loop carried, with its fingerprint                                          |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from arriero.engine.lineage.reader import Lineage
from arriero.schemas.lineage import GroupEntry

if TYPE_CHECKING:
    import pyarrow as pa

NAMES = ("steps", "rollouts", "samples", "prompts", "weights")
Rows = Iterator[tuple[Any, ...]]


def table(lineage: Lineage, name: str) -> pa.Table:
    """One of `NAMES`. Raises KeyError for another name."""
    import pyarrow as pa

    types: dict[str, pa.DataType] = {"int64": pa.int64(), "double": pa.float64(), "string": pa.string()}
    columns, rows = _TABLES[name]
    found = list(rows(lineage))
    values: list[Any] = list(zip(*found, strict=True)) if found else [() for _ in columns]
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


def rollout_id(group: GroupEntry, number: int) -> str:
    """How a question names rollout `number` of a group."""
    return f"{group.id}/{number}"


def origins_of(group: GroupEntry) -> tuple[int, ...]:
    """The admission numbers it descends from: its prompt's, or its own if it was admitted as it is."""
    return group.prompt.origins or (group.scores.origins if group.scores else group.origins)


def _rollouts(lineage: Lineage) -> Rows:
    for g in lineage.groups.values():
        s, start, origin = g.scores, g.arrays.start, next(iter(origins_of(g)), None)
        for k, length in enumerate(g.lengths):
            yield (
                rollout_id(g, k), g.id, k, s.id if s else "", g.prompt.id, g.prompt.row, g.prompt.epoch,
                g.prompt.split, s.values[k] if s else None, s.outcomes[k].value if s else None,
                s.reward_version if s else "", length, g.sampled[k], g.oldest[k], g.newest[k], g.finishes[k],
                g.temperatures[k], g.seeds[k], g.arrays.part, start,
                f"{g.recorded}/{k}" if g.recorded else "", origin, g.text.part, g.text.start, g.text.size,
            )  # fmt: skip
            start += length


def _samples(lineage: Lineage) -> Rows:
    steps = {s.batch: s.version for s in lineage.steps}
    for b in lineage.batches.values():
        ids = [lineage.groups[g].id if g in lineage.groups else "" for g in b.groups]
        for k, (g, r) in enumerate(zip(b.group, b.rollout, strict=True)):
            rollout = f"{ids[g]}/{r}" if r >= 0 else ""
            yield steps.get(b.id), b.id, k, b.groups[g], rollout, b.rewards[k], b.origin[k], b.lengths[k]


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


_TABLES: dict[str, tuple[dict[str, str], Callable[[Lineage], Rows]]] = {
    "steps": (
        {
            "version": "int64", "node": "string", "batch": "string", "tokens": "int64",
            "staleness_max": "int64", "staleness_mean": "double", "reward_mean": "double", "loss": "double",
            "grad_norm": "double", "metrics": "string",
        },
        _steps,
    ),
    "rollouts": (
        {
            "id": "string", "group": "string", "number": "int64", "scored": "string", "prompt": "string",
            "row": "int64",
            "epoch": "int64", "split": "string", "reward": "double", "outcome": "string",
            "reward_version": "string", "length": "int64", "sampled": "int64", "oldest": "int64",
            "newest": "int64", "finish": "string", "temperature": "double", "seed": "int64", "part": "int64",
            "start": "int64", "recorded": "string", "origin": "int64",
            "text_part": "int64", "text_start": "int64", "text_size": "int64",
        },
        _rollouts,
    ),
    "samples": (
        {
            "version": "int64", "batch": "string", "number": "int64", "scored": "string", "rollout": "string",
            "reward": "double", "origin": "int64", "length": "int64",
        },
        _samples,
    ),
    "prompts": (
        {
            "id": "string", "origin": "int64", "split": "string", "epoch": "int64", "row": "int64",
            "min_version": "int64", "trained_in": "int64", "dropped": "string", "dropped_by": "string",
            "detail": "string",
        },
        _prompts,
    ),
    "weights": (
        {"loop": "string", "id": "string", "version": "int64", "fingerprint": "string", "batch": "string"},
        _weights,
    ),
}  # fmt: skip
