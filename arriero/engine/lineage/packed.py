"""Entries in little memory: their JSON in compressed blocks, made again when they are asked for.

An entry as an object takes seven times the bytes of its JSON, and this compresses to a tenth: a million
rollouts take some 50 MB here. What is asked for one after the other is decompressed once; the last few
entries are kept as objects.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Generic, TypeVar, overload

from arriero.schemas.ledger import Event
from arriero.schemas.lineage import ENTRY, Noted

E = TypeVar("E")

_BLOCK_BYTES = 1 << 18
_BLOCKS = 8  # decompressed at a time


class _Bodies:
    """Byte strings by number, in the order in which they came."""

    def __init__(self) -> None:
        zstd: Any = import_module("numcodecs.zstd")
        self._codec: Any = zstd.Zstd(level=1)
        self._blocks: list[bytes] = []
        self._firsts = array("q")  # number of the first of each block
        self._ends = array("q")  # of each, in its block
        self._open = bytearray()
        self._unpacked: OrderedDict[int, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ends)

    def append(self, body: bytes) -> None:
        if not self._open:
            self._firsts.append(len(self))
        self._open += body
        self._ends.append(len(self._open))
        if len(self._open) >= _BLOCK_BYTES:
            self._blocks.append(bytes(self._codec.encode(bytes(self._open))))
            self._open = bytearray()

    def at(self, number: int) -> bytes:
        block = bisect_right(self._firsts, number) - 1
        start = self._ends[number - 1] if number > self._firsts[block] else 0
        return bytes(self._block(block)[start : self._ends[number]])

    def _block(self, block: int) -> bytes | bytearray:
        if block == len(self._blocks):
            return self._open
        if block not in self._unpacked:
            self._unpacked[block] = bytes(self._codec.decode(self._blocks[block]))
            if len(self._unpacked) > _BLOCKS:
                self._unpacked.popitem(last=False)
        self._unpacked.move_to_end(block)
        return self._unpacked[block]


class ById(Mapping[str, E], Generic[E]):
    """The last entry of each id, in the order in which the ids came first. `kept` are held as objects."""

    def __init__(self, kind: type[E], *, kept: int) -> None:
        self._kind, self._kept = kind, kept
        self._bodies = _Bodies()
        self._numbers: dict[str, int] = {}
        self._made: OrderedDict[int, E] = OrderedDict()

    def put(self, name: str, body: bytes) -> None:
        """`body` is the JSON of the entry."""
        self._numbers[name] = len(self._bodies)
        self._bodies.append(body)

    def __getitem__(self, name: str) -> E:
        number = self._numbers[name]
        if number not in self._made:
            entry = ENTRY.validate_json(self._bodies.at(number))
            assert isinstance(entry, self._kind), "it was put here as one"
            self._made[number] = entry
            if len(self._made) > self._kept:
                self._made.popitem(last=False)
        return self._made[number]

    def __contains__(self, name: object) -> bool:
        return name in self._numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


class Events(Sequence[Event]):
    """Events of a ledger, in order; each is made when it is asked for."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._bodies = _Bodies()
        for event in events:
            self.put(Noted(event=event).model_dump_json().encode())

    def put(self, body: bytes) -> None:
        """`body` is the JSON of the entry `Noted`."""
        self._bodies.append(body)

    def __len__(self) -> int:
        return len(self._bodies)

    @overload
    def __getitem__(self, number: int) -> Event: ...
    @overload
    def __getitem__(self, number: slice) -> list[Event]: ...
    def __getitem__(self, number: int | slice) -> Event | list[Event]:
        if isinstance(number, slice):
            return [self[k] for k in range(len(self))[number]]
        entry = ENTRY.validate_json(self._bodies.at(range(len(self))[number]))
        assert isinstance(entry, Noted), "it was put here as one"
        return entry.event
