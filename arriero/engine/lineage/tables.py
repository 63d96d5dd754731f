"""The entries of a record as rows: what questions are asked of (`views`), and nothing that depends on order.

| table      | a row is                                                                                  |
|------------|-------------------------------------------------------------------------------------------|
| `events`   | an event of the ledger or of the run, a version of the weights, a redacted id               |
| `rollouts` | a response, as one node passed it on: prompt, reward, outcome, versions that sampled it,     |
|            | length, place of its arrays; `raw` is the reward before shaping, if that is another; `turns` |
|            | what each turn earned, if it is told apart                                                 |
| `samples`  | a rollout in a batch, its reward there, place of its advantages                              |

`entry` is the number of the entry that a row comes from. What a later entry makes of an earlier one (a run
that went on and undid it, a group made anew) isn't looked at here, so that rows never change.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from arriero.schemas.ledger import (
    Admitted,
    DroppedEvent,
    Evaluated,
    Event,
    Restarted,
    Resumed,
    Scaled,
    Trained,
    Unhealthy,
)  # fmt: skip
from arriero.schemas.lineage import (
    BatchEntry,
    Entry,
    GroupEntry,
    Noted,
    Redacted,
    RunEntry,
    ScoresEntry,
    WeightsEntry,
)

if TYPE_CHECKING:
    import pyarrow as pa

RAW: dict[str, dict[str, str]] = {
    "events": {
        "entry": "int64", "kind": "string", "id": "string", "node": "string", "version": "int64",
        "origins": "int64s", "split": "string", "epoch": "int64", "row": "int64", "reason": "string",
        "detail": "string", "number": "int64", "tokens": "int64", "staleness_max": "int64",
        "staleness_mean": "double", "reward_mean": "double", "loss": "double", "grad_norm": "double",
        "metrics": "string", "fingerprint": "string", "batch": "string",
    },
    "rollouts": {
        "entry": "int64", "passed": "strings",
        "id": "string", "group": "string", "number": "int64", "scored": "string", "prompt": "string",
        "row": "int64", "epoch": "int64", "split": "string", "reward": "double", "outcome": "string",
        "reward_version": "string", "length": "int64", "sampled": "int64", "oldest": "int64",
        "newest": "int64", "finish": "string", "temperature": "double", "seed": "int64", "part": "int64",
        "start": "int64", "recorded": "string", "origin": "int64",
        "text_part": "int64", "text_start": "int64", "text_size": "int64", "raw": "double",
        "turns": "doubles",
    },
    "samples": {
        "entry": "int64", "batch": "string", "number": "int64", "scored": "string", "rollout": "int64",
        "reward": "double", "origin": "int64", "length": "int64", "advantage_part": "int64",
        "advantage_start": "int64",
    },
}  # fmt: skip
_EVENT = tuple(RAW["events"])


def origins_of(group: GroupEntry) -> tuple[int, ...]:
    """The admission numbers it descends from: its prompt's, or its own if it was admitted as it is."""
    return group.prompt.origins or (group.scores.origins if group.scores else group.origins)


class Rows:
    """Rows of the tables `RAW`, one entry after the other."""

    def __init__(self) -> None:
        self._values: dict[str, list[list[Any]]] = {name: [[] for _ in RAW[name]] for name in RAW}

    def add(self, number: int, entry: Entry) -> None:
        """Those of entry `number`."""
        match entry:
            case GroupEntry():
                self._extend("rollouts", _rollouts(number, entry))
            case BatchEntry():
                self._extend("samples", _samples(number, entry))
            case Noted():
                self._event(number, _told(entry.event))
            case WeightsEntry():
                self._event(number, {
                    "kind": "weights", "node": entry.loop, "id": entry.id, "version": entry.version,
                    "fingerprint": entry.fingerprint, "batch": entry.parents[0] if entry.parents else "",
                })  # fmt: skip
            case RunEntry():
                self._event(number, {"kind": "run", "id": entry.what, "detail": entry.detail})
            case Redacted():
                for name in (*entry.groups, *entry.records, *entry.batches):
                    self._event(number, {"kind": "redacted", "id": name, "detail": entry.reason})
            case _:
                pass

    def tables(self) -> dict[str, pa.Table]:
        """All rows so far, as Arrow."""
        import pyarrow as pa

        types: dict[str, pa.DataType] = {
            "int64": pa.int64(), "double": pa.float64(), "string": pa.string(),
            "int64s": pa.list_(pa.int64()),
            "doubles": pa.list_(pa.float64()), "strings": pa.list_(pa.string()),
        }  # fmt: skip
        found: dict[str, pa.Table] = {}
        for name, columns in RAW.items():
            values = zip(self._values[name], columns.values(), strict=True)
            arrays: list[Any] = [pa.array(v, type=types[kind]) for v, kind in values]
            found[name] = pa.Table.from_arrays(arrays, names=list(columns))
        return found

    def _extend(self, name: str, columns: Iterable[Sequence[Any]]) -> None:
        """A block of rows: one at a time takes four times as long."""
        for column, found in zip(self._values[name], columns, strict=True):
            column.extend(found)

    def _event(self, number: int, told: dict[str, Any]) -> None:
        if told:
            told["entry"] = number
            for column, name in zip(self._values["events"], _EVENT, strict=True):
                column.append(told.get(name))


