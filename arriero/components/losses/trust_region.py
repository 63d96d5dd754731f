"""Limits on the ratio that aren't PPO's clip: by divergence, second moment, a soft gate or a square."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass

from arriero.components.losses.loss import ClipLow, PerSequence, Unclipped, behaviour, log_ratio, ratio

if TYPE_CHECKING:
    from torch import Tensor

    from arriero.components.packing import PackedTokens


@dataclass(frozen=True, kw_only=True)
class DPPO:
    """`-min(pi/mu, cap) * A * log pi`, without the tokens that would leave the trust region.

    A token is left out when its probability has moved by more than `high` in the direction of a positive
    advantage, or by more than `low` against it: the total variation of the two-way choice between it and the
    rest. A rare token may change its ratio a lot, a likely one only little.
    Source: arXiv:2602.04879, binary total variation; the cap is its section 5.4.
    """

    low: ClipLow = 0.2
    high: ClipLow = 0.2
    cap: PositiveFloat = 20.0
    needs_behaviour: ClassVar[bool] = True
    ratio_control: ClassVar[bool] = True

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        ratio_T = ratio(log_ratio(logprobs_T, tokens).detach()).clamp(max=self.cap)
        loss_T = -ratio_T * tokens.advantages_T * logprobs_T
        return loss_T.where(~self.clipped(logprobs_T, tokens), 0.0)

    def clipped(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        log_ratio(logprobs_T, tokens)
        moved_T = logprobs_T.detach().exp() - behaviour(tokens).exp()
        return (moved_T > self.high).where(tokens.advantages_T > 0, moved_T < -self.low)


@dataclass(frozen=True, kw_only=True)
class M2PO:
    """`-A pi/mu` without the tokens that make the second moment of log(pi/mu) exceed `second_moment`.

    Of the tokens of a sequence that are being pushed further from the behaviour policy (A > 0 and ratio > 1,
    or A < 0 and ratio < 1), those with the largest `log(pi/mu)^2` are left out until the mean of the rest is
    within the bound. The paper takes that mean over a batch; taken over a sequence it can't depend on how the
    batch is cut.
    Source: arXiv:2510.01161.
    """

    second_moment: PositiveFloat = 0.04
    needs_behaviour: ClassVar[bool] = True
    ratio_control: ClassVar[bool] = True

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        surrogate_T = -tokens.advantages_T * ratio(log_ratio(logprobs_T, tokens))
        return surrogate_T.where(~self.clipped(logprobs_T, tokens), 0.0)

    def clipped(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        log_ratio_T = log_ratio(logprobs_T, tokens).detach()
        outward_T = log_ratio_T * tokens.advantages_T > 0
        square_T = log_ratio_T.square().where(outward_T, 0.0)
        # Sequence by sequence from the smallest square up; tokens that aren't judged come first, with 0.
        order_T = square_T.argsort(stable=True)
        order_T = order_T.index_select(0, tokens.sequence_T.index_select(0, order_T).argsort(stable=True))
        per_sequence = PerSequence(tokens.sequence_T.index_select(0, order_T))
        counted_T = outward_T.index_select(0, order_T).to(square_T.dtype)
        total_T = per_sequence.running(square_T.index_select(0, order_T))
        count_T = per_sequence.running(counted_T)
        over_T = (total_T > self.second_moment * count_T) & (counted_T > 0)
        return over_T.new_zeros(len(over_T)).index_copy(0, order_T, over_T)


@dataclass(frozen=True, kw_only=True)
class SAPO(Unclipped):
    """`-A * 4/tau * sigmoid(tau * (r - 1))` with r = pi/mu: the gradient fades instead of ending at a clip.

    tau is `tau_positive` where A > 0, else `tau_negative`. The gradient is that of r at r = 1.
    Source: arXiv:2511.20347; aggregated by sequence_mean there.
    """

    tau_positive: PositiveFloat = 1.0
    tau_negative: PositiveFloat = 1.05
    needs_behaviour: ClassVar[bool] = True
    ratio_control: ClassVar[bool] = True

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        positive_T = tokens.advantages_T > 0
        tau_T = positive_T * self.tau_positive + ~positive_T * self.tau_negative
        ratio_T = ratio(log_ratio(logprobs_T, tokens))
        return -tokens.advantages_T * 4 / tau_T * (tau_T * (ratio_T - 1)).sigmoid()


@dataclass(frozen=True, kw_only=True)
class DRO(Unclipped):
    """`-A log pi + beta/2 * log(pi/mu)^2`: a square holds the policy near whoever sampled the data.

    Source: direct reward optimisation, arXiv:2405.19107.
    """

    beta: PositiveFloat = 0.5
    needs_behaviour: ClassVar[bool] = True
    ratio_control: ClassVar[bool] = True

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        square_T = log_ratio(logprobs_T, tokens).square()
        return -tokens.advantages_T * logprobs_T + self.beta / 2 * square_T
