"""Decoupled PPO: clip around the policy before the update, weigh by age (AReaL, arXiv:2505.24298)."""

from __future__ import annotations

from pydantic import ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.advantage import GroupAdvantage
from arriero.components.losses import ClipLow, DecoupledPPO, ImportanceWeight
from arriero.components.recipe import PolicyGradientConfig
from arriero.engine.graph import Graph
from arriero.schemas.messages import Weights


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class DecoupledPPOConfig(PolicyGradientConfig):
    """A step takes `minibatches` updates; weights of stale tokens are truncated at `rho`."""

    staleness: NonNegativeInt = 4
    minibatches: PositiveInt = 4
    clip: ClipLow = 0.2
    rho: PositiveFloat = 2.0


def decoupled_ppo(cfg: DecoupledPPOConfig) -> Graph:
    """How far an update may go doesn't depend on how old the data is."""
    g = Graph("decoupledppo")
    weights = g.loop(Weights, staleness=cfg.staleness)
    prompts = g.add(cfg.data.screened(cfg.reward), name="prompts")()
    rollouts = g.add(cfg.generator(), replicas=cfg.generators)(prompts, weights)
    scored = g.add(cfg.reward, name="reward", replicas=cfg.rewards)(rollouts)
    batches = g.add(
        GroupAdvantage(groups=cfg.groups_per_step, drop_last=cfg.drop_last, baseline="mean", std=True),
        name="advantage",
    )(scored)
    loss = DecoupledPPO(low=cfg.clip, high=cfg.clip, weight=ImportanceWeight(upper=cfg.rho))
    weights.close(g.add(cfg.trainer(loss, minibatches=cfg.minibatches), ranks=cfg.ranks)(batches))
    return g
