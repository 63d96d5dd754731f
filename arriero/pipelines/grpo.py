"""GRPO: group-normalised advantages and a clipped ratio, synchronous by default (arXiv:2402.03300)."""

from __future__ import annotations

from pydantic import ConfigDict, PositiveFloat
from pydantic.dataclasses import dataclass

from arriero.components.advantage import GroupAdvantage
from arriero.components.losses import Aggregation, ClippedPolicyGradient
from arriero.components.recipe import PolicyGradientConfig
from arriero.engine.graph import Graph
from arriero.schemas.messages import Weights


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class GRPOConfig(PolicyGradientConfig):
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]; `std` divides advantages by the deviation."""

    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.2
    std: bool = True
    aggregation: Aggregation = "sequence_mean"


def grpo(cfg: GRPOConfig) -> Graph:
    """The same graph as AIPO; the advantage, the loss and the default staleness differ."""
    g = Graph("grpo")
    weights = g.loop(Weights, staleness=cfg.staleness)
    prompts = g.add(cfg.data.screened(cfg.reward), name="prompts")()
    rollouts = g.add(cfg.generator(), replicas=cfg.generators)(prompts, weights)
    scored = g.add(cfg.reward, name="reward", replicas=cfg.rewards)(rollouts)
    batches = g.add(
        GroupAdvantage(groups=cfg.groups_per_step, drop_last=cfg.drop_last, baseline="mean", std=cfg.std),
        name="advantage",
    )(scored)
    loss = ClippedPolicyGradient(low=cfg.clip_low, high=cfg.clip_high)
    weights.close(g.add(cfg.trainer(loss, cfg.aggregation), ranks=cfg.ranks)(batches))
    return g
