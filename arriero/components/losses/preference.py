"""Learning from preferences: a chosen and a rejected response, or single ones that were liked or not.

Shape suffix: P = pairs, S = sequences. Margins are differences of summed log-probabilities, in nats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass

from arriero.components.losses.loss import Need, PerSequence, Unclipped, full_precision, reference

if TYPE_CHECKING:
    from torch import Tensor

    from arriero.components.packing import PackedTokens


def dpo_loss(margin_P: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """`-log sigmoid(beta * margin)` [P]; `label_smoothing` is the probability that a label is wrong.

    margin = log(pi/ref) of the chosen response minus that of the rejected one.
    Source: arXiv:2305.18290, equation 7; with noise: E. Mitchell, "A note on DPO with noisy
    preferences" (2023).
    """
    scaled_P = beta * margin_P
    return -(1 - label_smoothing) * _log_sigmoid(scaled_P) - label_smoothing * _log_sigmoid(-scaled_P)


def ipo_loss(margin_P: Tensor, *, beta: float) -> Tensor:
    """`(margin - 1 / (2 beta))^2` [P]: a finite target for the margin, where DPO's has none.

    Source: arXiv:2310.12036.
    """
    return (margin_P - 1 / (2 * beta)).square()


def kto_loss(
    log_ratio_S: Tensor,
    liked_S: Tensor,
    *,
    kl: float | Tensor,
    beta: float,
    liked: float = 1.0,
    disliked: float = 1.0,
) -> Tensor:
    """`w * (1 - sigmoid(beta * (log(pi/ref) - kl)))` [S], the sign turned for a disliked response.

    `liked_S` bool; `kl` >= 0: KL(pi, ref) on the prompts, without gradient. Weights `liked` and `disliked`.
    Source: arXiv:2402.01306.
    """
    distance_S = beta * (log_ratio_S - kl)
    good_S, bad_S = liked * (1 - distance_S.sigmoid()), disliked * (1 - (-distance_S).sigmoid())
    return good_S.where(liked_S, bad_S)


def bradley_terry_loss(chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    """`-log sigmoid(chosen - rejected)` [P] of two scores: the loss of a reward model.

    Source: arXiv:2203.02155, equation 1.
    """
    return -_log_sigmoid(chosen_P - rejected_P)


@dataclass(frozen=True, kw_only=True)
class DPO(Unclipped):
    """The preference loss of pairs: samples 2i and 2i + 1 of a batch, advantage > 0 on the chosen one.

    Every trained token of a pair has the loss of its pair, so `sequence_mean` is the mean over pairs and the
    right aggregation. kind: `sigmoid` is DPO, `square` is IPO (its margin is of mean log-probabilities per
    token, so that long responses don't reach the target by length). `label_smoothing` belongs to `sigmoid`.
    """

    beta: PositiveFloat = 0.1
    kind: Literal["sigmoid", "square"] = "sigmoid"
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    needs_behaviour: ClassVar[bool] = False
    ratio_control: ClassVar[bool] = True
    needs: ClassVar[frozenset[Need]] = frozenset({"reference"})
    together: ClassVar[int] = 2
    by_sequence: ClassVar[bool] = True
    policy_gradient: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.kind == "square" and self.label_smoothing:
            raise ValueError(f"label_smoothing={self.label_smoothing} isn't read by kind='square'")

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        full_precision(logprobs_T)
        pairs = PerSequence(tokens.sequence_T // 2)
        margin_P = pairs.sum(tokens.advantages_T.sign() * self._share(logprobs_T - reference(tokens), tokens))
        if self.kind == "square":
            return pairs.spread(ipo_loss(margin_P, beta=self.beta))
        return pairs.spread(dpo_loss(margin_P, beta=self.beta, label_smoothing=self.label_smoothing))

    def _share(self, log_ratio_T: Tensor, tokens: PackedTokens) -> Tensor:
        """What each token adds to the margin [T]."""
        if self.kind == "sigmoid":
            return log_ratio_T
        per_sequence = PerSequence(tokens.sequence_T)
        return log_ratio_T / per_sequence.spread(per_sequence.counts_S)


@dataclass(frozen=True, kw_only=True)
class KTO(Unclipped):
    """The preference loss of single responses: liked where the advantage is > 0, disliked where it is < 0.

    A response weighs as much as its advantage is large, times `liked` or `disliked`. Every token has the loss
    of its sequence, so `sequence_mean` is the right aggregation. `kl` is the point from which gains and
    losses are counted, in nats of log(pi/ref); None: what mismatched responses of the batch say of the policy
    of now, without gradient, as in the paper.
    Source: arXiv:2402.01306.
    """

    beta: PositiveFloat = 0.1
    kl: NonNegativeFloat | None = None
    liked: PositiveFloat = 1.0
    disliked: PositiveFloat = 1.0
    needs_behaviour: ClassVar[bool] = False
    ratio_control: ClassVar[bool] = True
    by_sequence: ClassVar[bool] = True
    policy_gradient: ClassVar[bool] = False

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"reference", "kl_baseline"} if self.kl is None else {"reference"})

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        full_precision(logprobs_T)
        if (kl := tokens.kl_baseline if self.kl is None else self.kl) is None:
            raise ValueError("this loss needs kl_baseline, which the trainer computes; or set its kl")
        per_sequence = PerSequence(tokens.sequence_T)
        advantage_S = per_sequence.mean(tokens.advantages_T)
        loss_S = kto_loss(
            per_sequence.sum(logprobs_T - reference(tokens)), advantage_S > 0,
            kl=kl, beta=self.beta, liked=self.liked, disliked=self.disliked,
        )  # fmt: skip
        return per_sequence.spread(advantage_S.abs() * loss_S)


def _log_sigmoid(x: Tensor) -> Tensor:
    return -x.new_zeros(()).logaddexp(-x)
