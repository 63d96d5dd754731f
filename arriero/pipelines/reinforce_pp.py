"""REINFORCE++: advantages whitened over the whole batch, no critic (arXiv:2501.03262)."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, PositiveFloat
from pydantic.dataclasses import dataclass

from arriero.components.advantage import GroupAdvantage
from arriero.components.losses import ClipLow, ClippedPolicyGradient, WithKL
from arriero.components.recipe import PolicyGradientConfig
from arriero.components.reference import ReferenceLogprobs
from arriero.engine.graph import Graph
from arriero.schemas.messages import Weights


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class ReinforcePPConfig(PolicyGradientConfig):
    """`baseline` none is REINFORCE++, mean its variant for groups; `kl` weighs the penalty."""

    baseline: Literal["none", "mean"] = "mean"
    clip: ClipLow = 0.2
    kl: PositiveFloat = 1e-3


def reinforce_pp(cfg: ReinforcePPConfig) -> Graph:
    """One scale for all prompts: a group's own deviation would make lucky groups of easy prompts loud."""
    g = Graph("reinforcepp")
    weights = g.loop(Weights, staleness=cfg.staleness)
    prompts = g.add(cfg.data.screened(cfg.reward), name="prompts")()
    rollouts = g.add(cfg.generator(), replicas=cfg.generators)(prompts, weights)
    scored = g.add(cfg.reward, name="reward", replicas=cfg.rewards)(rollouts)
    advantage = GroupAdvantage(
        groups=cfg.groups_per_step, drop_last=cfg.drop_last, baseline=cfg.baseline, whiten=True
    )
    batches = g.add(advantage, name="advantage")(scored)
    read = g.add(ReferenceLogprobs(model=cfg.model, token_budget=cfg.token_budget), name="reference")(batches)
    loss = WithKL(loss=ClippedPolicyGradient(low=cfg.clip, high=cfg.clip), beta=cfg.kl, estimator="k2")
    weights.close(g.add(cfg.trainer(loss), ranks=cfg.ranks)(read))
    return g
