"""ArCHer: a critic of whole turns, off policy, and an actor of tokens, on policy (arXiv:2402.19446)."""

from __future__ import annotations

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.advantage import GroupAdvantage
from arriero.components.environments.recipe import EnvironmentConfig
from arriero.components.losses import AIPO
from arriero.components.recipe import CriticConfig
from arriero.components.replay import Replay
from arriero.components.utterance_critic import UtteranceCritic
from arriero.engine.graph import Graph
from arriero.schemas.messages import Weights


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class ArcherConfig(CriticConfig, EnvironmentConfig):
    """The critics take `critic_updates` updates a step, on `replay` samples of the last `capacity`.

    They begin as `model`; `tau` is how far their slow copies follow an update. `gamma` discounts by turns.
    """

    gamma: float = Field(default=0.95, gt=0, le=1)
    tau: float = Field(default=0.1, gt=0, le=1)
    replay: PositiveInt = 512
    capacity: PositiveInt = 10000
    critic_updates: PositiveInt = 4
    rho: PositiveFloat = 2.0


def archer(cfg: ArcherConfig) -> Graph:
    """Two levels, two nodes: the critic learns from all turns there have been, the actor from new ones."""
    g = Graph("archer")
    weights = g.loop(Weights, staleness=cfg.staleness)
    prompts = g.add(cfg.data.screened(cfg.environment), name="prompts")()
    played = g.add(cfg.episodes(), replicas=cfg.generators)(prompts, weights)
    batches = g.add(
        GroupAdvantage(groups=cfg.groups_per_step, drop_last=cfg.drop_last, baseline="none"), name="batch"
    )(played)
    replayed = g.add(Replay(capacity=cfg.capacity, samples=cfg.replay))(batches)
    critic = UtteranceCritic(
        model=cfg.model, steps=cfg.steps, optimizer=cfg.critic_optimizer, gamma=cfg.gamma, tau=cfg.tau,
        updates=cfg.critic_updates, token_budget=cfg.token_budget, training=cfg.critic_training,
        checkpoints=cfg.checkpoints,
    )  # fmt: skip
    judged = g.add(critic, name="critic", ranks=cfg.critic_ranks)(batches, replayed)
    weights.close(g.add(cfg.trainer(AIPO(rho=cfg.rho)), ranks=cfg.ranks)(judged))
    return g
