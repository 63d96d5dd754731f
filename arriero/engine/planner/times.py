"""How long one firing of a node takes in a simulation, as a function of the firing's number.

The number, not the order of asking, decides: every way to simulate a graph draws the same times.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
_CHUNK = 1 << 16


class Duration(Protocol):
    """Seconds of firings, from a distribution or a record."""

    def draw(self, rng: np.random.Generator, first: int, count: int) -> Array:
        """Seconds of the firings `first`, `first + 1`, ...; `rng` is fresh for this range."""
        ...

    @property
    def mean(self) -> float: ...
    @property
    def least(self) -> float: ...


@dataclass(frozen=True)
class Fixed:
    """Always the same."""

    seconds: float

    def draw(self, rng: np.random.Generator, first: int, count: int) -> Array:
        del rng, first
        return np.full(count, self.seconds)

    @property
    def mean(self) -> float:
        return self.seconds

    @property
    def least(self) -> float:
        return self.seconds


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Times of a recorded run: drawn with replacement, or `in_order`, over and over."""

    seconds: tuple[float, ...]
    in_order: bool = False

    def draw(self, rng: np.random.Generator, first: int, count: int) -> Array:
        values = np.asarray(self.seconds, np.float64)
        drawn: Array = (
            values[(first + np.arange(count)) % len(values)] if self.in_order else rng.choice(values, count)
        )
        return drawn

    @property
    def mean(self) -> float:
        return float(np.mean(self.seconds))

    @property
    def least(self) -> float:
        return min(self.seconds)


@dataclass(frozen=True, kw_only=True)
class LogNormal:
    """A long tail: median `median`, log-deviation `sigma`, cut at `longest`."""

    median: float
    sigma: float
    longest: float = float("inf")

    def draw(self, rng: np.random.Generator, first: int, count: int) -> Array:
        del first
        return np.minimum(self.median * np.exp(self.sigma * rng.standard_normal(count)), self.longest)

    @property
    def mean(self) -> float:
        return float(self.draw(np.random.default_rng(0), 0, 1 << 16).mean())

    @property
    def least(self) -> float:
        return 0.0


ZERO = Fixed(0.0)


class Draws:
    """The times of one node's firings, by number from 0."""

    def __init__(self, duration: Duration, node: str, seed: int) -> None:
        self._duration, self._key = duration, (seed, zlib.crc32(node.encode()))
        self._chunks: dict[int, Array] = {}
        self.constant = duration.seconds if isinstance(duration, Fixed) else None

    def at(self, number: int) -> float:
        return float(self._chunk(number // _CHUNK)[number % _CHUNK])

    def range(self, first: int, count: int) -> Array:
        """Seconds of `count` firings from `first` on."""
        if self.constant is not None:
            return np.full(count, self.constant)
        parts: list[Array] = []
        while count:
            place = first % _CHUNK
            part = self._chunk(first // _CHUNK)[place : place + count]
            parts.append(part)
            first, count = first + len(part), count - len(part)
        return np.concatenate(parts) if parts else np.zeros(0)

    def these(self, numbers: npt.NDArray[np.int64]) -> Array:
        if self.constant is not None:
            return np.full(len(numbers), self.constant)
        out = np.empty(len(numbers))
        chunks = numbers // _CHUNK
        for c in np.unique(chunks):
            where = chunks == c
            out[where] = self._chunk(int(c))[numbers[where] % _CHUNK]
        return out

    def _chunk(self, index: int) -> Array:
        if index not in self._chunks:
            rng = np.random.default_rng([*self._key, index])
            self._chunks[index] = self._duration.draw(rng, index * _CHUNK, _CHUNK)
            if len(self._chunks) > 8:  # numbers rise: the oldest chunk isn't asked for again, or drawn anew
                del self._chunks[min(self._chunks)]
        return self._chunks[index]
