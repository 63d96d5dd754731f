"""`Stream`: an edge as a component sees it. At build time it only names its producer; in `run` it yields."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Generic, Protocol, TypeVar, cast, runtime_checkable

from arriero.engine.errors import GraphError
from arriero.schemas.messages import Dropped

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Source(Protocol[T_co]):
    """What stands behind a stream while a component runs; the runtime has one for edges and one for loops."""

    async def next(self) -> T_co | None: ...
    def poll(self) -> T_co | None: ...
    async def at(self, version: int) -> T_co: ...


@runtime_checkable
class Announces(Protocol[T_co]):
    """A source that is a loop."""

    async def instead(self, version: int, announced: str, *, exactly: bool = False) -> T_co | None: ...


class Versioned(Protocol):
    """What a loop carries: `version` optimizer steps were taken to make it."""

    @property
    def version(self) -> int: ...


class Stream(Generic[T_co]):
    """Records of one type, in order of arrival; for a loop: versions, of which only the newest counts.

    `async for record in stream` ends with the stream. Outside `run`, reading raises RuntimeError.
    """

    def __init__(self, source: str, record: type[T_co], live: Source[T_co] | None = None) -> None:
        self.source, self.record, self._live = source, record, live

    def __aiter__(self) -> AsyncIterator[T_co]:
        return self

    async def __anext__(self) -> T_co:
        if (record := await self.next()) is None:
            raise StopAsyncIteration
        return record

    async def next(self) -> T_co | None:
        """The next record, waited for; None at the end of the stream.

        Of a loop: a newer version; None when its producer has ended, so that there will be none.
        """
        return await self._running().next()

    def poll(self) -> T_co | None:
        """The next record if it has arrived, else None. Of a loop: the newest version not yet taken."""
        return self._running().poll()

    async def at(self, version: int) -> T_co:
        """Of a loop: exactly this version, waited for.

        Raises LookupError if it is no longer kept, or if the loop's producer has ended without it.
        """
        return await self._running().at(version)

    async def instead(self, version: int, announced: str, *, exactly: bool = False) -> T_co | None:
        """Of a loop: what to take where this version, announced as `announced`, is not to be had any more.

        The same version, announced anew by a producer that started again, or (not `exactly`) a newer one;
        waited for. None when the producer has ended, so that there will be neither.
        """
        live = self._running()
        if not isinstance(live, Announces):
            raise TypeError(f"stream {self.source} is no loop; only a loop has versions")
        loop = cast("Announces[T_co]", live)  # the check at run time knows no parameter
        return await loop.instead(version, announced, exactly=exactly)

    def _running(self) -> Source[T_co]:
        if self._live is None:
            raise RuntimeError(f"stream {self.source} yields only inside run()")
        return self._live


class Loop(Stream[T]):
    """A feedback edge, declared before its producer and closed by it.

    With `staleness` S, no token that reaches the closing component is more than S versions older than the
    version it is about to replace: S = 0 is synchronous, S = 1 is LlamaRL's one-step delay.
    """

    def __init__(self, name: str, record: type[T], staleness: int) -> None:
        super().__init__(name, record)
        self.staleness = staleness
        self.producer: str | None = None

    def close(self, stream: Stream[T | Dropped] | Stream[T]) -> None:
        """Let `stream` give the versions. Raises GraphError if closed already or of another record type."""
        if self.producer is not None:
            raise GraphError(
                f"loop {self.source} is already closed by {self.producer}; a loop has one producer"
            )
        if stream.record is not self.record:
            raise GraphError(
                f"loop {self.source} carries {self.record.__name__}, but {stream.source} gives "
                f"{stream.record.__name__}; close it with a component that gives {self.record.__name__}"
            )
        self.producer = stream.source
