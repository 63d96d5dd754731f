"""An append-only log of JSON lines, each of which holds the hash of itself and all before it.

    {..., "hash": sha256(hash of the line before + this line without its hash)}

It stands in segments, `chain/<number of the first entry>.jsonl`, at any fsspec URL. Where a file can be
appended to, a segment grows up to 4 MiB; elsewhere each commit is one object. A commit is one write that ends
with a line `committed`; what follows the last of them is a torn tail, cut off when the log is opened again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pydantic import ValidationError

from arriero.engine.lineage.files import FileChangedError, Files
from arriero.schemas.lineage import ENTRY, Anchor, Committed, Entry

GENESIS = "0" * 64
SEGMENT_BYTES = 4 << 20
_SUFFIX = len(b',"hash":""}') + 64
_COMMITTED = b'{"kind":"committed"'


class ChainError(RuntimeError):
    """The log isn't what was written: a line is damaged, missing or out of place."""


@dataclass(frozen=True)
class Line:
    """One entry as it stands in the log: `number` from 0, the JSON without its hash, and its hash."""

    number: int
    body: bytes
    hash: str

    @property
    def entry(self) -> Entry:
        """Raises ValidationError if it is none."""
        return ENTRY.validate_json(self.body)

    @property
    def commits(self) -> bool:
        """Whether it is the end of a commit."""
        return self.body.startswith(_COMMITTED)


@dataclass(frozen=True)
class Segment:
    """A file of the log, of `size` bytes; `before` is what stands in front of it."""

    name: str
    size: int
    before: Anchor


def link(before: str, body: bytes) -> str:
    """The hash of an entry that follows the one with hash `before`."""
    return hashlib.sha256(before.encode() + body).hexdigest()


def lines(url: str) -> Iterator[Line]:
    """All lines in order, hashes unchecked, without a torn tail: what stands after the last commit.

    Raises ChainError for a line before that which isn't whole, with its number.
    """
    files = Files(url, "chain")
    number = 0
    names = files.names(".jsonl")
    for name in names:
        data = files.read(name)
        for line in lines_of(data[: whole(data)] if name == names[-1] else data, number):
            yield line
            number += 1


def lines_of(segment: bytes, number: int) -> Iterator[Line]:
    """The lines of one segment, whose first is entry `number`. Raises ChainError as `lines`."""
    for k, raw in enumerate(segment.splitlines(keepends=True)):
        yield _parsed(raw, number + k)


def whole(segment: bytes) -> int:
    """How many bytes of it stand up to the end of the last commit."""
    kept = end = 0
    for raw in segment.splitlines(keepends=True):
        end += len(raw)
        if raw.startswith(_COMMITTED) and raw.endswith(b'"}\n'):
            kept = end
    return kept


class Walk:
    """Goes along the lines of a chain, from its beginning or from entry `count` behind the hash `head`.

    `broken` says what is the first that doesn't hold; empty while all does.
    """

    def __init__(self, count: int = 0, head: str = GENESIS) -> None:
        self.count, self.head, self.broken = count, head, ""

    @property
    def anchor(self) -> Anchor:
        """The head of the chain, as far as it was gone along."""
        return Anchor(entries=self.count, head=self.head)

    def take(self, line: Line) -> Entry | None:
        """The entry of the next line; None if it is none."""
        if line.hash != link(self.head, line.body):
            self.fail(f"entry {line.number} was changed, or something before it was taken away or put in")
        self.count, self.head = line.number + 1, line.hash
        try:
            return line.entry
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            told = f"{first['loc']}: {first['msg']:.200}"
            if first["loc"] == ("opened", "format"):
                told = f"the record has format {first['input']}, not {first.get('ctx', {}).get('expected')}"
            self.fail(f"entry {line.number} is none that this arriero reads: {told}")
            return None

    def fail(self, why: str) -> None:
        self.broken = self.broken or why


