"""A data set in blocks: numbered pieces of rows, of which only those in use are in memory.

A block is what can be read at once: a row group of Parquet, a record batch of Arrow, 4 MiB of JSONL. How many
rows each one has is known from the start, so every row has its number, and every block can be read alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from threading import Lock
from typing import IO, Any, Protocol

from arriero.components.formats import Row, arrow_file, json_row, parquet_file, table_rows
from arriero.engine.errors import UserError

LINES_BYTES = 4 << 20

Guard = Callable[[], AbstractContextManager[None]]


class Blocks(Protocol):
    """Rows in blocks; `sizes` are rows."""

    @property
    def sizes(self) -> Sequence[int]: ...
    def read(self, block: int) -> Sequence[Row]:
        """The rows of a block. Raises UserError. May be called from any thread."""
        ...


class Whole:
    """Rows that are there already, as one block."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self.sizes: Sequence[int] = (len(rows),)

    def read(self, block: int) -> Sequence[Row]:
        return self._rows


class Chain:
    """The blocks of several files, one after the other."""

    def __init__(self, parts: Sequence[Blocks]) -> None:
        self._places = [(part, k) for part in parts for k in range(len(part.sizes))]
        self.sizes: Sequence[int] = [n for part in parts for n in part.sizes]

    def read(self, block: int) -> Sequence[Row]:
        part, k = self._places[block]
        return part.read(k)


class _File:
    """An open file and what it is called; one reads at a time, and faults are told by `guard`."""

    def __init__(self, path: str, file: IO[bytes], guard: Guard) -> None:
        self._path, self._file, self._guard, self._lock = path, file, guard, Lock()


class ParquetBlocks(_File):
    """The row groups of a Parquet file."""

    def __init__(self, path: str, file: IO[bytes], guard: Guard) -> None:
        super().__init__(path, file, guard)
        self._reader = parquet_file(path, file)
        about: Any = self._reader.metadata
        self.sizes: Sequence[int] = [int(about.row_group(k).num_rows) for k in range(about.num_row_groups)]
        self._first = [0, *accumulate(self.sizes)]

    def read(self, block: int) -> Sequence[Row]:
        with self._lock, self._guard():
            table = self._reader.read_row_group(block)
        return list(table_rows(self._path, lambda: table, first=self._first[block]))


class ArrowBlocks(_File):
    """The record batches of an Arrow file; each is read once to know its size."""

    def __init__(self, path: str, file: IO[bytes], guard: Guard) -> None:
        super().__init__(path, file, guard)
        self._reader = arrow_file(path, file)
        count = getattr(self._reader, "num_record_batches", None)
        if count is None:
            raise UserError(f"{path}: an Arrow stream is read whole only; write it as an Arrow file")
        self.sizes: Sequence[int] = [int(self._reader.get_batch(k).num_rows) for k in range(count)]
        self._first = [0, *accumulate(self.sizes)]

    def read(self, block: int) -> Sequence[Row]:
        with self._lock, self._guard():
            batch = self._reader.get_batch(block)
        return list(table_rows(self._path, lambda: batch, first=self._first[block]))


class LineBlocks(_File):
    """Pieces of about 4 MiB of a JSONL file, found by reading it once from the beginning to the end."""

    def __init__(self, path: str, file: IO[bytes], guard: Guard, *, block_bytes: int = LINES_BYTES) -> None:
        super().__init__(path, file, guard)
        # For each block: where it begins, the number of its first line, and how many rows it has.
        self._starts, self._lines, sizes = [0], [1], [0]
        place, line = 0, 1
        for text in file:
            if place - self._starts[-1] >= block_bytes:
                self._starts.append(place)
                self._lines.append(line)
                sizes.append(0)
            place, line = place + len(text), line + 1
            sizes[-1] += bool(text.strip())
        self._starts.append(place)
        self.sizes: Sequence[int] = sizes

    def read(self, block: int) -> Sequence[Row]:
        begin, end = self._starts[block], self._starts[block + 1]
        with self._lock, self._guard():
            self._file.seek(begin)
            text = self._file.read(end - begin).decode("utf-8-sig" if not block else "utf-8")
        numbered = enumerate(text.split("\n"), start=self._lines[block])
        return [json_row(f"{self._path}:{n}", line) for n, line in numbered if line.strip()]
