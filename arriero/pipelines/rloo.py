"""RLOO: REINFORCE with the mean of the others as baseline (arXiv:2402.14740)."""

from __future__ import annotations

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from arriero.components.advantage import GroupAdvantage
from arriero.components.losses import Reinforce
from arriero.components.recipe import PolicyGradientConfig
from arriero.engine.graph import Graph
from arriero.schemas.messages import Weights


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class RLOOConfig(PolicyGradientConfig):
    """Fresh data only: `check` refuses a staleness above 0, since the loss corrects nothing."""


def rloo(cfg: RLOOConfig) -> Graph:
    """A response is one action, so its log-probabilities are summed and not averaged."""
    g = Graph("rloo")
    weights = g.loop(Weights, staleness=cfg.staleness)
    prompts = g.add(cfg.data.screened(cfg.reward), name="prompts")()
    rollouts = g.add(cfg.generator(), replicas=cfg.generators)(prompts, weights)
    scored = g.add(cfg.reward, name="reward", replicas=cfg.rewards)(rollouts)
    advantage = GroupAdvantage(groups=cfg.groups_per_step, drop_last=cfg.drop_last)
    batches = g.add(advantage, name="advantage")(scored)
    weights.close(g.add(cfg.trainer(Reinforce(), "sequence_sum"), ranks=cfg.ranks)(batches))
    return g
