"""Losses on a ratio of whole sequences. Sequences are never cut, so micro-batches can't change them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass

from arriero.components.losses.clipped import clipped_surrogate, surrogate_is_clipped
from arriero.components.losses.loss import ClipLow, PerSequence, log_ratio, ratio

if TYPE_CHECKING:
    from torch import Tensor

    from arriero.components.packing import PackedTokens


@dataclass(frozen=True, kw_only=True)
class GSPO:
    """The clipped policy gradient on the geometric mean of a sequence's ratios, the same for all its tokens.

    gradient: `through_mean` differentiates that mean, so every token of a sequence gets the same gradient
    (the paper's equation 5, OpenRLHF, TRL); `per_token` keeps its value and gives each token the gradient of
    its own log-probability (the paper's GSPO-token, verl). They agree where the advantage is one number per
    sequence. advantage: `token` uses each token's own, `sequence_mean` the mean over its sequence (AReaL).
    Source: arXiv:2507.18071; aggregated by sequence_mean there.
    """

    low: ClipLow = 3e-4
    high: PositiveFloat = 4e-4
    gradient: Literal["through_mean", "per_token"] = "through_mean"
    advantage: Literal["token", "sequence_mean"] = "token"
    needs_behaviour: ClassVar[bool] = True
    ratio_control: ClassVar[bool] = True

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        ratio_T, advantages_T = self._both(logprobs_T, tokens)
        return clipped_surrogate(ratio_T, advantages_T, low=self.low, high=self.high)

    def clipped(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        ratio_T, advantages_T = self._both(logprobs_T, tokens)
        return surrogate_is_clipped(ratio_T, advantages_T, low=self.low, high=self.high)

    def _both(self, logprobs_T: Tensor, tokens: PackedTokens) -> tuple[Tensor, Tensor]:
        per_sequence = PerSequence(tokens.sequence_T)
        mean_T = per_sequence.spread(per_sequence.mean(log_ratio(logprobs_T, tokens)))
        if self.gradient == "per_token":
            mean_T = mean_T.detach() + logprobs_T - logprobs_T.detach()
        advantages_T = tokens.advantages_T
        if self.advantage == "sequence_mean":
            advantages_T = per_sequence.spread(per_sequence.mean(advantages_T))
        return ratio(mean_T), advantages_T


@dataclass(frozen=True, kw_only=True)
class GMPO:
    """`-A_s * exp(mean_t c_t)`: the geometric mean of a sequence's ratios, each limited before the mean.

    c_t is log(pi/mu) limited to [-low, high] on the side where the limit makes the objective smaller, and A_s
    the mean advantage of the sequence. One extreme token moves the mean by 1/|y| of its limit.
    Source: arXiv:2507.20673; aggregated by sequence_mean there.
    """

    low: PositiveFloat = 0.4
    high: PositiveFloat = 0.4
    needs_behaviour: ClassVar[bool] = True
    ratio_control: ClassVar[bool] = True

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        per_sequence = PerSequence(tokens.sequence_T)
        advantage_T = per_sequence.spread(per_sequence.mean(tokens.advantages_T))
        limited_T = self._limited(log_ratio(logprobs_T, tokens), advantage_T)
        return -advantage_T * per_sequence.spread(ratio(per_sequence.mean(limited_T)))

    def clipped(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        per_sequence = PerSequence(tokens.sequence_T)
        log_ratio_T = log_ratio(logprobs_T, tokens)
        advantage_T = per_sequence.spread(per_sequence.mean(tokens.advantages_T))
        return self._limited(log_ratio_T, advantage_T) != log_ratio_T

    def _limited(self, log_ratio_T: Tensor, advantage_T: Tensor) -> Tensor:
        rising_T, falling_T = log_ratio_T.clamp(max=self.high), log_ratio_T.clamp(min=-self.low)
        return rising_T.where(advantage_T > 0, falling_T)
