"""Losses per trained token, and the weights that add them up. No torch at import: graph building reads this.

Shape suffix: T = trained tokens of a micro-batch, S = sequences of a batch. Log-probabilities are in nats.

The loss of a step is `sum_t w_t * l_t` over every trained token of the whole batch. A `Loss` gives `l_t` and
`sequence_weights` gives `w_t`, before the batch is cut into micro-batches or over ranks; so neither the cut,
nor the ranks, nor padding can change the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from pydantic import Field, NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass

if TYPE_CHECKING:
    from torch import Tensor

    from arriero.components.packing import PackedTokens

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"]

# exp(20) is far beyond every clip; without the limit an infinite ratio times a zero gradient is NaN.
_MAX_LOG_RATIO = 20.0


@runtime_checkable
class Loss(Protocol):
    """A per-token loss. The two facts are read by the graph check before anything starts.

    needs_behaviour: reads `tokens.behaviour_T`, so every sample must have log-probabilities.
    ratio_control: limits the ratio of policy to behaviour, so data of older versions is safe to train on.
    """

    needs_behaviour: ClassVar[bool]
    ratio_control: ClassVar[bool]

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        """Loss [T] of each trained token, differentiable in `logprobs_T` [T]; TypeError in half precision."""
        ...

    def clipped(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        """Bool [T]: the tokens whose ratio the loss limited."""
        ...


@dataclass(frozen=True, kw_only=True)
class AIPO:
    """`-min(pi/mu, rho) * A * log pi`, the ratio without gradient: policy gradient on stale data.

    The truncation is one-sided: tokens that the policy now finds unlikely keep their small ratio.
    Source: LlamaRL, arXiv:2505.24034.
    """

    rho: PositiveFloat = 2.0
    needs_behaviour: ClassVar[bool] = True
    ratio_control: ClassVar[bool] = True

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        weight_T = _log_ratio(logprobs_T, tokens).detach().exp().clamp(max=self.rho)
        return -weight_T * tokens.advantages_T * logprobs_T

    def clipped(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        return _log_ratio(logprobs_T, tokens).exp() > self.rho


@dataclass(frozen=True, kw_only=True)
class ClippedPolicyGradient:
    """`max(-A r, -A clamp(r, 1 - low, 1 + high))` with r = pi/mu; for A < 0 at most `-A * dual_clip`.

    `low == high` is PPO and GRPO, `high > low` DAPO's clip-higher. `dual_clip` None: no upper limit.
    Source: PPO, arXiv:1707.06347, equation 7; dual clip: arXiv:1912.09729; separate limits: DAPO,
    arXiv:2503.14476.
    """

    low: float = Field(default=0.2, gt=0, lt=1)
    high: PositiveFloat = 0.2
    dual_clip: float | None = Field(default=None, gt=1)
    needs_behaviour: ClassVar[bool] = True
    ratio_control: ClassVar[bool] = True

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        free_T, limited_T = self._both(logprobs_T, tokens)
        loss_T = free_T.maximum(limited_T)
        if self.dual_clip is None:
            return loss_T
        return loss_T.minimum(self._ceiling(tokens)).where(tokens.advantages_T < 0, loss_T)

    def clipped(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        free_T, limited_T = self._both(logprobs_T, tokens)
        clipped_T = limited_T > free_T
        if self.dual_clip is None:
            return clipped_T
        return clipped_T | ((free_T > self._ceiling(tokens)) & (tokens.advantages_T < 0))

    def _both(self, logprobs_T: Tensor, tokens: PackedTokens) -> tuple[Tensor, Tensor]:
        ratio_T = _log_ratio(logprobs_T, tokens).clamp(max=_MAX_LOG_RATIO).exp()
        return -tokens.advantages_T * ratio_T, -tokens.advantages_T * ratio_T.clamp(
            1 - self.low, 1 + self.high
        )

    def _ceiling(self, tokens: PackedTokens) -> Tensor:
        assert self.dual_clip is not None
        return -tokens.advantages_T * self.dual_clip


@dataclass(frozen=True, kw_only=True)
class Reinforce:
    """`-A log pi`: right only on data of the current version.

    Source: Williams 1992, doi:10.1007/BF00992696.
    """

    needs_behaviour: ClassVar[bool] = False
    ratio_control: ClassVar[bool] = False

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        _full_precision(logprobs_T)
        return -tokens.advantages_T * logprobs_T

    def clipped(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        return logprobs_T != logprobs_T


@dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """`-log pi`: supervised; advantages are not read."""

    needs_behaviour: ClassVar[bool] = False
    ratio_control: ClassVar[bool] = False

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        _full_precision(logprobs_T)
        return -logprobs_T

    def clipped(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        return logprobs_T != logprobs_T


def sequence_weights(
    counts_S: npt.NDArray[np.int64], aggregation: Aggregation, *, horizon: NonNegativeFloat = 0
) -> npt.NDArray[np.float64]:
    """Weight [S] of each token of a sequence that has `counts_S` [S] trained tokens; 0 where it has none.

    token_mean: the mean over all tokens (DAPO). sequence_mean: the mean over sequences of their token mean
    (GRPO). sequence_sum: the mean over sequences of their token sum. fixed_length: the same divided by
    `horizon` tokens, whatever the lengths (Dr. GRPO, arXiv:2503.20783). Sequences without trained tokens
    count nowhere. ValueError if nothing is trained, or if `horizon` and `aggregation` don't fit together.
    """
    if (horizon > 0) != (aggregation == "fixed_length"):
        raise ValueError(
            f"aggregation {aggregation!r} with horizon {horizon}: exactly 'fixed_length' takes one, > 0"
        )
    trained_S = counts_S > 0
    if not trained_S.any():
        raise ValueError("trained tokens = 0 in the whole batch: every mask is empty")
    divisor = {
        "token_mean": counts_S.sum(),
        "sequence_mean": trained_S.sum() * np.maximum(counts_S, 1),
        "sequence_sum": trained_S.sum(),
        "fixed_length": trained_S.sum() * horizon,
    }[aggregation]
    return np.asarray(trained_S / divisor, dtype=np.float64)


def _log_ratio(logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
    """log(pi/mu) [T]."""
    _full_precision(logprobs_T)
    if tokens.behaviour_T is None:
        raise ValueError("this loss needs the log-probabilities of the behaviour policy; a sample has none")
    return logprobs_T - tokens.behaviour_T


def _full_precision(logprobs_T: Tensor) -> None:
    if logprobs_T.dtype.itemsize < 4:
        raise TypeError(
            f"log-probabilities are {logprobs_T.dtype}: ratios need float32; convert the logits first"
        )
