"""Importance weights for data of another policy, and the policy gradient under them.

TIS, MIS and IcePop are one idea with three settings: what is weighed (`level`), what is compared with the
bounds (`judged`), and what happens outside of them (`outside`).

    TIS     token   judged token          clamp   IcePop  token  judged token  zero, both bounds
    TIS     sequence_product              clamp   MIS     token  judged token or sequence_*  zero
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator
from pydantic.dataclasses import dataclass

from arriero.components.losses.loss import ClipLow, PerSequence, log_ratio, ratio

if TYPE_CHECKING:
    from torch import Tensor

    from arriero.components.packing import PackedTokens

Level: TypeAlias = Literal["token", "sequence_product", "sequence_geometric"]
Judged: TypeAlias = Literal["level", "token", "sequence_product", "sequence_geometric", "every_token"]


@dataclass(frozen=True, kw_only=True)
class ImportanceWeight:
    """A weight without gradient from a log-ratio, limited to [lower, upper].

    level: the ratio of the token, of its sequence (the product over its tokens, unbiased and of high
    variance), or the geometric mean over its tokens. judged: the ratio that is compared with the bounds, if
    another one; every_token: a sequence is outside as soon as one of its tokens is. outside: `clamp` to the
    bound (TIS), or `zero`: what is outside isn't trained on (MIS, IcePop).
    Source: TIS, "Your efficient RL framework secretly brings you off-policy RL training", Yao et al. 2025;
    IcePop, arXiv:2510.18855; sequence masks, "When speed kills stability", Liu et al. 2025.
    """

    upper: PositiveFloat = 2.0
    lower: NonNegativeFloat = 0.0
    level: Level = "token"
    judged: Judged = "level"
    outside: Literal["clamp", "zero"] = "clamp"

    @model_validator(mode="after")
    def _consistent(self) -> ImportanceWeight:
        if self.lower >= self.upper:
            raise ValueError(f"lower={self.lower} must be less than upper={self.upper}")
        if self.outside == "clamp" and self.judged not in ("level", self.level):
            raise ValueError(
                f"judged={self.judged} decides what is zeroed; outside='clamp' limits the weight itself"
            )
        return self

    def __call__(self, log_ratio_T: Tensor, tokens: PackedTokens) -> Tensor:
        """Weight [T]; exactly 1 where `log_ratio_T` [T] is 0 throughout."""
        weight_T = ratio(self._at(self.level, log_ratio_T, tokens))
        if self.outside == "clamp":
            return weight_T.clamp(self.lower, self.upper)
        return weight_T.where(self.inside(log_ratio_T, tokens), 0.0)

    def inside(self, log_ratio_T: Tensor, tokens: PackedTokens) -> Tensor:
        """Bool [T]: the tokens whose judged ratio lies within the bounds, these included."""
        if self.judged == "every_token":
            per_sequence = PerSequence(tokens.sequence_T)
            outside_T = ~self._within(log_ratio_T.detach())
            return per_sequence.spread(per_sequence.sum(outside_T.to(log_ratio_T.dtype))) == 0
        return self._within(
            self._at(self.level if self.judged == "level" else self.judged, log_ratio_T, tokens)
        )

    def _within(self, log_ratio_T: Tensor) -> Tensor:
        ratio_T = ratio(log_ratio_T)
        return (ratio_T >= self.lower) & (ratio_T <= self.upper)

    def _at(self, level: Level, log_ratio_T: Tensor, tokens: PackedTokens) -> Tensor:
        log_ratio_T = log_ratio_T.detach()
        if level == "token":
            return log_ratio_T
        per_sequence = PerSequence(tokens.sequence_T)
        reduce = per_sequence.sum if level == "sequence_product" else per_sequence.mean
        return per_sequence.spread(reduce(log_ratio_T))


def of_mean_one(weight_T: Tensor) -> Tensor:
    """`weight_T` [T] divided by its mean: self-normalised weights, of less variance and biased.

    For all tokens of a step at once. No loss has it as an option: within a micro-batch the mean would be
    another one, and the result would depend on how the batch is cut.
    """
    return weight_T / weight_T.mean()


@dataclass(frozen=True, kw_only=True)
class ImportanceWeighted:
    """`-w * A * log pi`, with w the limited ratio of policy to behaviour: TIS, MIS or IcePop by `weight`.

    AIPO is the case that clamps the ratio of the token from above alone.
    """

    weight: ImportanceWeight = Field(default_factory=ImportanceWeight)
    needs_behaviour: ClassVar[bool] = True
    ratio_control: ClassVar[bool] = True

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        return -self.weight(log_ratio(logprobs_T, tokens), tokens) * tokens.advantages_T * logprobs_T

    def clipped(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        return ~self.weight.inside(log_ratio(logprobs_T, tokens), tokens)


@dataclass(frozen=True, kw_only=True)
class AIPO:
    """`-min(pi/mu, rho) * A * log pi`, the ratio without gradient: policy gradient on stale data.

    The truncation is one-sided: tokens that the policy now finds unlikely keep their small ratio, and a token
    whose ratio is truncated keeps its gradient, with weight rho.
    Source: LlamaRL, arXiv:2505.24034.
    """

    rho: PositiveFloat = 2.0
    needs_behaviour: ClassVar[bool] = True
    ratio_control: ClassVar[bool] = True

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        weight_T = log_ratio(logprobs_T, tokens).detach().exp().clamp(max=self.rho)
        return -weight_T * tokens.advantages_T * logprobs_T

    def clipped(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        return log_ratio(logprobs_T, tokens).exp() > self.rho


@dataclass(frozen=True, kw_only=True)
class CISPO:
    """`-clamp(pi/mu, 1 - low, 1 + high) * A * log pi`, without gradient of the ratio.

    `low` None: no lower bound. Every token keeps a gradient; only its weight is limited. TRL writes the upper
    bound itself where this says `1 + high`.
    Source: MiniMax-M1, arXiv:2506.13585.
    """

    low: ClipLow | None = None
    high: PositiveFloat = 1.0
    needs_behaviour: ClassVar[bool] = True
    ratio_control: ClassVar[bool] = True

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        ratio_T = ratio(log_ratio(logprobs_T, tokens).detach())
        return -ratio_T.clamp(self._lower, 1 + self.high) * tokens.advantages_T * logprobs_T

    def clipped(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        ratio_T = ratio(log_ratio(logprobs_T, tokens))
        return (ratio_T > 1 + self.high) | (ratio_T < self._lower)

    @property
    def _lower(self) -> float:
        return 0.0 if self.low is None else 1 - self.low
