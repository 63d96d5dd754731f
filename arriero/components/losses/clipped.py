"""The clipped policy gradient, on the ratio to the behaviour policy or to the policy before the update."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, PositiveFloat
from pydantic.dataclasses import dataclass

from arriero.components.losses.importance import ImportanceWeight
from arriero.components.losses.loss import (
    ClipLow,
    DualClip,
    Need,
    behaviour,
    full_precision,
    log_ratio,
    proximal,
    ratio,
)

if TYPE_CHECKING:
    from torch import Tensor

    from arriero.components.packing import PackedTokens


@dataclass(frozen=True, kw_only=True)
class ClippedPolicyGradient:
    """`max(-A r, -A clamp(r, 1 - low, 1 + high))` with r = pi/mu; for A < 0 at most `-A * dual_clip`.

    `low == high` is PPO and GRPO, `high > low` DAPO's clip-higher. `dual_clip` None: no upper limit.
    Source: PPO, arXiv:1707.06347, equation 7; dual clip: arXiv:1912.09729; separate limits: DAPO,
    arXiv:2503.14476.
    """

    low: ClipLow = 0.2
    high: PositiveFloat = 0.2
    dual_clip: DualClip = None
    needs_behaviour: ClassVar[bool] = True
    ratio_control: ClassVar[bool] = True

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        ratio_T = ratio(log_ratio(logprobs_T, tokens))
        return clipped_surrogate(
            ratio_T, tokens.advantages_T, low=self.low, high=self.high, dual_clip=self.dual_clip
        )

    def clipped(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        ratio_T = ratio(log_ratio(logprobs_T, tokens))
        return surrogate_is_clipped(
            ratio_T, tokens.advantages_T, low=self.low, high=self.high, dual_clip=self.dual_clip
        )


@dataclass(frozen=True, kw_only=True)
class DecoupledPPO:
    """PPO's clip around the policy before the update, times the weight of that policy over the behaviour.

    `w(pi_prox/mu) * max(-A r, -A clamp(r, 1 - low, 1 + high))` with r = pi/pi_prox: how far an update may go
    doesn't depend on how old the data is, and the age is corrected by `weight` (TIS, MIS or IcePop). The
    trainer computes the proximal log-probabilities before the first update on a batch; with a single update
    r is 1, and nothing is clipped.
    Source: decoupled objective, arXiv:2110.00641; for language models AReaL, arXiv:2505.24298.
    """

    low: ClipLow = 0.2
    high: PositiveFloat = 0.2
    weight: ImportanceWeight = Field(default_factory=ImportanceWeight)
    needs_behaviour: ClassVar[bool] = True
    ratio_control: ClassVar[bool] = True
    needs: ClassVar[frozenset[Need]] = frozenset({"proximal"})

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        weight_T = self.weight(proximal(tokens) - behaviour(tokens), tokens)
        surrogate_T = clipped_surrogate(
            self._ratio(logprobs_T, tokens), tokens.advantages_T, low=self.low, high=self.high
        )
        return weight_T * surrogate_T

    def clipped(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        outside_T = ~self.weight.inside(proximal(tokens) - behaviour(tokens), tokens)
        ratio_T = self._ratio(logprobs_T, tokens)
        return outside_T | surrogate_is_clipped(ratio_T, tokens.advantages_T, low=self.low, high=self.high)

    def _ratio(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        full_precision(logprobs_T)
        return ratio(logprobs_T - proximal(tokens))


def clipped_surrogate(
    ratio_T: Tensor, advantages_T: Tensor, *, low: float, high: float, dual_clip: float | None = None
) -> Tensor:
    """`max(-A r, -A clamp(r, 1 - low, 1 + high))` [T]; where A < 0 at most `-A * dual_clip`."""
    limited_T = ratio_T.clamp(1 - low, 1 + high)
    loss_T = (-advantages_T * ratio_T).maximum(-advantages_T * limited_T)
    if dual_clip is None:
        return loss_T
    return loss_T.minimum(-advantages_T * dual_clip).where(advantages_T < 0, loss_T)


def surrogate_is_clipped(
    ratio_T: Tensor, advantages_T: Tensor, *, low: float, high: float, dual_clip: float | None = None
) -> Tensor:
    """Bool [T]: where `clipped_surrogate` isn't `-A r`."""
    clipped_T = -advantages_T * ratio_T.clamp(1 - low, 1 + high) > -advantages_T * ratio_T
    if dual_clip is None:
        return clipped_T
    return clipped_T | ((ratio_T > dual_clip) & (advantages_T < 0))
