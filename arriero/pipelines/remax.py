"""ReMax: REINFORCE with the reward of the greedy response as baseline (arXiv:2310.10505)."""

from __future__ import annotations

from dataclasses import replace

from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.advantage import GroupAdvantage
from arriero.components.losses import Reinforce
from arriero.components.recipe import PolicyGradientConfig
from arriero.engine.graph import Graph
from arriero.schemas.messages import Weights


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class ReMaxConfig(PolicyGradientConfig):
    """Fresh data only, since the loss corrects nothing. A prompt has a greedy rollout beside `samples`."""

    samples: PositiveInt = 1


def remax(cfg: ReMaxConfig) -> Graph:
    """A response is one action, so its log-probabilities are summed and not averaged."""
    g = Graph("remax")
    weights = g.loop(Weights, staleness=cfg.staleness)
    prompts = g.add(cfg.data.screened(cfg.reward), name="prompts")()
    generator = replace(cfg.generator(), greedy_baseline=True)
    rollouts = g.add(generator, replicas=cfg.generators)(prompts, weights)
    scored = g.add(cfg.reward, name="reward", replicas=cfg.rewards)(rollouts)
    advantage = GroupAdvantage(groups=cfg.groups_per_step, drop_last=cfg.drop_last, baseline="greedy")
    batches = g.add(advantage, name="advantage")(scored)
    weights.close(g.add(cfg.trainer(Reinforce(), "sequence_sum"), ranks=cfg.ranks)(batches))
    return g
