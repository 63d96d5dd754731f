"""A record's rows, kept as Parquet beside it, a shard of the chain at a time.

    chain segments -> shards, each of about 4 MiB of them -> index/<first entry>.{json,events.parquet,...}

`<first entry>.json` names the segments and the Parquet files of its shard with their SHA-256, and the hash of
the chain in front of it. If one of them is otherwise, that shard is made anew; so the chain is gone along
once. The writer of a record keeps each shard when it is full, and the last one when the record is closed; a
reader keeps those that aren't there, and makes the last one of an open record in memory.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pydantic import Field, NonNegativeInt, ValidationError

from arriero.engine.lineage.chain import SEGMENT_BYTES, ChainError, Segment, Walk, lines_of, whole
from arriero.engine.lineage.files import Files
from arriero.engine.lineage.tables import RAW, Rows
from arriero.schemas.lineage import Anchor, Closed, Digest, Reopened
from arriero.schemas.messages import Message

if TYPE_CHECKING:
    import pyarrow as pa

_FORMAT = 2  # of the rows: one more whenever a column changes


class ShardFile(Message):
    """What is said of a shard. `state`: how the record was closed in it; empty if it was opened there again.

    `torn`: bytes behind the last commit, in the last segment of the record. `over`: behind the line that
    `broken` tells of nothing can be read.
    """

    format: int = _FORMAT
    before: Anchor
    after: Anchor
    segments: dict[str, Digest]
    files: dict[str, Digest] = Field(default_factory=dict)
    state: str | None = None
    torn: NonNegativeInt = 0
    broken: str = ""
    over: bool = False


@dataclass(frozen=True)
class Shard:
    """`tables` are in memory if they aren't kept."""

    about: ShardFile
    tables: Mapping[str, pa.Table] | None = None


class _Place:
    """Where in the chain one is; `over` where nothing more can be read."""

    def __init__(self) -> None:
        self.anchor, self.over = Walk().anchor, False

    def go_to(self, anchor: Anchor, *, over: bool) -> None:
        self.anchor, self.over = anchor, over


