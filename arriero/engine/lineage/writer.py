"""The writer of a record: content into the spaces first, then its entries onto the chain, in one commit.

Killed at any moment, a record holds whole commits: an entry counts when the line `committed` stands after it,
and by then all content that it names is stored. The next writer takes up there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from arriero.engine.lineage.chain import Chain, ChainError, lines
from arriero.engine.lineage.files import PATIENCE_S
from arriero.engine.lineage.gathering import Gathering, Known
from arriero.engine.lineage.shards import Shards
from arriero.engine.lineage.spaces import Spaces
from arriero.engine.patience import Patience
from arriero.schemas.ledger import Event, Resumed
from arriero.schemas.lineage import (
    Anchor,
    BatchEntry,
    Closed,
    Committed,
    Entry,
    GroupEntry,
    Noted,
    Opened,
    RecordEntry,
    Reopened,
    RunEntry,
    RunState,
    WeightsEntry,
)
from arriero.schemas.messages import Batch, Record

T = TypeVar("T")
_RECENT = 1 << 14  # groups in which samples are looked for; ids that are known when they come again


@dataclass(frozen=True)
class Seen:
    """A record as it passed on `edge`; for a version of the weights, the loop."""

    edge: str
    record: Record


Item = Seen | Event | RunEntry


class LineageWriter:
    """One per record at a time; not for several threads at once."""

    def __init__(self, url: str, opened: Opened, resumed: Resumed | None = None) -> None:
        """Begin the record at `url`, or take it up where the last whole commit ended.

        `resumed`: the run goes on from there, and that is the next entry.
        Raises ChainError if the record is damaged or of another run.
        """
        self._patience = Patience(f"the store of the record {url}", PATIENCE_S)
        self._late = False
        self._chain = Chain(url)
        last = self._chain.last
        self._spaces = Spaces(url, last.ends if last else None)
        self._shards = Shards(url)
        self._shards.seen(self._chain.segments)
        self._groups: OrderedDict[str, Known] = OrderedDict()
        self._ids: OrderedDict[tuple[str, str], None] = OrderedDict()
        if not self._chain.reopened:
            self._write([opened])
            return
        self._spaces.trim()
        for line in lines(url):
            entry = line.entry
            if isinstance(entry, Opened) and entry.run_id != opened.run_id:
                raise ChainError(f"{url} holds the record of run {entry.run_id}")
            self._remember(entry)
        again = Reopened(
            cut_bytes=self._chain.cut_bytes, graph_digest=opened.graph_digest,
            manifest_sha256=opened.manifest_sha256, options_sha256=opened.options_sha256,
        )  # fmt: skip
        entries: list[Entry] = [again, *([Noted(event=resumed)] if resumed else [])]
        self._write(entries)
        for entry in entries:
            self._remember(entry)

    @property
    def anchor(self) -> Anchor:
        """The head of the chain as it is now."""
        return self._chain.anchor

    def knows(self, edge: str, id: str) -> bool:
        """Whether the record has `id` of `edge`; only the last few thousand are remembered."""
        return (edge, id) in self._ids

    def commit(self, items: Sequence[Item]) -> None:
        """Store `items` in this order; when it returns they are there for good, whoever is killed.

        A batch whose groups came before it, or come in the same call, costs its advantages alone; the arrays
        of a sample that isn't known are stored once more.
        Raises OSError; TimeoutError if the store doesn't answer, and then nothing more can be written.
        """
        if items:
            self._patiently("take a commit", lambda: self._commit(items))

    def hurry(self, bound_s: float) -> None:
        """The run is to be over: what isn't stored `bound_s` from now is let go."""
        for part in (self._patience, self._chain, self._spaces, self._shards):
            part.hurry(bound_s)

    def _patiently(self, what: str, work: Callable[[], T]) -> T:
        """A commit is one call where the store is local: it is short there, with many calls of files."""
        if self._late:  # its thread may still be at it
            raise TimeoutError(f"{self._patience.name} hasn't answered before, so it isn't asked to {what}")
        try:
            return self._patience.call(what, work) if self._chain.local else work()
        except TimeoutError:
            self._late = True
            raise

    def _commit(self, items: Sequence[Item]) -> None:
        work = Gathering(self._groups)
        for item in _groups_first(items):
            match item:
                case Seen():
                    work.add(item.edge, item.record)
                case RunEntry():
                    work.add_entry(item)
                case _:
                    work.add_entry(Noted(event=item))
        starts = {space: self._spaces.append(space, arrays) for space, arrays in work.content()}
        if (index := work.index(starts)) is not None:
            self._spaces.append("index", index)
        entries = [make(starts) for make in work.makers]
        self._write(entries)
        for entry in entries:
            self._remember(entry)
        for name, known in work.fresh.items():
            known.place = known.at(starts)
            _keep(self._groups, name, known)

    def close(
        self, state: RunState, items: Sequence[Item] = (), *, model: Mapping[str, str] | None = None
    ) -> Anchor:
        """The last commit, which says that the run is over; the head to be kept elsewhere.

        `model`: hashes of the model's files, see `Closed`.
        """
        self.commit(items)
        self._patiently("be closed", lambda: self._close(Closed(state=state, model=dict(model or {}))))
        return self.anchor

    def _close(self, closed: Closed) -> None:
        self._write([closed])
        self._shards.follow(self._chain.segments, closed=True)
        self._chain.release()

    def _write(self, entries: Sequence[Entry]) -> None:
        self._spaces.settle()
        self._chain.commit(entries, Committed(ends=self._spaces.ends))
        self._shards.follow(self._chain.segments)

    def _remember(self, entry: Entry) -> None:
        match entry:
            case GroupEntry():
                _keep(self._ids, (entry.edge, entry.scores.id if entry.scores else entry.id), None)
            case BatchEntry() | RecordEntry():
                _keep(self._ids, (entry.edge, entry.id), None)
            case WeightsEntry():
                _keep(self._ids, (entry.loop, entry.id), None)
            case Noted() if isinstance(entry.event, Resumed):  # what was under way is made anew
                self._ids.clear()
                self._groups.clear()
            case _:
                pass


def _groups_first(items: Iterable[Item]) -> list[Item]:
    """Batches after everything else, so that their samples find their rollouts; else in order."""
    return sorted(items, key=lambda item: isinstance(item, Seen) and isinstance(item.record, Batch))


def _keep(found: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    found[key] = value
    found.move_to_end(key)
    if len(found) > _RECENT:
        found.popitem(last=False)
