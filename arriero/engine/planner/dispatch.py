"""Which generator replica gets which prompts when lengths are unequal and can be guessed.

Source: StreamRL, arXiv:2504.15930, skewness-aware dispatching: the longest fifth of the samples (as a ranker
sees them) goes to replicas of their own with smaller batches, where a token takes less time; the
split of replicas is found by trying all; inside a replica the longest begin first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from arriero.engine.planner.decoding import Decoder


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """`seconds` until all is sampled; `tail_replicas` take the long ones, `tail_slots` at once each."""

    seconds: float
    tail_replicas: int
    tail_slots: int


def even(
    decoder: Decoder, lengths: Sequence[float], prompt: float, replicas: int, *, seed: int = 0
) -> Dispatch:
    """Every replica gets an equal number at random, in any order."""
    shuffled = np.random.default_rng(seed).permutation(np.asarray(lengths, np.float64))
    shares = [shuffled[k::replicas].tolist() for k in range(replicas)]
    slowest = max(decoder.makespan(share, prompt) for share in shares)
    return Dispatch(seconds=slowest, tail_replicas=0, tail_slots=decoder.slots)


def skew_aware(
    decoder: Decoder, lengths: Sequence[float], prompt: float, replicas: int, *, tail: float = 0.2,
    recall: float = 1.0, seed: int = 0,
) -> Dispatch:  # fmt: skip
    """The longest `tail` apart from the rest, on the number of replicas and the batch that end soonest.

    A ranker finds `recall` of the long ones (StreamRL reports 0.81 to 0.87); the others stay with the short.
    """
    long, rest = _ranked(lengths, tail, recall, seed)
    best = even(decoder, lengths, prompt, replicas, seed=seed)
    for n in range(1, replicas):
        each = math.ceil(len(long) / n)
        for slots in sorted({max(1, each), max(1, each // 2), min(each, decoder.slots)}):
            if slots > decoder.slots:
                continue
            apart = replace(decoder, slots=slots)
            seconds = max(
                _slowest(apart, long, prompt, n),
                _slowest(decoder, rest, prompt, replicas - n),
            )
            if seconds < best.seconds:
                best = Dispatch(seconds=seconds, tail_replicas=n, tail_slots=slots)
    return best


def _ranked(
    lengths: Sequence[float], tail: float, recall: float, seed: int
) -> tuple[list[float], list[float]]:
    """What the ranker takes for long, and the rest, both longest first."""
    order = sorted(lengths, reverse=True)
    count = round(tail * len(order))
    missed = np.random.default_rng(seed).random(count) >= recall
    long = [v for v, miss in zip(order[:count], missed, strict=True) if not miss]
    rest = [v for v, miss in zip(order[:count], missed, strict=True) if miss] + order[count:]
    return long, sorted(rest, reverse=True)


def _slowest(decoder: Decoder, lengths: Sequence[float], prompt: float, replicas: int) -> float:
    """The first replica of a round robin over falling lengths has the longest of each round."""
    return decoder.makespan(lengths[::replicas], prompt) if lengths else 0.0


def balanced(work_a: float, work_b: float, units: int) -> tuple[int, int]:
    """StreamRL's balancing: give unit after unit to the slower of two stages whose time is work over units.

    Raises ValueError for fewer than two units.
    """
    if units < 2:
        raise ValueError(f"{units} units can't be split between two stages")
    a, b = 1, 1
    for _ in range(units - 2):
        if work_a / a >= work_b / b:
            a += 1
        else:
            b += 1
    return a, b
