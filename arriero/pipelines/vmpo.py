"""V-MPO: imitate the better half of the samples, the best of them most (arXiv:1909.12238)."""

from __future__ import annotations

from dataclasses import field

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from arriero.components.advantage import BestSamples, GroupAdvantage
from arriero.components.losses import Reinforce
from arriero.components.recipe import PolicyGradientConfig
from arriero.engine.graph import Graph
from arriero.schemas.messages import Weights


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class VMPOConfig(PolicyGradientConfig):
    """`best` says which samples are imitated, and how unequally; fresh data only."""

    best: BestSamples = field(default_factory=BestSamples)


def vmpo(cfg: VMPOConfig) -> Graph:
    """One update a batch, so the policy is still the one that sampled: its distance needs no multiplier."""
    g = Graph("vmpo")
    weights = g.loop(Weights, staleness=cfg.staleness)
    prompts = g.add(cfg.data.screened(cfg.reward), name="prompts")()
    rollouts = g.add(cfg.generator(), replicas=cfg.generators)(prompts, weights)
    scored = g.add(cfg.reward, name="reward", replicas=cfg.rewards)(rollouts)
    advantage = GroupAdvantage(groups=cfg.groups_per_step, drop_last=cfg.drop_last, best=cfg.best)
    batches = g.add(advantage, name="advantage")(scored)
    weights.close(g.add(cfg.trainer(Reinforce(), "sequence_sum"), ranks=cfg.ranks)(batches))
    return g
