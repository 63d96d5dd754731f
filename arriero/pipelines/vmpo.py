"""V-MPO: imitate the better half of the samples, the best of them most (arXiv:1909.12238)."""

from __future__ import annotations

from dataclasses import field

from pydantic import ConfigDict, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.advantage import BestSamples, GroupAdvantage
from arriero.components.losses import VMPO
from arriero.components.recipe import PolicyGradientConfig
from arriero.engine.graph import Graph
from arriero.schemas.messages import Weights


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class VMPOConfig(PolicyGradientConfig):
    """`best` says which samples are imitated, and how unequally; fresh data only.

    Over `minibatches` updates on a batch the policy stays within `eps_kl` nats per token of who sampled it.
    """

    best: BestSamples = field(default_factory=BestSamples)
    eps_kl: PositiveFloat = 0.01
    minibatches: PositiveInt = 4


def vmpo(cfg: VMPOConfig) -> Graph:
    """Nothing is pushed away, so only its distance holds the policy back, by a learned multiplier."""
    g = Graph("vmpo")
    weights = g.loop(Weights, staleness=cfg.staleness)
    prompts = g.add(cfg.data.screened(cfg.reward), name="prompts")()
    rollouts = g.add(cfg.generator(), replicas=cfg.generators)(prompts, weights)
    scored = g.add(cfg.reward, name="reward", replicas=cfg.rewards)(rollouts)
    advantage = GroupAdvantage(groups=cfg.groups_per_step, drop_last=cfg.drop_last, best=cfg.best)
    batches = g.add(advantage, name="advantage")(scored)
    trainer = cfg.trainer(VMPO(eps_kl=cfg.eps_kl), "sequence_sum", minibatches=cfg.minibatches)
    weights.close(g.add(trainer, ranks=cfg.ranks)(batches))
    return g
