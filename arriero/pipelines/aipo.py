"""LlamaRL: asynchronous off-policy RL with a one-sided importance clip (arXiv:2505.24034)."""

from __future__ import annotations

from pydantic import ConfigDict, NonNegativeInt, PositiveFloat
from pydantic.dataclasses import dataclass

from arriero.components.advantage import GroupAdvantage
from arriero.components.losses import AIPO
from arriero.components.recipe import PolicyGradientConfig
from arriero.engine.graph import Graph
from arriero.schemas.messages import Weights


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class AIPOConfig(PolicyGradientConfig):
    """`rho` truncates the importance ratio of a token from above."""

    staleness: NonNegativeInt = 1
    rho: PositiveFloat = 2.0


def aipo(cfg: AIPOConfig) -> Graph:
    """Generators run ahead by up to `staleness` versions; the loss truncates the ratio at `rho`."""
    g = Graph("aipo")
    weights = g.loop(Weights, staleness=cfg.staleness)
    prompts = g.add(cfg.data.screened(cfg.reward), name="prompts")()
    rollouts = g.add(cfg.generator(), replicas=cfg.generators)(prompts, weights)
    scored = g.add(cfg.reward, name="reward", replicas=cfg.rewards)(rollouts)
    advantage = GroupAdvantage(groups=cfg.groups_per_step, drop_last=cfg.drop_last)
    batches = g.add(advantage, name="advantage")(scored)
    weights.close(g.add(cfg.trainer(AIPO(rho=cfg.rho)), ranks=cfg.ranks)(batches))
    return g
