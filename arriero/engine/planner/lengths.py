"""Distributions of sequence lengths, as equally likely points: recorded ones, or quantiles of a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
_POINTS = 4096


@dataclass(frozen=True)
class Lengths:
    """Tokens per sequence; `points` are equally likely, in rising order."""

    points: tuple[float, ...]

    def __post_init__(self) -> None:
        if (
            not self.points
            or self.points[0] <= 0
            or any(b < a for a, b in zip(self.points, self.points[1:], strict=False))
        ):
            raise ValueError("lengths must be positive, in rising order, at least one")

    @property
    def mean(self) -> float:
        return math.fsum(self.points) / len(self.points)

    @property
    def mean_square(self) -> float:
        return math.fsum(p * p for p in self.points) / len(self.points)

    @property
    def longest(self) -> float:
        return self.points[-1]

    def quantile(self, share: float) -> float:
        """The length that a `share` of the sequences doesn't exceed."""
        return self.points[min(int(share * len(self.points)), len(self.points) - 1)]

    def expected_longest(self, count: int) -> float:
        """Mean of the longest of `count` sequences: the sum of points times the chance to be the maximum."""
        n = len(self.points)
        edges = (np.arange(n + 1) / n) ** count
        return float(np.dot(np.diff(edges), np.asarray(self.points)))

    def spread(self, count: int) -> Array:
        """`count` lengths in the middle of equal shares of probability, rising: a batch without luck."""
        places = (np.arange(count) + 0.5) / count * len(self.points)
        return np.asarray(self.points, np.float64)[places.astype(np.int64)]

    def sample(self, rng: np.random.Generator, count: int) -> Array:
        return rng.choice(np.asarray(self.points, np.float64), count)


def fixed(tokens: float) -> Lengths:
    return Lengths((float(tokens),))


def recorded(tokens: Sequence[float] | npt.NDArray[Any]) -> Lengths:
    """The lengths of a recorded run, each as likely as it occurred."""
    return Lengths(tuple(sorted(float(t) for t in tokens)))


def log_normal(mean: float, *, sigma: float, longest: float) -> Lengths:
    """A long tail: log-normal of log-deviation `sigma`, cut off at `longest`, with this mean after the cut.

    Raises ValueError if no log-normal cut there has that mean.
    """
    if not 0 < mean < longest:
        raise ValueError(f"mean {mean} must lie between 0 and the longest length {longest}")
    unit = np.exp(sigma * np.array([NormalDist().inv_cdf((i + 0.5) / _POINTS) for i in range(_POINTS)]))
    low, high = mean / 1e3, longest * 1e3
    for _ in range(100):  # the mean after the cut rises with the median: bisection
        middle = math.sqrt(low * high)
        if float(np.minimum(unit * middle, longest).mean()) < mean:
            low = middle
        else:
            high = middle
    return Lengths(tuple(float(v) for v in np.minimum(unit * high, longest)))