def head_of(url: str) -> str:
    """The hash of the last whole commit, as the last segment says; empty if there is none."""
    files = Files(url, "chain")
    for name in reversed(files.names(".jsonl")):
        for raw in reversed(files.read(name).splitlines(keepends=True)):
            if raw.startswith(_COMMITTED) and raw.endswith(b'"}\n'):
                return _parsed(raw, 0).hash
    return ""


def _parsed(raw: bytes, number: int) -> Line:
    head, mark, tail = raw[: -_SUFFIX - 1], raw[-_SUFFIX - 1 :][:9], raw[-2:]
    if not raw.endswith(b"\n") or mark != b',"hash":"' or tail != b"}\n":
        raise ChainError(f"entry {number} isn't whole: it ends with {raw[-24:]!r}")
    return Line(number, head + b"}", raw[-67:-3].decode(errors="replace"))


class Chain:
    """The log, open for appending by one writer."""

    def __init__(self, url: str) -> None:
        """Makes it, or opens it again and cuts a torn tail off.

        Raises ChainError for any other damage, and if somebody else on this machine has it open.
        """
        self._files = Files(url, "chain")
        self._lock = self._files.locked()  # while this object lives, or until `release`
        if self._lock is None:
            raise ChainError(f"{url} is being written to by another process; wait until its run is over")
        self.cut_bytes = 0
        self.last: Committed | None = None
        self._entries, self._head = 0, GENESIS
        self.segments: list[Segment] = []
        self.reopened = self._resume()

    @property
    def anchor(self) -> Anchor:
        return Anchor(entries=self._entries, head=self._head)

    @property
    def local(self) -> bool:
        """Whether it is in a file system of this host, as far as that knows."""
        return self._files.local

    def commit(self, entries: Sequence[Entry], end: Committed) -> None:
        """Append `entries` and the line that makes them count, in one write."""
        written: list[bytes] = []
        count, head = self._entries, self._head
        for entry in (*entries, end):
            body = entry.model_dump_json().encode()
            head = link(head, body)
            written.append(body[:-1] + b',"hash":"' + head.encode() + b'"}\n')
            count += 1
        data = b"".join(written)
        last = self.segments[-1] if self.segments else None
        if last is None or not self._files.local or last.size >= SEGMENT_BYTES:
            name = f"{self._entries:012d}.jsonl"
            self._files.write(name, data)
            self.segments.append(Segment(name, len(data), self.anchor))
        else:
            try:
                self._files.append(last.name, data, at=last.size)
            except FileChangedError as error:
                raise ChainError(f"somebody else has written to this record: {error}") from error
            self.segments[-1] = replace(last, size=last.size + len(data))
        self._entries, self._head, self.last = count, head, end

    def hurry(self, bound_s: float) -> None:
        """As that of `Files`."""
        self._files.hurry(bound_s)

    def release(self) -> None:
        """Nothing more is written; others may."""
        if self._lock is not None:
            self._lock.close()

    def _resume(self) -> bool:
        """Take up at the last commit; whether there was one."""
        for left in self._files.names(".part"):  # by a kill
            self._files.remove(left)
        if names := self._files.names(".jsonl"):
            self._cut(names[-1])
        head, number = GENESIS, 0
        for name in self._files.names(".jsonl"):
            data = self._files.read(name)
            self.segments.append(Segment(name, len(data), Anchor(entries=number, head=head)))
            for line in lines_of(data, number):
                if line.hash != link(head, line.body):
                    raise ChainError(f"entry {line.number} in {name} doesn't follow from those before it")
                head, number = line.hash, line.number + 1
                if line.commits:
                    entry = line.entry
                    self.last = entry if isinstance(entry, Committed) else self.last
        self._entries, self._head = number, head
        return number > 0

    def _cut(self, name: str) -> None:
        """Take what stands after the last commit off the segment."""
        data = self._files.read(name)
        kept = whole(data)
        self.cut_bytes = len(data) - kept
        if not kept:
            self._files.remove(name)
        elif self.cut_bytes:
            self._files.write(name, data[:kept])
