"""Weights of the best samples of a batch, as V-MPO takes them: numpy, float64 in and out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_HALVINGS = 100


def best_weights(advantages: npt.ArrayLike, *, eps: float, fraction: float = 0.5) -> Floats:
    """Weights [n] that sum to 1: softmax(A / t) of the `fraction` largest advantages, 0 of the others.

    t is where the weights are `eps` nats (KL) from equal ones, which is where the loss of V-MPO's learned
    temperature has its minimum; if no t is so low, the largest advantages share everything. Of equal
    advantages the earlier ones count as larger. ValueError for no advantage or one that isn't finite.
    Source: V-MPO, arXiv:1909.12238, equations 3 and 4.
    """
    values = np.asarray(advantages, dtype=np.float64)
    if values.ndim != 1 or not values.size or not np.isfinite(values).all():
        raise ValueError(f"advantages must be finite, at least one of them: {values.tolist()}")
    kept = np.argsort(-values, kind="stable")[: max(1, round(fraction * len(values)))]
    below = values[kept] - values[kept].max()
    weights = np.zeros_like(values)
    weights[kept] = _at_distance(below, eps)
    return weights


def _at_distance(below: Floats, eps: float) -> Floats:
    """softmax(below / t) [k], `eps` nats from equal weights; `below` [k] <= 0, its maximum 0."""
    ties = (below == 0).astype(np.float64)
    spread = -float(below.min())
    if eps >= np.log(len(below) / ties.sum()):
        return np.asarray(ties / ties.sum())
    low, high = np.log(spread) - 50.0, np.log(spread) + 50.0  # of log t: the distance falls as t rises
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _distance(_softmax(below / np.exp(middle))) > eps else (low, middle)
    return _softmax(below / np.exp(high))


def _softmax(x: Floats) -> Floats:
    powers = np.exp(x)
    return np.asarray(powers / powers.sum())


def _distance(weights: Floats) -> float:
    """KL [nats] of `weights` [k] from equal ones."""
    some = weights[weights > 0]
    return float((some * np.log(some * len(weights))).sum())
