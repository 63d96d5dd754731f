"""DAPO: clip-higher, dynamic sampling, a mean over tokens, a penalty for length (arXiv:2503.14476)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import ConfigDict, NonNegativeInt, PositiveFloat, model_validator
from pydantic.dataclasses import dataclass

from arriero.components.advantage import GroupAdvantage
from arriero.components.losses import ClipLow, ClippedPolicyGradient, DualClip
from arriero.components.overlong import OverlongPenalty
from arriero.components.recipe import PolicyGradientConfig
from arriero.engine.graph import Graph
from arriero.schemas.messages import Weights


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class DAPOConfig(PolicyGradientConfig):
    """The penalty grows to `overlong_factor` over the last `overlong_buffer` of `max_new_tokens` tokens."""

    clip_low: ClipLow = 0.2
    clip_high: PositiveFloat = 0.28
    dual_clip: DualClip = None
    overlong_buffer: NonNegativeInt = 16
    overlong_factor: PositiveFloat = 1.0
    truncated: Literal["train", "baseline_only"] = "train"

    @model_validator(mode="after")
    def _buffer_within_the_response(self) -> Self:
        longest = self.sampling.max_new_tokens
        if self.overlong_buffer > longest:
            raise ValueError(
                f"overlong_buffer={self.overlong_buffer} is more than sampling.max_new_tokens={longest}, "
                "whose last part it is; give a smaller --overlong-buffer, or 0 for a step at the end"
            )
        return self


def dapo(cfg: DAPOConfig) -> Graph:
    """Groups without a signal are dropped, and their places in the admission window go to other prompts."""
    g = Graph("dapo")
    weights = g.loop(Weights, staleness=cfg.staleness)
    prompts = g.add(cfg.data.screened(cfg.reward), name="prompts")()
    rollouts = g.add(cfg.generator(), replicas=cfg.generators)(prompts, weights)
    scored = g.add(cfg.reward, name="reward", replicas=cfg.rewards)(rollouts)
    penalty = OverlongPenalty(
        max_length=cfg.sampling.max_new_tokens, buffer=cfg.overlong_buffer, factor=cfg.overlong_factor
    )
    shaped = g.add(penalty, name="overlong")(scored)
    advantage = GroupAdvantage(
        groups=cfg.groups_per_step, drop_last=cfg.drop_last, baseline="mean", std=True,
        filter_constant=True, truncated=cfg.truncated,
    )  # fmt: skip
    batches = g.add(advantage, name="advantage")(shaped)
    loss = ClippedPolicyGradient(low=cfg.clip_low, high=cfg.clip_high, dual_clip=cfg.dual_clip)
    weights.close(g.add(cfg.trainer(loss), ranks=cfg.ranks)(batches))
    return g
