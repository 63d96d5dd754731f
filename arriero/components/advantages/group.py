"""Advantages of whole responses, from the rewards of a group or of a batch: numpy, float64 in and out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from arriero.components.advantages.temporal import returns_to_go

Baseline = Literal["mean", "leave_one_out", "length_weighted", "none"]
Floats = npt.NDArray[np.float64]


def group_advantage(
    rewards: npt.ArrayLike,
    *,
    baseline: Baseline,
    std: bool = False,
    ddof: Literal[0, 1] = 1,
    eps: float = 1e-6,
    lengths: npt.ArrayLike | None = None,
) -> Floats:
    """Advantage [n] of the n rollouts of one prompt: reward minus `baseline`, over the deviation if `std`.

    mean: GRPO with `std` (arXiv:2402.03300), Dr. GRPO without (arXiv:2503.20783). leave_one_out: the mean
    of the others, RLOO (arXiv:2402.14740); its deviation leaves the same one out. length_weighted: the mean
    weighed by `lengths` [n] in tokens, the baseline of least variance, OPO (arXiv:2505.23585). Deviations
    are over n - `ddof`, `eps` is added to them, and one of exactly 0 divides nothing: a lone success among
    equal others isn't blown up by 1/eps. A constant group has advantage exactly 0 under every baseline.
    ValueError if the group is too small for what is asked, a reward isn't finite, or `lengths` are missing.
    """
    values = np.asarray(rewards, dtype=np.float64)
    _checked(values, needed=_smallest_group(baseline, std))
    if baseline != "none" and (values == values[0]).all():
        return np.zeros_like(values)
    if baseline == "leave_one_out":
        centre, deviation = _without_each(values, std, ddof)
    else:
        centre = _centre(values, baseline, lengths)
        deviation = values.std(ddof=ddof) if std else np.ones(())
    advantage: Floats = values - centre
    if std:
        advantage /= np.where(deviation > 0, deviation + eps, 1.0)
    return advantage


def whitened(values: npt.ArrayLike, *, ddof: Literal[0, 1] = 1, eps: float = 1e-8) -> Floats:
    """`values` [n] with mean 0 and variance 1: over `sqrt(variance + eps)`, the variance over n - `ddof`.

    ValueError for fewer than two values, or one that isn't finite.
    """
    array = np.asarray(values, dtype=np.float64)
    _checked(array, needed=2)
    return np.asarray((array - array.mean()) / np.sqrt(array.var(ddof=ddof) + eps), dtype=np.float64)


def whitened_tokens(
    advantages: Sequence[npt.ArrayLike], *, ddof: Literal[0, 1] = 1, eps: float = 1e-8
) -> list[Floats]:
    """`whitened` over all tokens of a batch, given and returned by sequence.

    REINFORCE++ is this of the discounted returns of a batch, its baseline variant that of `group_advantage`
    on every token (arXiv:2501.03262). Over tokens, so a long response counts for more. A batch of fewer than
    two tokens has no scale and stays as it is.
    """
    arrays = [np.asarray(a, dtype=np.float64) for a in advantages]
    if sum(map(len, arrays)) < 2:
        return arrays
    ends = np.cumsum([len(a) for a in arrays])[:-1]
    return [np.asarray(part) for part in np.split(whitened(np.concatenate(arrays), ddof=ddof, eps=eps), ends)]


def remax_advantage(rewards: npt.ArrayLike, greedy: float) -> Floats:
    """Advantage [n] of one sequence of tokens with rewards [n]: what is still to come minus `greedy`.

    `greedy` is the reward of the response that always takes the likeliest token, on the same prompt.
    Source: ReMax, arXiv:2310.10505.
    """
    return returns_to_go(rewards, gamma=1.0) - greedy


def _centre(values: Floats, baseline: Baseline, lengths: npt.ArrayLike | None) -> npt.NDArray[np.float64]:
    if baseline == "none":
        return np.zeros(())
    if baseline == "mean":
        return np.asarray(values.mean())
    if lengths is None:
        raise ValueError("baseline length_weighted needs the lengths of the responses")
    weights = np.asarray(lengths, dtype=np.float64)
    if weights.shape != values.shape or not (weights > 0).all():
        raise ValueError(f"lengths must be {len(values)} positive numbers, not {weights.tolist()}")
    return np.asarray((weights * values).sum() / weights.sum())


def _smallest_group(baseline: Baseline, std: bool) -> int:
    if baseline == "none":
        return 2 if std else 1
    return 3 if std and baseline == "leave_one_out" else 2


def _without_each(values: Floats, std: bool, ddof: int) -> tuple[Floats, Floats]:
    """Mean and deviation [n] of the group without its i-th member."""
    others = np.stack([np.delete(values, i) for i in range(len(values))])
    return others.mean(axis=1), others.std(axis=1, ddof=ddof) if std else np.ones_like(values)


def _checked(values: Floats, *, needed: int) -> None:
    if values.ndim != 1 or len(values) < needed:
        raise ValueError(
            f"a group of shape {values.shape}: at least {needed} rewards are needed for this advantage"
        )
    if not np.isfinite(values).all():
        raise ValueError(f"rewards must be finite: {values.tolist()}")
