"""A record, read: its entries in memory, its content from where it stands when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from arriero.engine.lineage.chain import ChainError, Line, Walk, lines
from arriero.engine.lineage.content import (
    SALT_BYTES,
    TOKENS,
    Columns,
    batch_of,
    changed,
    columns,
    group_of,
    pieces,
)
from arriero.engine.lineage.spaces import Spaces
from arriero.engine.runtime.ledger import effective
from arriero.schemas.ledger import Admitted, DroppedEvent, Evaluated, Event, Learned, Resumed, Trained
from arriero.schemas.lineage import (
    Anchor,
    BatchEntry,
    Closed,
    Committed,
    Entry,
    GroupEntry,
    Noted,
    Opened,
    Place,
    RecordEntry,
    Redacted,
    Reopened,
    RunEntry,
    WeightsEntry,
)
from arriero.schemas.messages import Batch, RolloutGroup, ScoredGroup
from arriero.schemas.run import RunOptions

FOLDER = "lineage"
_NOWHERE = Place(part=0, start=0, size=0)


def record_url(place: str) -> str:
    """The record of a run directory, wherever the run put it, or `place` itself if it is the URL of one."""
    path = Path(place)
    if (path / FOLDER).is_dir():
        return str(path / FOLDER)
    try:
        return RunOptions.model_validate_json((path / "options.json").read_bytes()).record_url or place
    except (OSError, ValidationError):
        return place


def no_record(url: str) -> str:
    """What is said where there is none."""
    return f"{url} holds no record; run with --record, and give the run's directory"


class Lineage:
    """The record at a URL, or of a run directory. Raises ChainError if there is none, or a line is damaged.

    Whether the hashes hold is what `broken` says; a question doesn't need the answer, an audit does.
    A torn tail of a run that goes on, or was killed, is left out.
    """

    def __init__(self, place: str) -> None:
        self.url = record_url(place)
        self._spaces = Spaces(self.url)
        self.opened: Opened | None = None
        self.closed: Closed | None = None
        self.events: list[Event] = []  # as they were written
        self.history: list[Event] = []  # those of them that count, since a run that goes on may undo some
        self.groups: dict[str, GroupEntry] = {}  # by the id under which samples name them
        self.batches: dict[str, BatchEntry] = {}  # the last one seen of each id
        self.records: dict[str, RecordEntry] = {}
        self.replaced: list[GroupEntry | BatchEntry | RecordEntry] = []  # made anew since under the same id
        self._weights: dict[tuple[str, int], WeightsEntry] = {}  # by loop and version
        self.run: list[RunEntry] = []
        self.redacted: set[str] = set()  # ids of groups, records and batches of which something is gone
        self.reasons: list[str] = []  # for which
        self.late: list[str] = []  # entries behind the end that have no business there
        self.since: list[str] = []  # what came since the record was first closed
        self.ends: list[
            Anchor
        ] = []  # the heads since the record was closed: at first, and as it was redacted
        self.twice: list[str] = []  # ids recorded more than once on one edge
        self.indexed: list[tuple[Place, list[GroupEntry]]] = []  # what each commit added to the space `index`
        self._fresh: list[GroupEntry] = []  # groups with arrays of their own, since the last commit
        self._arrays: set[tuple[int, int]] = set()
        self._walk = Walk()
        self._edges: set[tuple[str, str]] = set()
        # Versions that a changed trainer, going on without a checkpoint, makes again from recorded batches.
        self._otherwise: set[tuple[str, int]] = set()
        self._reopened = ""  # the entry that opened it again; until the run says that it goes on
        for line in self._whole():
            if (entry := self._walk.take(line)) is not None:
                self._sort(entry)
                self._follow(entry)
        if not self._walk.count:
            raise ChainError(no_record(self.url))

    def _whole(self) -> Iterator[Line]:
        """The lines up to the last commit, or to the first that is damaged."""
        try:
            yield from lines(self.url)
        except ChainError as error:
            self._walk.fail(str(error))

    @property
    def broken(self) -> str:
        """What is the first of the chain that doesn't hold; empty if all does."""
        return self._walk.broken

    def _sort(self, entry: Entry) -> None:
        match entry:
            case Noted():
                self._hear(entry.event)
            case GroupEntry():
                self._once(entry.edge, name := entry.scores.id if entry.scores else entry.id)
                self._replace(self.groups.get(name))
                self.groups[name] = entry
                if (place := (entry.arrays.part, entry.arrays.start)) not in self._arrays:
                    self._arrays.add(place)
                    self._fresh.append(entry)
            case BatchEntry():
                self._once(entry.edge, entry.id)
                self._replace(self.batches.get(entry.id))
                self.batches[entry.id] = entry
            case RecordEntry():
                self._once(entry.edge, entry.id)
                self._replace(self.records.get(entry.id))
                self.records[entry.id] = entry
            case WeightsEntry():
                self._announce(entry)
            case RunEntry():
                self.run.append(entry)
            case Opened():
                self.opened = self.opened or entry
            case Committed() if self._fresh:
                self.indexed.append((entry.ends.get("index", _NOWHERE), self._fresh))
                self._fresh = []
            case _:
                pass

    def _replace(self, before: GroupEntry | BatchEntry | RecordEntry | None) -> None:
        if before is not None:
            self.replaced.append(before)

    def _announce(self, entry: WeightsEntry) -> None:
        """After a crash a version is announced again: the same, with the same weights."""
        key = (entry.loop, entry.version)
        before = self._weights.get(key)
        if before is not None and before.fingerprint != entry.fingerprint and key not in self._otherwise:
            prints = f"{before.fingerprint[:12]} and {entry.fingerprint[:12]}"
            self.twice.append(f"version {entry.version} of {entry.loop}, with weights {prints},")
        self._weights[key] = entry

    def _follow(self, entry: Entry) -> None:
        """Whether the record is over, and what came since."""
        if self._reopened and not isinstance(entry, Reopened):
            if not (isinstance(entry, Noted) and isinstance(entry.event, Resumed)):
                self.late.append(self._reopened)
            self._reopened = ""
        match entry:
            case Closed():
                self.closed = entry
            case Reopened():
                self._reopened = (
                    f"entry {self._walk.count - 1} (reopened, and the run doesn't go on)" if self.ends else ""
                )
                self.closed = None
                told = entry.model_dump(include={"graph_digest", "manifest_sha256", "options_sha256"})
                if self.opened is not None and entry.graph_digest:
                    self.opened = self.opened.model_copy(update=told)
            case Redacted():
                self.redacted.update((*entry.groups, *entry.records, *entry.batches))
                self.reasons.append(entry.reason)
                self.since.append(f"redacted: {entry.reason}")
            case Committed() if self.closed is not None:
                self.ends.append(self.anchor)
            case _ if self.closed is not None:
                self.late.append(f"entry {self._walk.count - 1} ({entry.kind})")
            case _:
                pass

    def _once(self, edge: str, name: str) -> None:
        if (edge, name) in self._edges:
            self.twice.append(f"{name} on {edge}")
        self._edges.add((edge, name))

    @property
    def anchor(self) -> Anchor:
        """The head of the chain, as far as it is whole."""
        return self._walk.anchor

    def _hear(self, event: Event) -> None:
        self.events.append(event)
        if not isinstance(event, Resumed):
            self.history.append(event)
            return
        self.history = effective(self.events)
        changed = "".join(f", {what}" for what in event.changed)
        self.since += [f"went on from {event.versions}{changed}"] if self.ends else []
        newest = max(event.versions.values(), default=0)
        self._weights = {key: w for key, w in self._weights.items() if w.version <= newest}
        self._otherwise = {*self._weights} if event.changed else set()
        self._edges.clear()  # what was under way is made anew, under the same names

    @property
    def resumed(self) -> bool:
        """Whether the run went on after all of it had ended."""
        return any(isinstance(event, Resumed) for event in self.events)

    @property
    def weights(self) -> list[WeightsEntry]:
        """The versions that loops have carried, in the order in which they were first announced."""
        return [*self._weights.values()]

    # --- content ------------------------------------------------------------------------------------------

    @property
    def steps(self) -> list[Trained]:
        return [e for e in self.history if isinstance(e, Trained)]

    @property
    def admitted(self) -> list[Admitted]:
        return [e for e in self.history if isinstance(e, Admitted)]

    @property
    def dropped(self) -> list[DroppedEvent]:
        return [e for e in self.history if isinstance(e, DroppedEvent)]

    @property
    def evaluated(self) -> list[Evaluated]:
        return [e for e in self.history if isinstance(e, Evaluated)]

    def arrays(self, group: GroupEntry) -> Columns:
        """The four token arrays of all its rollouts, one after the other."""
        return self._tokens(group.arrays)

    def text(self, place: Place) -> bytes:
        """The bytes as they stand there, the salt first."""
        return self._spaces.read("text", place, "bytes")["bytes"].tobytes() if place.size else b""

    def index(self, place: Place) -> Columns:
        """What the space `index` says of the rollouts of one commit."""
        return self._spaces.read("index", place, "rows", "rewards")

    def group(self, name: str) -> ScoredGroup | RolloutGroup:
        """The record itself, as it was. KeyError for an unknown id."""
        entry = self.groups[name]
        text = b"" if name in self.redacted else self.text(entry.text)[SALT_BYTES:]
        return group_of(entry, self.arrays(entry), text)

    def changed(self, name: str) -> str:
        """What of a group is otherwise than when it was recorded; empty for nothing. KeyError if unknown."""
        entry = self.groups[name]
        return changed(entry, self.arrays(entry), self.text(entry.text), redacted=name in self.redacted)

    def batch(self, name: str) -> Batch:
        """The batch itself, bit for bit as it passed to the trainer. KeyError for an unknown id."""
        entry = self.batches[name]
        held = {k: self.arrays(self.groups[g]) for k, g in enumerate(entry.groups) if self._needs(entry, k)}
        at = {k: pieces(self.groups[entry.groups[k]].lengths) for k in held}
        own = self.own(entry)
        own_at = iter(pieces(n for n, k in zip(entry.lengths, entry.rollout, strict=True) if k < 0))
        tokens: list[Columns] = []
        for group, rollout in zip(entry.group, entry.rollout, strict=True):
            arrays, piece = (held[group], at[group][rollout]) if rollout >= 0 else (own, next(own_at))
            tokens.append({name: arrays[name][piece] for name in TOKENS})
        return batch_of(entry, tokens, self.advantages(entry), self.reference(entry))

    def own(self, batch: BatchEntry) -> Columns:
        """The token arrays of its samples that are no recorded rollout's, one after the other."""
        return self._tokens(batch.own)

    def advantages(self, batch: BatchEntry) -> npt.NDArray[np.float32]:
        """Of all its samples, one after the other; so is `reference`, of those that have one."""
        return self._values("advantages", batch.advantages)

    def reference(self, batch: BatchEntry) -> npt.NDArray[np.float32]:
        return self._values("reference", batch.reference)

    def trained_batch(self, step: Trained) -> Batch:
        """What the step was made from: its batch without the groups that the trainer dropped as stale."""
        batch = self.batch(step.batch)
        gone = {d.parent for d in self.dropped if d.node == step.node} & {s.group for s in batch.samples}
        return batch.without(frozenset(gone)) if gone else batch

    def learned_batches(self, step: Learned) -> tuple[Batch, ...]:
        """What a node before the trainer learned from, without the groups that it had to leave out."""
        found = [self.batch(name) for name in step.inputs]
        gone = [
            {s.group for s in b.samples if not s.replayed and s.origin not in step.origins} for b in found
        ]
        return tuple(b.without(frozenset(g)) if g else b for b, g in zip(found, gone, strict=True))

    def _tokens(self, place: Place) -> Columns:
        return self._spaces.read("rollouts", place, *TOKENS) if place.size else columns([])

    def _needs(self, entry: BatchEntry, group: int) -> bool:
        return any(g == group and k >= 0 for g, k in zip(entry.group, entry.rollout, strict=True))

    def _values(self, space: str, place: Place) -> npt.NDArray[np.float32]:
        return self._spaces.read(space, place, "values")["values"] if place.size else np.zeros(0, np.float32)
