"""Losses that are a weight times the log-probability, whoever sampled the data: no ratio, nothing to clip."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass

from arriero.components.losses.loss import Unclipped, full_precision

if TYPE_CHECKING:
    from torch import Tensor

    from arriero.components.packing import PackedTokens


@dataclass(frozen=True, kw_only=True)
class Reinforce(Unclipped):
    """`-A log pi`: right only on data of the current version.

    Source: Williams 1992, doi:10.1007/BF00992696.
    """

    needs_behaviour: ClassVar[bool] = False
    ratio_control: ClassVar[bool] = False

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        full_precision(logprobs_T)
        return -tokens.advantages_T * logprobs_T


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Unclipped):
    """`-log pi`: supervised; advantages are not read."""

    needs_behaviour: ClassVar[bool] = False
    ratio_control: ClassVar[bool] = False
    policy_gradient: ClassVar[bool] = False

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        full_precision(logprobs_T)
        return -logprobs_T


@dataclass(frozen=True, kw_only=True)
class AWR(Unclipped):
    """`-min(exp(A / beta), max_weight) * log pi`: imitates what went better than expected; for recorded data.

    It needs no behaviour log-probabilities and pushes nothing away, so data of any age and origin is safe.
    Source: advantage-weighted regression, arXiv:1910.00177.
    """

    beta: PositiveFloat = 1.0
    max_weight: PositiveFloat = 20.0
    needs_behaviour: ClassVar[bool] = False
    ratio_control: ClassVar[bool] = True
    policy_gradient: ClassVar[bool] = False

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        full_precision(logprobs_T)
        return -awr_weight(tokens.advantages_T, beta=self.beta, max_weight=self.max_weight) * logprobs_T


def awr_weight(advantages_T: Tensor, *, beta: float, max_weight: float) -> Tensor:
    """`min(exp(A / beta), max_weight)` [T], finite for every finite advantage."""
    # Limited before the exponential too, which could overflow.
    return (advantages_T / beta).clamp(max=80.0).exp().clamp(max=max_weight)
