"""Advantages of tokens and turns, from rewards and values over time: numpy, float64 in and out.

Shape suffix: U = utterances (turns of the policy) of one conversation; n tokens or steps of one sequence.
A sequence that was cut off goes on somewhere: `bootstrap` is the value of what would have come, 0 at an end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Targets [n] for the values, and advantages [n] for the policy."""

    targets: Floats
    advantages: Floats


def gae(
    rewards: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    gamma: float,
    lam: float,
    bootstrap: float = 0.0,
    mask: npt.ArrayLike | None = None,
) -> Floats:
    """Generalised advantage [n] of one sequence; add `values` to get the returns.

    With `mask` [n], tokens that the policy didn't sample (a tool's output between two turns) are skipped: the
    next sampled token follows at once, without a discount, and theirs are 0; a reward there counts for the
    sampled token before it. ValueError for unequal lengths.
    Source: arXiv:1506.02438, equation 16.
    """
    reward_n, value_n = _pair(rewards, values)
    if mask is None:
        return _gae(reward_n, value_n, gamma, lam, bootstrap)
    sampled_n = np.asarray(mask, dtype=np.bool_)
    if sampled_n.shape != reward_n.shape:
        raise ValueError(f"mask {sampled_n.shape} and rewards {reward_n.shape} must be of one length")
    advantage_n = np.zeros_like(reward_n)
    if sampled_n.any():
        # Each reward goes to the last sampled token at or before it; what comes before all of them is lost.
        owner_n = np.cumsum(sampled_n) - 1
        earned = np.zeros(int(sampled_n.sum()))
        np.add.at(earned, owner_n[owner_n >= 0], reward_n[owner_n >= 0])
        advantage_n[sampled_n] = _gae(earned, value_n[sampled_n], gamma, lam, bootstrap)
    return advantage_n


def returns_to_go(rewards: npt.ArrayLike, *, gamma: float) -> Floats:
    """Discounted sum [n] of the rewards [n] from each step on."""
    reward_n = np.asarray(rewards, dtype=np.float64)
    return gae(reward_n, np.zeros_like(reward_n), gamma=gamma, lam=1.0)


def vtrace(
    rewards: npt.ArrayLike,
    values: npt.ArrayLike,
    ratios: npt.ArrayLike,
    *,
    gamma: float,
    lam: float = 1.0,
    bootstrap: float = 0.0,
    clip_rho: float = 1.0,
    clip_c: float = 1.0,
    clip_advantage: float | None = 1.0,
) -> Estimate:
    """Targets and advantages of one sequence that another policy sampled; `ratios` [n] are pi/mu.

    `clip_rho` sets whose values are learned, `clip_c` how far corrections reach back, `clip_advantage` the
    weight of a step in the policy gradient; None where the loss weighs by a ratio of its own.
    Source: IMPALA, arXiv:1802.01561, section 4.1; `lam`: its remark 2.
    """
    reward_n, value_n = _pair(rewards, values)
    ratio_n = np.asarray(ratios, dtype=np.float64)
    next_n = np.append(value_n[1:], bootstrap)
    delta_n = np.minimum(ratio_n, clip_rho) * (reward_n + gamma * next_n - value_n)
    trace_n = lam * np.minimum(ratio_n, clip_c)
    error_n, ahead = np.zeros_like(value_n), 0.0
    for t in range(len(value_n) - 1, -1, -1):
        ahead = delta_n[t] + gamma * trace_n[t] * ahead
        error_n[t] = ahead
    target_n = value_n + error_n
    after_n = np.append(lam * target_n[1:] + (1 - lam) * value_n[1:], bootstrap)
    weight_n = np.ones(()) if clip_advantage is None else np.minimum(ratio_n, clip_advantage)
    return Estimate(targets=target_n, advantages=weight_n * (reward_n + gamma * after_n - value_n))


def utterance_td(
    rewards_U: npt.ArrayLike, values_U: npt.ArrayLike, *, gamma: float, bootstrap: float = 0.0
) -> Estimate:
    """One-step temporal differences between the turns of a conversation: `r + gamma V(next) - V`.

    A turn is one action, however many tokens it has; `values_U` are of the state before each turn.
    Source: ArCHer, arXiv:2402.19446.
    """
    reward_U, value_U = _pair(rewards_U, values_U)
    target_U = reward_U + gamma * np.append(value_U[1:], bootstrap)
    return Estimate(targets=target_U, advantages=target_U - value_U)


def utterances(mask: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """The turn [L] that each token belongs to, counted from 0; -1 for tokens the policy didn't sample."""
    sampled_L = np.asarray(mask, dtype=np.bool_)
    begins_L = sampled_L & ~np.append(False, sampled_L[:-1])
    return np.where(sampled_L, np.cumsum(begins_L) - 1, -1)


def on_tokens(values_U: npt.ArrayLike, mask: npt.ArrayLike) -> Floats:
    """Each sampled token [L] gets the value of its turn, others 0; ValueError if there are other turns."""
    value_U, turn_L = np.asarray(values_U, dtype=np.float64), utterances(mask)
    if len(value_U) != turn_L.max(initial=-1) + 1:
        raise ValueError(f"{len(value_U)} values for {turn_L.max(initial=-1) + 1} turns")
    return np.where(turn_L >= 0, np.append(value_U, 0.0)[turn_L], 0.0)


def _gae(reward_n: Floats, value_n: Floats, gamma: float, lam: float, bootstrap: float) -> Floats:
    advantages = np.zeros_like(reward_n)
    ahead, next_value = 0.0, bootstrap
    for t in range(len(reward_n) - 1, -1, -1):
        ahead = reward_n[t] + gamma * next_value - value_n[t] + gamma * lam * ahead
        next_value = value_n[t]
        advantages[t] = ahead
    return advantages


def _pair(rewards: npt.ArrayLike, values: npt.ArrayLike) -> tuple[Floats, Floats]:
    reward_n, value_n = np.asarray(rewards, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if reward_n.shape != value_n.shape or reward_n.ndim != 1:
        raise ValueError(f"rewards {reward_n.shape} and values {value_n.shape} must be of one length")
    return reward_n, value_n
