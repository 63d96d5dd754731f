"""Runs a component on records in memory: streams over lists in place of edges."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from arriero.engine.runtime.context import Context, entered
from arriero.engine.stream import Stream
from arriero.schemas.messages import Dropped, Record

T = TypeVar("T")
R = TypeVar("R", bound=Record)


class InOrder(Generic[T]):
    """A stream's source over a list."""

    def __init__(self, records: Iterable[T]) -> None:
        self._records = deque(records)

    async def next(self) -> T | None:
        return self.poll()

    def poll(self) -> T | None:
        return self._records.popleft() if self._records else None

    async def at(self, version: int) -> T:
        raise LookupError(version)


def stream(records: Iterable[R], record: type[R]) -> Stream[R]:
    """The records, then the end of the stream."""
    return Stream("test", record, InOrder(records))


async def outputs(run: AsyncIterator[T | Dropped], first: int | None = None) -> list[T | Dropped]:
    """All that a component yields, or the first so many."""
    found: list[T | Dropped] = []
    if first == 0:
        return found
    async for record in run:
        found.append(record)
        if len(found) == first:
            break
    return found


@contextmanager
def in_admission_order(staleness: int) -> Generator[None, None, None]:
    """What runs inside is part of a deterministic run of this bound."""
    place = Context(
        run_id="test", run_dir=Path(), node="node", replica=0, rank=0, ranks=1, seed=0, deterministic=True,
        staleness=staleness, loop="weights",
    )  # fmt: skip
    with entered(place):
        yield


def kept(records: Iterable[T | Dropped]) -> list[T]:
    return [r for r in records if not isinstance(r, Dropped)]


def dropped(records: Iterable[object]) -> list[Dropped]:
    return [r for r in records if isinstance(r, Dropped)]


class Alone:
    """A component's view of a graph in which `around` feed it."""

    def __init__(self, *around: object, staleness: int | None = None) -> None:
        self._around, self.staleness, self.ranks, self.replicas = around, staleness, 1, 1

    def upstream(self, kind: type[T]) -> list[T]:
        return [c for c in self._around if isinstance(c, kind)]
