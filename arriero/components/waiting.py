"""Groups on their way into a batch, in the order of arrival or of admission."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from arriero.schemas.messages import Sample


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A scored group as samples, and its id."""

    id: str
    samples: tuple[Sample, ...]


@dataclass(kw_only=True)
class Waiting:
    """Groups that have arrived and are in no batch; `_next` is the smallest number that isn't settled."""

    groups: int
    most: int
    _held: list[tuple[int, Ready]] = field(default_factory=list[tuple[int, Ready]])
    _gone: set[int] = field(default_factory=set[int])
    _next: int = 0

    def add(self, origin: int, group: Ready) -> None:
        self._held.append((origin, group))

    def gone(self, origin: int) -> None:
        self._gone.add(origin)

    def next(self, *, ordered: bool) -> list[Ready]:
        """The groups of the next batch; empty while it isn't known."""
        if len(self._held) < self.groups:
            return []
        if ordered:
            self._held.sort(key=lambda item: item[0])
            if len(self._held) < self.most and not self._unbroken():
                return []
        return self._take()

    def rest(self, *, ordered: bool) -> Iterator[list[Ready]]:
        """What is left at the end of the stream, when no missing number can come any more."""
        if ordered:
            self._held.sort(key=lambda item: item[0])
        while self._held:
            yield self._take()

    def _take(self) -> list[Ready]:
        taken, self._held = self._held[: self.groups], self._held[self.groups :]
        self._next = max(self._next, taken[-1][0] + 1)
        self._gone = {origin for origin in self._gone if origin >= self._next}
        return [group for _, group in taken]

    def _unbroken(self) -> bool:
        """Whether every number from `_next` to the last of the next batch is held or gone."""
        first, last = self._next, self._held[self.groups - 1][0]
        known = {origin for origin, _ in self._held} | self._gone
        return all(origin in known for origin in range(first, last + 1))
