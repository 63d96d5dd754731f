"""Evaluation: how many held-out prompts a model gets right; what `arriero eval` runs."""

from __future__ import annotations

from dataclasses import field
from typing import Self

from pydantic import ConfigDict, PositiveFloat, PositiveInt, model_validator
from pydantic.dataclasses import dataclass

from arriero.components.chat import ChatFormat
from arriero.components.environments import AnyEnvironment
from arriero.components.environments.episodes import Episodes
from arriero.components.fixed_weights import FixedWeights, HeldOutSource
from arriero.components.generator import Generator
from arriero.components.prompts import PromptSource
from arriero.components.rewards import ExactMatch, Reward
from arriero.components.rollout_engine import EngineName, EnginePrecision
from arriero.components.sampling import Sampling
from arriero.components.vllm_options import VLLMOptions
from arriero.engine.graph import Graph
from arriero.schemas.messages import Weights


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class EvaluateConfig:
    """`samples` rollouts of each held-out prompt: with n of them pass@k is known for every k up to n.

    With an `environment` they are episodes that it judges, bounded by `turns`, `tokens` and `seconds`.
    """

    model: str
    data: PromptSource
    reward: Reward = field(default_factory=ExactMatch)
    environment: AnyEnvironment | None = None  # instead of the reward
    turns: PositiveInt = 8
    tokens: PositiveInt | None = None
    seconds: PositiveFloat = 120.0
    observation: str = "\n{text}\n"
    sampling: Sampling = field(default_factory=Sampling)
    chat: ChatFormat = field(default_factory=ChatFormat)
    samples: PositiveInt = 1
    generators: PositiveInt = 1
    rewards: PositiveInt = 1
    slots: PositiveInt = 256
    engine: EngineName = "transformers"
    vllm: VLLMOptions = field(default_factory=VLLMOptions)
    generator_precision: EnginePrecision = "float32"

    @model_validator(mode="after")
    def _one_judge(self) -> Self:
        if self.environment is not None and (self.reward != ExactMatch() or self.rewards != 1):
            raise ValueError("reward and environment are both set; an environment judges by itself: use one")
        bounds = (self.turns, self.tokens, self.seconds, self.observation)
        if self.environment is None and bounds != (8, None, 120.0, "\n{text}\n"):
            raise ValueError("turns, tokens, seconds and observation are for an environment; leave them out")
        return self


def evaluate(cfg: EvaluateConfig) -> Graph:
    """The graph of a training run without training."""
    g = Graph("evaluate")
    weights = g.loop(Weights, staleness=0)
    held_out = HeldOutSource.of(cfg.data, cfg.environment or cfg.reward)
    prompts = g.add(held_out, name="prompts")()
    generator = Generator(
        model=cfg.model, samples=cfg.samples, sampling=cfg.sampling, chat=cfg.chat, slots=cfg.slots,
        engine=cfg.engine, vllm=cfg.vllm, precision=cfg.generator_precision,
    )  # fmt: skip
    if cfg.environment is not None:
        episodes = Episodes(
            generator=generator, environment=cfg.environment, turns=cfg.turns, tokens=cfg.tokens,
            seconds=cfg.seconds, observation=cfg.observation,
        )  # fmt: skip
        scored = g.add(episodes, replicas=cfg.generators)(prompts, weights)
    else:
        rollouts = g.add(generator, replicas=cfg.generators)(prompts, weights)
        scored = g.add(cfg.reward, name="reward", replicas=cfg.rewards)(rollouts)
    weights.close(g.add(FixedWeights(model=cfg.model), name="weights")(scored))
    return g
