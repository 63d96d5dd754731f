"""V-MPO's loss: imitation within a bound on the divergence, held by a multiplier that is learned."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass

from arriero.components.losses.loss import Need, Unclipped, log_ratio, ratio

if TYPE_CHECKING:
    from torch import Tensor

    from arriero.components.packing import PackedTokens

# The multiplier stays where it can still act, and can still come back.
_LEAST, _MOST = 1e-8, 1e8


@dataclass(frozen=True, kw_only=True)
class VMPO(Unclipped):
    """`-A log pi + a (r - 1 - log r)` with r = pi/mu: imitation that stays within `eps_kl` of who sampled.

    A are the weights of the best samples (`best_weights`), the second term is KL(mu, pi) of a token, and a is
    learned beside the weights: from `multiplier` on it is multiplied by `exp(rate * (kl / eps_kl - 1))` after
    each update, which climbs `a (kl - eps_kl)` in log a. At the first update on a batch the divergence is 0,
    so several are needed for it to act.
    Source: V-MPO, arXiv:1909.12238, equation 5; the estimate: J. Schulman, k3.
    """

    eps_kl: PositiveFloat = 0.01  # nats per token
    multiplier: PositiveFloat = 1.0
    rate: PositiveFloat = 0.1
    needs_behaviour: ClassVar[bool] = True
    ratio_control: ClassVar[bool] = False
    needs: ClassVar[frozenset[Need]] = frozenset({"multiplier"})

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        if tokens.multiplier is None:
            raise ValueError("this loss needs a multiplier, which the trainer keeps")
        log_ratio_T = log_ratio(logprobs_T, tokens)
        kl_T = ratio(log_ratio_T) - 1 - log_ratio_T
        return -tokens.advantages_T * logprobs_T + tokens.multiplier * kl_T

    def relearned(self, multiplier: float, kl: float) -> float:
        """At most a factor of e up or down at a time."""
        step = max(-1.0, min(1.0, self.rate * (kl / self.eps_kl - 1)))
        return max(_LEAST, min(_MOST, multiplier * math.exp(step)))
