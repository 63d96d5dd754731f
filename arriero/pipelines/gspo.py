"""GSPO: one importance ratio per sequence, clipped as a whole (arXiv:2507.18071)."""

from __future__ import annotations

from pydantic import ConfigDict, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.advantage import GroupAdvantage
from arriero.components.losses import GSPO, ClipLow
from arriero.components.recipe import PolicyGradientConfig
from arriero.engine.graph import Graph
from arriero.schemas.messages import Weights


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class GSPOConfig(PolicyGradientConfig):
    """The clip acts on what `minibatches` updates change: its range is a thousandth of PPO's."""

    clip_low: ClipLow = 3e-4
    clip_high: PositiveFloat = 4e-4
    minibatches: PositiveInt = 4


def gspo(cfg: GSPOConfig) -> Graph:
    """The unit of reward is the sequence, so is the unit of correction: a rare token can't dominate."""
    g = Graph("gspo")
    weights = g.loop(Weights, staleness=cfg.staleness)
    prompts = g.add(cfg.data.screened(cfg.reward), name="prompts")()
    rollouts = g.add(cfg.generator(), replicas=cfg.generators)(prompts, weights)
    scored = g.add(cfg.reward, name="reward", replicas=cfg.rewards)(rollouts)
    batches = g.add(
        GroupAdvantage(groups=cfg.groups_per_step, drop_last=cfg.drop_last, baseline="mean", std=True),
        name="advantage",
    )(scored)
    loss = GSPO(low=cfg.clip_low, high=cfg.clip_high)
    trainer = cfg.trainer(loss, "sequence_mean", minibatches=cfg.minibatches)
    weights.close(g.add(trainer, ranks=cfg.ranks)(batches))
    return g
