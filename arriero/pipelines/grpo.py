"""GRPO: group-normalised advantages and a clipped ratio, synchronous by default (arXiv:2402.03300)."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass

from arriero.components.advantage import GroupAdvantage
from arriero.components.losses import Aggregation, ClipLow, ClippedPolicyGradient, DualClip
from arriero.components.recipe import PolicyGradientConfig
from arriero.engine.graph import Graph
from arriero.schemas.messages import Weights


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class GRPOConfig(PolicyGradientConfig):
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]; `dual_clip` bounds it where A < 0.

    `std` divides advantages by the deviation, which is over n - `ddof`, plus `eps`.
    """

    clip_low: ClipLow = 0.2
    clip_high: PositiveFloat = 0.2
    dual_clip: DualClip = None
    std: bool = True
    ddof: Literal[0, 1] = 1
    eps: NonNegativeFloat = 1e-6
    aggregation: Aggregation = "sequence_mean"


def grpo(cfg: GRPOConfig) -> Graph:
    """The same graph as AIPO; the advantage, the loss and the default staleness differ."""
    g = Graph("grpo")
    weights = g.loop(Weights, staleness=cfg.staleness)
    prompts = g.add(cfg.data.screened(cfg.reward), name="prompts")()
    rollouts = g.add(cfg.generator(), replicas=cfg.generators)(prompts, weights)
    scored = g.add(cfg.reward, name="reward", replicas=cfg.rewards)(rollouts)
    advantage = GroupAdvantage(
        groups=cfg.groups_per_step, drop_last=cfg.drop_last, baseline="mean", std=cfg.std, ddof=cfg.ddof,
        eps=cfg.eps,
    )  # fmt: skip
    batches = g.add(advantage, name="advantage")(scored)
    loss = ClippedPolicyGradient(low=cfg.clip_low, high=cfg.clip_high, dual_clip=cfg.dual_clip)
    weights.close(g.add(cfg.trainer(loss, cfg.aggregation), ranks=cfg.ranks)(batches))
    return g
