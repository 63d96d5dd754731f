"""PPO with four models: actor, critic, reference and reward model, as in RLHF (arXiv:2203.02155)."""

from __future__ import annotations

from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.advantage import GroupAdvantage
from arriero.components.critic import Critic
from arriero.components.losses import ClipLow, ClippedPolicyGradient, DualClip
from arriero.components.recipe import CriticConfig, SampledConfig
from arriero.components.reference import ReferenceLogprobs
from arriero.components.reward_model import RewardModel
from arriero.engine.graph import Graph
from arriero.schemas.messages import Weights


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class PPOConfig(CriticConfig, SampledConfig):
    """`reward_model` is what that pipeline made; critic and reference begin as `model`."""

    reward_model: str  # the model/ of a run of the pipeline `reward_model`
    rewards: PositiveInt = 1
    samples: PositiveInt = 1
    kl: NonNegativeFloat = 0.05  # the price of a nat away from the reference, paid by each token
    gamma: float = Field(default=1.0, gt=0, le=1)
    lam: float = Field(default=0.95, ge=0, le=1)
    clip: ClipLow = 0.2
    dual_clip: DualClip = None
    value_clip: PositiveFloat = 0.2
    bootstrap: bool = False  # a response that was cut off goes on with the critic's value
    minibatches: PositiveInt = 4


def ppo(cfg: PPOConfig) -> Graph:
    """Each model is a node: the critic trains on a batch while the actor does."""
    g = Graph("ppo")
    weights = g.loop(Weights, staleness=cfg.staleness)
    prompts = g.add(cfg.data, name="prompts")()
    rollouts = g.add(cfg.generator(), replicas=cfg.generators)(prompts, weights)
    judge = RewardModel(model=cfg.reward_model, token_budget=cfg.token_budget)
    scored = g.add(judge, name="reward", replicas=cfg.rewards)(rollouts)
    batcher = GroupAdvantage(groups=cfg.groups_per_step, drop_last=cfg.drop_last, baseline="none")
    batches = g.add(batcher, name="batch")(scored)
    read = g.add(ReferenceLogprobs(model=cfg.model, token_budget=cfg.token_budget), name="reference")(batches)
    critic = Critic(
        model=cfg.model, steps=cfg.steps, optimizer=cfg.critic_optimizer, gamma=cfg.gamma, lam=cfg.lam,
        kl=cfg.kl, clip=cfg.value_clip, epochs=cfg.minibatches, bootstrap=cfg.bootstrap,
        token_budget=cfg.token_budget, training=cfg.critic_training, checkpoints=cfg.checkpoints,
    )  # fmt: skip
    judged = g.add(critic, name="critic", ranks=cfg.critic_ranks)(read)
    loss = ClippedPolicyGradient(low=cfg.clip, high=cfg.clip, dual_clip=cfg.dual_clip)
    weights.close(g.add(cfg.trainer(loss, minibatches=cfg.minibatches), ranks=cfg.ranks)(judged))
    return g
