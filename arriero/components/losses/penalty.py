"""What is added to a loss: the divergence from a reference model, and a bonus for entropy.

A sampled estimate has two uses, and they need different things. As a number, k1, k2 and k3 estimate
KL(pi, ref) from a token of pi. As a loss, what counts is the gradient, and that of the expectation is
`E[(log pi - log ref) grad log pi]`: differentiating k1 gives 1 times the score, whose mean is zero, and
differentiating k3 gives the gradient of another divergence. So `kl_penalty` has the value of an estimator and
always that gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from pydantic import ConfigDict, PositiveFloat
from pydantic.dataclasses import dataclass

from arriero.components.losses.loss import (
    Around,
    Loss,
    Need,
    full_precision,
    log_ratio,
    ratio,
    reference,
)

if TYPE_CHECKING:
    from torch import Tensor

    from arriero.components.packing import PackedTokens

Estimator: TypeAlias = Literal["k1", "k2", "k3"]

_REFERENCE: frozenset[Need] = frozenset({"reference"})
_ENTROPY: frozenset[Need] = frozenset({"entropy"})


def kl_estimate(logprobs_T: Tensor, reference_T: Tensor, estimator: Estimator) -> Tensor:
    """Estimate [T] of KL(pi, ref) in nats from tokens sampled by pi, differentiable as the formula stands.

    k1 = log(pi/ref), unbiased, of either sign; k2 = log(pi/ref)^2 / 2, biased, its gradient is right;
    k3 = ref/pi - 1 + log(pi/ref), unbiased, never negative. Never clamped: a clamp has gradient 0 where the
    penalty is needed most. Source: J. Schulman, "Approximating KL divergence" (2020).
    """
    difference_T = logprobs_T - reference_T
    if estimator == "k1":
        return difference_T
    if estimator == "k2":
        return difference_T.square() / 2
    return ratio(-difference_T) - 1 + difference_T


def kl_penalty(
    logprobs_T: Tensor, reference_T: Tensor, estimator: Estimator, *, weight_T: Tensor | None = None
) -> Tensor:
    """`weight * KL` [T]: the value of `estimator`, the gradient `weight * log(pi/ref) * grad log pi`.

    `weight_T`: the ratio of policy to behaviour where another policy sampled the tokens; None is 1.
    """
    difference_T = (logprobs_T - reference_T).detach()
    value_T = kl_estimate(logprobs_T, reference_T, estimator).detach()
    penalty_T = value_T + difference_T * (logprobs_T - logprobs_T.detach())
    return penalty_T if weight_T is None else weight_T.detach() * penalty_T


@dataclass(frozen=True, kw_only=True, config=ConfigDict(arbitrary_types_allowed=True))
class WithKL(Around):
    """`loss + beta * KL(pi, ref)`, from the reference log-probabilities of the samples.

    `rho`: weigh the penalty by the ratio of policy to behaviour, at most `rho`, so that on stale data it is
    the divergence of the policy and not of who sampled. None: weight 1, as on fresh data.
    """

    loss: Loss
    beta: PositiveFloat
    estimator: Estimator = "k3"
    rho: PositiveFloat | None = None

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        full_precision(logprobs_T)
        weight_T = None
        if self.rho is not None:
            weight_T = ratio(log_ratio(logprobs_T, tokens)).clamp(max=self.rho)
        penalty_T = kl_penalty(logprobs_T, reference(tokens), self.estimator, weight_T=weight_T)
        return self.loss(logprobs_T, tokens) + self.beta * penalty_T

    @property
    def needs_behaviour(self) -> bool:  # type: ignore[override]  # that of the loss inside
        return super().needs_behaviour or self.rho is not None

    @property
    def needs(self) -> frozenset[Need]:
        return super().needs | _REFERENCE


@dataclass(frozen=True, kw_only=True, config=ConfigDict(arbitrary_types_allowed=True))
class WithEntropy(Around):
    """`loss - beta * entropy`: of the whole distribution at each token, not an estimate from the sample."""

    loss: Loss
    beta: PositiveFloat

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        full_precision(logprobs_T)
        if tokens.entropy_T is None:
            raise ValueError("an entropy bonus needs the entropy of the policy, which the trainer computes")
        return self.loss(logprobs_T, tokens) - self.beta * tokens.entropy_T

    @property
    def needs(self) -> frozenset[Need]:
        return super().needs | _ENTROPY
