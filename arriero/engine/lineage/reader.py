"""A record, read: its entries packed in memory, its content from where it stands when it is asked for."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

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
from arriero.engine.lineage.packed import ById, Events
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
from arriero.schemas.messages import Batch, Message, RolloutGroup, ScoredGroup
from arriero.schemas.run import RunOptions

FOLDER = "lineage"
E = TypeVar("E", bound=Message)
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
        self.events = Events()  # as they were written
        self.history = self.events  # those of them that count, since a run that goes on may undo some
        self.steps: list[Trained] = []  # of these
        self._left_out: defaultdict[str, set[str]] = defaultdict(set)  # groups that each node dropped
        self.groups = ById(GroupEntry, kept=512)  # by the id under which samples name them
        self.batches = ById(BatchEntry, kept=4)  # the last one seen of each id
        self.records = ById(RecordEntry, kept=64)
        self.replaced: list[GroupEntry | BatchEntry | RecordEntry] = []  # made anew since under the same id
        self._weights: dict[tuple[str, int], WeightsEntry] = {}  # by loop and version
        self.run: list[RunEntry] = []
        self.resumed = False  # whether the run went on after all of it had ended
        self.redacted: set[str] = set()  # ids of groups, records and batches of which something is gone
        self.reasons: list[str] = []  # for which
        self.late: list[str] = []  # entries behind the end that have no business there
        self.since: list[str] = []  # what came since the record was first closed
        # The heads since the record was closed: at first, and as it was redacted.
        self.ends: list[Anchor] = []
        self.twice: list[str] = []  # ids recorded more than once on one edge
        self.indexed: list[tuple[Place, Columns]] = []  # what each commit added to the space `index`
        self._rows: list[
            tuple[int, int, int]
        ] = []  # of groups with arrays of their own, since the last commit
        self._rewards: list[float] = []
        self._arrays: defaultdict[int, set[int]] = defaultdict(set)  # where they start, by part
        self._walk = Walk()
        self._edges: defaultdict[str, set[str]] = defaultdict(set)  # ids that each has carried
        # Versions that a changed trainer, going on without a checkpoint, makes again from recorded batches.
        self._otherwise: set[tuple[str, int]] = set()
        self._reopened = ""  # the entry that opened it again; until the run says that it goes on
        for line in self._whole():
            if (entry := self._walk.take(line)) is not None:
                self._sort(entry, line.body)
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

    def _sort(self, entry: Entry, body: bytes) -> None:
        match entry:
            case Noted():
                self._hear(entry.event, body)
            case GroupEntry():
                self._once(entry.edge, name := entry.scores.id if entry.scores else entry.id)
                self._replace(self.groups.get(name))
                self.groups.put(name, body)
                self._index(entry)
            case BatchEntry():
                self._once(entry.edge, entry.id)
                self._replace(self.batches.get(entry.id))
                self.batches.put(entry.id, body)
            case RecordEntry():
                self._once(entry.edge, entry.id)
                self._replace(self.records.get(entry.id))
                self.records.put(entry.id, body)
            case WeightsEntry():
                self._announce(entry)
            case RunEntry():
                self.run.append(entry)
            case Opened():
                self.opened = self.opened or entry
            case Committed() if self._rows:
                columns = {"rows": np.array(self._rows, np.int64), "rewards": np.array(self._rewards)}
                self.indexed.append((entry.ends.get("index", _NOWHERE), columns))
                self._rows, self._rewards = [], []
            case _:
                pass

    def _index(self, group: GroupEntry) -> None:
        """Its rollouts are in `index`, unless an earlier node's group has the same arrays."""
        part, start = group.arrays.part, group.arrays.start
        if start in self._arrays[part]:
            return
        self._arrays[part].add(start)
        starts = accumulate(group.lengths, initial=start)
        self._rows += [(part, at, length) for at, length in zip(starts, group.lengths, strict=False)]
        self._rewards += group.scores.values if group.scores else (math.nan,) * len(group.lengths)

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
        if name in self._edges[edge]:
            self.twice.append(f"{name} on {edge}")
        self._edges[edge].add(name)

    @property
    def anchor(self) -> Anchor:
        """The head of the chain, as far as it is whole."""
        return self._walk.anchor

    def _hear(self, event: Event, body: bytes) -> None:
        self.events.put(body)
        if not isinstance(event, Resumed):
            if self.history is not self.events:
                self.history.put(body)
            self._count(event)
            return
        self.resumed = True
        self.history = Events(effective(self.events))
        self.steps.clear()
        self._left_out.clear()
        for kept in self.history:
            self._count(kept)
        changed = "".join(f", {what}" for what in event.changed)
        self.since += [f"went on from {event.versions}{changed}"] if self.ends else []
        newest = max(event.versions.values(), default=0)
        self._weights = {key: w for key, w in self._weights.items() if w.version <= newest}
        self._otherwise = {*self._weights} if event.changed else set()
        self._edges.clear()  # what was under way is made anew, under the same names

    def _count(self, event: Event) -> None:
        match event:
            case Trained():
                self.steps.append(event)
            case DroppedEvent():
                self._left_out[event.node].add(event.parent)
            case _:
                pass

    @property
    def weights(self) -> list[WeightsEntry]:
        """The versions that loops have carried, in the order in which they were first announced."""
        return [*self._weights.values()]

    # --- content ------------------------------------------------------------------------------------------

    @property
    def admitted(self) -> Iterator[Admitted]:
        return self._those(Admitted)

    @property
    def dropped(self) -> Iterator[DroppedEvent]:
        return self._those(DroppedEvent)

    @property
    def evaluated(self) -> Iterator[Evaluated]:
        return self._those(Evaluated)

    def _those(self, kind: type[E]) -> Iterator[E]:
        return (event for event in self.history if isinstance(event, kind))

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
        needed = {g for g, k in zip(entry.group, entry.rollout, strict=True) if k >= 0}
        held = {k: self.arrays(self.groups[entry.groups[k]]) for k in sorted(needed)}
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
        return self.left_of(self.batch(step.batch), step)

    def left_of(self, batch: Batch, step: Trained) -> Batch:
        """The same of a batch that was read before."""
        gone = self._left_out[step.node] & {s.group for s in batch.samples}
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

    def _values(self, space: str, place: Place) -> npt.NDArray[np.float32]:
        return self._spaces.read(space, place, "values")["values"] if place.size else np.zeros(0, np.float32)
