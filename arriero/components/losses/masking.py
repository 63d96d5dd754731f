"""Sequences that have become too unlikely are not pushed further down."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ConfigDict, PositiveFloat
from pydantic.dataclasses import dataclass

from arriero.components.losses.loss import Around, Loss, PerSequence, log_ratio

if TYPE_CHECKING:
    from torch import Tensor

    from arriero.components.packing import PackedTokens


@dataclass(frozen=True, kw_only=True, config=ConfigDict(arbitrary_types_allowed=True))
class OffPolicyMask(Around):
    """`loss` without the tokens with A < 0 of sequences whose mean log(mu/pi) exceeds `delta` nats.

    Such a sequence is one that the policy would hardly sample any more: what is wrong with it is learned, and
    its large ratios to the behaviour policy only add variance. `ratio_control` is that of the loss inside.
    Source: off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556.
    """

    loss: Loss
    delta: PositiveFloat = 0.1

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        return self.loss(logprobs_T, tokens).where(~self.masked(logprobs_T, tokens), 0.0)

    def clipped(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        return super().clipped(logprobs_T, tokens) | self.masked(logprobs_T, tokens)

    def masked(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        """Bool [T]: the tokens that are left out."""
        per_sequence = PerSequence(tokens.sequence_T)
        distance_S = per_sequence.mean(-log_ratio(logprobs_T.detach(), tokens))
        return (per_sequence.spread(distance_S) > self.delta) & (tokens.advantages_T < 0)

    @property
    def needs_behaviour(self) -> bool:  # type: ignore[override]  # always
        return True