def _rollouts(number: int, g: GroupEntry) -> tuple[Sequence[Any], ...]:
    s, n, p, t = g.scores, len(g.lengths), g.prompt, g.text
    starts = [*accumulate(g.lengths, initial=g.arrays.start)][:n]
    nothing = [None] * n
    return (
        [number] * n, [s.parents if s else ()] * n,
        [f"{g.id}/{k}" for k in range(n)], [g.id] * n, range(n), [s.id if s else ""] * n, [p.id] * n,
        [p.row] * n, [p.epoch] * n, [p.split] * n, s.values if s else nothing,
        [o.value for o in s.outcomes] if s else nothing, [s.reward_version if s else ""] * n, g.lengths,
        g.sampled, g.oldest, g.newest, g.finishes, g.temperatures, g.seeds, [g.arrays.part] * n, starts,
        [f"{g.recorded}/{k}" if g.recorded else "" for k in range(n)],
        [next(iter(origins_of(g)), None)] * n, [t.part] * n, [t.start] * n, [t.size] * n,
        s.raw if s else nothing, _turns(s) if s else nothing,
    )  # fmt: skip


def _turns(scores: ScoresEntry) -> list[Any]:
    return [told.get("turns") for told in scores.more] or [None] * len(scores.values)


def _samples(number: int, b: BatchEntry) -> tuple[Sequence[Any], ...]:
    n = len(b.group)
    starts = [*accumulate(b.lengths, initial=b.advantages.start)][:n]
    return (
        [number] * n, [b.id] * n, range(n), [b.groups[g] for g in b.group], b.rollout, b.rewards, b.origin,
        b.lengths, [b.advantages.part] * n, starts,
    )  # fmt: skip


def _told(e: Event) -> dict[str, Any]:
    """The fields of a row about an event; none for one that no question asks of."""
    match e:
        case Admitted():
            return {
                "kind": e.kind, "id": e.id, "origins": (e.origin,), "split": e.split, "epoch": e.epoch,
                "row": e.row, "version": e.min_version,
            }  # fmt: skip
        case Trained():
            return {
                "kind": e.kind, "node": e.node, "version": e.version, "id": e.batch, "origins": e.origins,
                "tokens": e.tokens, "staleness_max": e.staleness_max, "staleness_mean": e.staleness_mean,
                "reward_mean": e.reward_mean, "loss": e.metrics.get("loss"),
                "grad_norm": e.metrics.get("grad_norm"), "metrics": json.dumps(e.metrics),
            }  # fmt: skip
        case DroppedEvent():
            return {
                "kind": e.kind, "node": e.node, "id": e.parent, "origins": e.origins, "reason": e.reason,
                "detail": e.detail,
            }  # fmt: skip
        case Evaluated():
            return {"kind": e.kind, "id": e.id, "origins": (e.origin,), "version": e.version}
        case Unhealthy():
            found = {"measure": e.measure, "value": e.value, "bound": e.bound}
            return {
                "kind": e.kind, "node": e.node, "version": e.version, "id": e.gate, "reason": e.level,
                "detail": e.detail, "metrics": json.dumps(found),
            }  # fmt: skip
        case Restarted():
            return {"kind": e.kind, "node": e.name, "number": e.number, "detail": e.why}
        case Scaled():
            moved = [f"{e.role}-{k} joined" for k in e.joined] + [f"{e.role}-{k} leaves" for k in e.leaving]
            return {
                "kind": e.kind, "id": e.id, "node": e.role, "number": e.number, "detail": ", ".join(moved),
            }  # fmt: skip
        case Resumed():
            told = ", ".join(f"{node} from version {v}" for node, v in e.versions.items())
            return {
                "kind": e.kind, "number": e.number, "reason": "anew" if e.anew else "",
                "detail": "; ".join(t for t in (told, e.why, *e.changed) if t),
                "metrics": json.dumps(e.versions),
            }  # fmt: skip
        case _:
            return {}
