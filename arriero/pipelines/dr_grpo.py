"""Dr. GRPO: group means without the deviation, and one divisor for all lengths (arXiv:2503.20783)."""

from __future__ import annotations

from pydantic import ConfigDict, PositiveFloat
from pydantic.dataclasses import dataclass

from arriero.components.advantage import GroupAdvantage
from arriero.components.losses import ClipLow, ClippedPolicyGradient, DualClip
from arriero.components.recipe import PolicyGradientConfig
from arriero.engine.graph import Graph
from arriero.schemas.messages import Weights


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class DrGRPOConfig(PolicyGradientConfig):
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]; `dual_clip` bounds it where A < 0."""

    clip_low: ClipLow = 0.2
    clip_high: PositiveFloat = 0.2
    dual_clip: DualClip = None


def dr_grpo(cfg: DrGRPOConfig) -> Graph:
    """GRPO without its two biases: easy prompts don't weigh more, nor short wrong answers."""
    g = Graph("drgrpo")
    weights = g.loop(Weights, staleness=cfg.staleness)
    prompts = g.add(cfg.data.screened(cfg.reward), name="prompts")()
    rollouts = g.add(cfg.generator(), replicas=cfg.generators)(prompts, weights)
    scored = g.add(cfg.reward, name="reward", replicas=cfg.rewards)(rollouts)
    batches = g.add(
        GroupAdvantage(groups=cfg.groups_per_step, drop_last=cfg.drop_last, baseline="mean"), name="advantage"
    )(scored)
    loss = ClippedPolicyGradient(low=cfg.clip_low, high=cfg.clip_high, dual_clip=cfg.dual_clip)
    trainer = cfg.trainer(loss, "fixed_length", horizon=cfg.sampling.max_new_tokens)
    weights.close(g.add(trainer, ranks=cfg.ranks)(batches))
    return g
