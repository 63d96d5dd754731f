"""V-trace: a critic of the policy of now, learned from what older ones sampled (arXiv:1802.01561)."""

from __future__ import annotations

from dataclasses import field

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.advantage import GroupAdvantage
from arriero.components.critic import Critic, VTraceClips
from arriero.components.health import HealthGates, High
from arriero.components.losses import AIPO
from arriero.components.policy_logprobs import PolicyLogprobs
from arriero.components.recipe import CriticConfig, PolicyGradientConfig
from arriero.engine.graph import Graph
from arriero.schemas.messages import Weights


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class VTraceConfig(CriticConfig, PolicyGradientConfig):
    """`clips` cut ratios in the critic's targets, `rho` in the policy gradient; `whiten` is ours."""

    staleness: NonNegativeInt = 1
    samples: PositiveInt = 1
    gamma: float = Field(default=1.0, gt=0, le=1)
    lam: float = Field(default=1.0, ge=0, le=1)
    clips: VTraceClips = field(default_factory=VTraceClips)
    rho: PositiveFloat = 1.0
    whiten: bool = False
    value_clip: PositiveFloat = 0.2
    critic_updates: PositiveInt = 1
    health: HealthGates = field(default_factory=lambda: HealthGates(masked=High(warn=0.75)))  # half is usual


def vtrace(cfg: VTraceConfig) -> Graph:
    """The policy follows the weights twice: to sample, and to say what it thinks of a batch by now."""
    g = Graph("vtrace")
    weights = g.loop(Weights, staleness=cfg.staleness)
    prompts = g.add(cfg.data.screened(cfg.reward), name="prompts")()
    rollouts = g.add(cfg.generator(), replicas=cfg.generators)(prompts, weights)
    scored = g.add(cfg.reward, name="reward", replicas=cfg.rewards)(rollouts)
    batcher = GroupAdvantage(groups=cfg.groups_per_step, drop_last=cfg.drop_last, baseline="none")
    batches = g.add(batcher, name="batch")(scored)
    policy = PolicyLogprobs(model=cfg.model, token_budget=cfg.token_budget)
    read = g.add(policy, name="policy")(batches, weights)
    critic = Critic(
        model=cfg.model, steps=cfg.steps, optimizer=cfg.critic_optimizer, gamma=cfg.gamma, lam=cfg.lam,
        clip=cfg.value_clip, epochs=cfg.critic_updates, vtrace=cfg.clips, whiten=cfg.whiten,
        token_budget=cfg.token_budget, training=cfg.critic_training, checkpoints=cfg.checkpoints,
    )  # fmt: skip
    judged = g.add(critic, name="critic", ranks=cfg.critic_ranks)(read)
    weights.close(g.add(cfg.trainer(AIPO(rho=cfg.rho)), ranks=cfg.ranks)(judged))
    return g