class Shards:
    """The shards of the record at `url`."""

    def __init__(self, url: str) -> None:
        self._url, self._chain, self.files = url, Files(url, "chain"), Files(url, "index")
        self._full = 0  # shards that `follow` has seen

    def read(self) -> Iterator[Shard]:
        """All, one after the other; what isn't kept yet, and won't change any more, is kept now."""
        for before, digests, segments, last in self._segments():
            about = self._kept(before.anchor, digests, last=last)
            shard = Shard(about) if about else self._made(before.anchor, digests, segments, last=last)
            yield shard
            before.go_to(shard.about.after, over=shard.about.over)

    def compared(self) -> Iterator[tuple[ShardFile, Shard]]:
        """What is kept, as far as a question would use it, and the same as the chain gives it now."""
        for before, digests, segments, last in self._segments():
            shard = made(before.anchor, digests, segments, last=last)
            if (about := self._kept(before.anchor, digests, last=last)) is not None:
                yield about, shard
            before.go_to(shard.about.after, over=shard.about.over)

    def _segments(self) -> Iterator[tuple[_Place, dict[str, str], list[bytes], bool]]:
        """Of each shard what it stands behind, its segments with their hashes, and whether it is the last."""
        groups, place = grouped(self._chain.sizes(".jsonl").items()), _Place()
        for k, names in enumerate(groups):
            segments = [self._chain.read(name) for name in names]
            digests = {n: _sha256(s) for n, s in zip(names, segments, strict=True)}
            yield place, digests, segments, k == len(groups) - 1
            if place.over:
                return

    def table(self, about: ShardFile, name: str) -> pa.Table:
        """One of `RAW` of a shard that is kept. OSError if it isn't there."""
        parquet: Any = import_module("pyarrow.parquet")
        data = self.files.read(f"{_name(about.before)}.{name}.parquet")
        found: pa.Table = parquet.read_table(io.BytesIO(data))
        return found

    def path(self, about: ShardFile, name: str) -> str:
        """Where that is."""
        return f"{self.files.root}/{_name(about.before)}.{name}.parquet"

    def follow(self, segments: Sequence[Segment], *, closed: bool = False) -> None:
        """The chain, of these segments, has grown, by its one writer: keep what is full, or `closed`."""
        groups = grouped((s.name, s.size) for s in segments)
        before = {s.name: s.before for s in segments}
        for names in groups[self._full : None if closed else -1]:
            # Derived: whoever asks makes it. A full disk is told elsewhere, a number beyond 64 bits then.
            with suppress(OSError, OverflowError):
                data = [self._chain.read(name) for name in names]
                digests = {n: _sha256(d) for n, d in zip(names, data, strict=True)}
                self._keep(made(before[names[0]], digests, data, last=closed))
        self._full = len(groups) - 1

    def hurry(self, bound_s: float) -> None:
        """As that of `Files`."""
        for files in (self._chain, self.files):
            files.hurry(bound_s)

    def seen(self, segments: Sequence[Segment]) -> None:
        """What is full of these isn't the writer's any more."""
        self._full = len(grouped((s.name, s.size) for s in segments)) - 1

    # --- the files ----------------------------------------------------------------------------------------

    def _kept(self, before: Anchor, segments: Mapping[str, str], *, last: bool) -> ShardFile | None:
        """What is kept of a shard, if all of it is as it was made from these segments."""
        try:
            about = ShardFile.model_validate_json(self.files.read(f"{_name(before)}.json"))
        except (OSError, ValidationError):
            return None
        if about.format != _FORMAT or about.segments != segments:
            return None
        if about.before != before or {*about.files} != {*RAW} or (about.torn and not last):
            return None
        try:
            whole_files = all(
                _sha256(self.files.read(f"{_name(before)}.{name}.parquet")) == digest
                for name, digest in about.files.items()
            )
        except OSError:
            return None
        return about if whole_files else None

    def _made(
        self, before: Anchor, digests: Mapping[str, str], segments: Sequence[bytes], *, last: bool
    ) -> Shard:
        shard = made(before, digests, segments, last=last)
        if last and not shard.about.state:  # it will grow
            return shard
        try:
            return Shard(self._keep(shard))
        except OSError:  # nobody may write there
            return shard

    def _keep(self, shard: Shard) -> ShardFile:
        """Write it down; what names the others last: what a kill leaves is never taken for a shard."""
        parquet: Any = import_module("pyarrow.parquet")
        name, digests = _name(shard.about.before), dict[str, str]()
        assert shard.tables is not None, "it was just made"
        try:
            for kind, table in shard.tables.items():
                sink = io.BytesIO()
                parquet.write_table(table, sink, compression="zstd")
                digests[kind] = _sha256(sink.getvalue())
                self.files.write(f"{name}.{kind}.parquet", sink.getvalue())
            about = shard.about.model_copy(update={"files": digests})
            self.files.write(f"{name}.json", about.model_dump_json(indent=1).encode())
        except OSError:
            # What is staged would fail all later ones.
            self.files = Files(self._url, "index")
            raise
        return about


def grouped(segments: Iterable[tuple[str, int]]) -> list[list[str]]:
    """The segments of each shard, by their names and sizes: only the last one may be small."""
    found: list[list[str]] = []
    room = 0
    for name, size in segments:
        if room <= 0:
            found.append([])
            room = SEGMENT_BYTES
        found[-1].append(name)
        room -= size
    return found


def made(before: Anchor, digests: Mapping[str, str], segments: Sequence[bytes], *, last: bool) -> Shard:
    """The shard of `segments`, which stand behind `before`; a torn tail of the `last` one is left out."""
    walk, rows = Walk(before.entries, before.head), Rows()
    state: str | None = None
    over = False
    data = list(segments)
    kept = whole(data[-1]) if last else len(data[-1])
    torn, data[-1] = len(data[-1]) - kept, data[-1][:kept]
    try:
        for segment in data:
            for line in lines_of(segment, walk.count):
                entry = walk.take(line)
                if isinstance(entry, Closed):
                    state = entry.state
                elif isinstance(entry, Reopened):
                    state = ""
                if entry is not None:
                    rows.add(line.number, entry)
    except ChainError as error:
        walk.fail(str(error))
        over = True
    about = ShardFile(
        before=before, after=walk.anchor, segments=dict(digests), state=state, torn=torn, broken=walk.broken,
        over=over,
    )  # fmt: skip
    return Shard(about, rows.tables())


def _name(before: Anchor) -> str:
    return f"{before.entries:012d}"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
