"""CISPO: the importance weight is clipped, never the token (MiniMax-M1, arXiv:2506.13585)."""

from __future__ import annotations

from pydantic import ConfigDict, NonNegativeInt, PositiveFloat
from pydantic.dataclasses import dataclass

from arriero.components.advantage import GroupAdvantage
from arriero.components.losses import CISPO
from arriero.components.recipe import PolicyGradientConfig
from arriero.engine.graph import Graph
from arriero.schemas.messages import Weights


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class CISPOConfig(PolicyGradientConfig):
    """Weights are at most 1 + `clip_high`; there is no lower bound."""

    staleness: NonNegativeInt = 1
    clip_high: PositiveFloat = 1.0


def cispo(cfg: CISPOConfig) -> Graph:
    """Rare tokens that turn an answer keep their gradient, where PPO's clip would drop them."""
    g = Graph("cispo")
    weights = g.loop(Weights, staleness=cfg.staleness)
    prompts = g.add(cfg.data.screened(cfg.reward), name="prompts")()
    rollouts = g.add(cfg.generator(), replicas=cfg.generators)(prompts, weights)
    scored = g.add(cfg.reward, name="reward", replicas=cfg.rewards)(rollouts)
    batches = g.add(
        GroupAdvantage(groups=cfg.groups_per_step, drop_last=cfg.drop_last, baseline="mean", std=True),
        name="advantage",
    )(scored)
    weights.close(g.add(cfg.trainer(CISPO(high=cfg.clip_high)), ranks=cfg.ranks)(batches))
    return g
