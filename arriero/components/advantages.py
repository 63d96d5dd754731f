"""From rewards to advantages: pure numpy, float64 in and out.

Where published implementations differ, the docstring says which one this is.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

Baseline = Literal["mean", "leave_one_out", "none"]
Floats = npt.NDArray[np.float64]


def group_advantage(
    rewards: npt.ArrayLike, *, baseline: Baseline, std: bool = False, eps: float = 1e-6
) -> Floats:
    """Advantage [n] of the n rollouts of one prompt: reward minus `baseline`, over the deviation if `std`.

    mean: GRPO with `std` (arXiv:2402.03300), Dr. GRPO without (arXiv:2503.20783). leave_one_out: the mean
    of the others, RLOO (arXiv:2402.14740); its deviation leaves the same one out. Deviations are of the
    sample (n - 1), `eps` is added to them, and one of exactly 0 divides nothing: a lone success among equal
    others isn't blown up by 1/eps. A constant group has advantage exactly 0 under both baselines.
    ValueError if the group is too small for what is asked, or a reward isn't finite.
    """
    values = np.asarray(rewards, dtype=np.float64)
    _checked(values, needed=_smallest_group(baseline, std))
    if baseline != "none" and (values == values[0]).all():
        return np.zeros_like(values)
    if baseline == "leave_one_out":
        centre, deviation = _without_each(values, std)
    else:
        centre = values.mean() if baseline == "mean" else np.zeros(())
        deviation = values.std(ddof=1) if std else np.ones(())
    advantage = values - centre
    if not std:
        return advantage
    return advantage / np.where(deviation > 0, deviation + eps, 1.0)


def whitened(values: npt.ArrayLike, *, eps: float = 1e-8) -> Floats:
    """`values` [n] with mean 0 and variance 1: over `sqrt(variance + eps)`, variance of the sample (n - 1).

    REINFORCE++-baseline (arXiv:2501.03262) is this over the tokens of a batch, after `group_advantage`.
    ValueError for fewer than two values, or one that isn't finite.
    """
    array = np.asarray(values, dtype=np.float64)
    _checked(array, needed=2)
    return np.asarray((array - array.mean()) / np.sqrt(array.var(ddof=1) + eps), dtype=np.float64)


def gae(rewards: npt.ArrayLike, values: npt.ArrayLike, *, gamma: float, lam: float) -> Floats:
    """Generalised advantage [n] of one sequence of trained tokens that ends after the last one.

    Add `values` to get the returns. Tokens the policy didn't sample are left out by the caller, so that the
    next sampled token follows at once. ValueError for unequal lengths.
    Source: arXiv:1506.02438, equation 16.
    """
    reward_n, value_n = np.asarray(rewards, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if reward_n.shape != value_n.shape or reward_n.ndim != 1:
        raise ValueError(f"rewards {reward_n.shape} and values {value_n.shape} must be of one length")
    advantages = np.zeros_like(reward_n)
    ahead, next_value = 0.0, 0.0
    for t in range(len(reward_n) - 1, -1, -1):
        ahead = reward_n[t] + gamma * next_value - value_n[t] + gamma * lam * ahead
        next_value = value_n[t]
        advantages[t] = ahead
    return advantages


def _smallest_group(baseline: Baseline, std: bool) -> int:
    if baseline == "none":
        return 2 if std else 1
    return 3 if std and baseline == "leave_one_out" else 2


def _without_each(values: Floats, std: bool) -> tuple[Floats, Floats]:
    """Mean and deviation [n] of the group without its i-th member."""
    others = np.stack([np.delete(values, i) for i in range(len(values))])
    return others.mean(axis=1), others.std(axis=1, ddof=1) if std else np.ones_like(values)


def _checked(values: Floats, *, needed: int) -> None:
    if values.ndim != 1 or len(values) < needed:
        raise ValueError(
            f"a group of shape {values.shape}: at least {needed} rewards are needed for this advantage"
        )
    if not np.isfinite(values).all():
        raise ValueError(f"rewards must be finite: {values.tolist()}")
