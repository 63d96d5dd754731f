"""What an evaluation can be told: a model, held-out prompts, and who judges."""

from __future__ import annotations

from dataclasses import field
from typing import Self

from pydantic import ConfigDict, PositiveFloat, PositiveInt, model_validator
from pydantic.dataclasses import dataclass

from arriero.components.chat import ChatFormat
from arriero.components.environments import AnyEnvironment
from arriero.components.environments.episodes import Episodes
from arriero.components.generator import Generator
from arriero.components.prompts import PromptSource
from arriero.components.rewards import ExactMatch, Reward
from arriero.components.rollout_engine import EngineName, EnginePrecision
from arriero.components.sampling import Sampling
from arriero.components.vllm_options import VLLMOptions


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

    def generator(self) -> Generator:
        return Generator(
            model=self.model, samples=self.samples, sampling=self.sampling, chat=self.chat, slots=self.slots,
            engine=self.engine, vllm=self.vllm, precision=self.generator_precision,
        )  # fmt: skip

    def episodes(self, environment: AnyEnvironment) -> Episodes:
        return Episodes(
            generator=self.generator(), environment=environment, turns=self.turns, tokens=self.tokens,
            seconds=self.seconds, observation=self.observation,
        )  # fmt: skip
