"""The configuration that policy-gradient pipelines share; a pipeline adds what is its own."""

from __future__ import annotations

from dataclasses import field

from pydantic import ConfigDict, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.chat import ChatFormat
from arriero.components.checkpoints import Checkpoints
from arriero.components.generator import Generator
from arriero.components.health import HealthGates
from arriero.components.losses import Aggregation, Loss
from arriero.components.mismatch import MismatchGate
from arriero.components.optimizer import AdamW, Optimizer
from arriero.components.placement import DevicePlacement
from arriero.components.prompts import PromptSource
from arriero.components.publisher import WeightPlane
from arriero.components.rewards import ExactMatch, Reward
from arriero.components.rollout_engine import EngineName, EnginePrecision, EvaluationEngine, KVCache
from arriero.components.sampling import Sampling
from arriero.components.second_set import SecondSet
from arriero.components.stragglers import Stragglers
from arriero.components.trainer import Trainer
from arriero.components.training_options import TrainingOptions
from arriero.components.vllm_options import VLLMOptions


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class SampledConfig:
    """Model, data and how many of everything, for pipelines that train on their own samples.

    One step trains on `groups_per_step` prompts with `samples` rollouts each. `staleness` bounds the age of a
    token in versions: 0 is synchronous, 1 is LlamaRL's one-step delay.
    """

    model: str
    data: PromptSource
    sampling: Sampling = field(default_factory=Sampling)
    chat: ChatFormat = field(default_factory=ChatFormat)
    optimizer: Optimizer = field(default_factory=AdamW)
    steps: PositiveInt = 100
    staleness: NonNegativeInt = 0
    groups_per_step: PositiveInt = 32
    drop_last: bool = False  # the prompts at the end that make no whole step; false: a smaller one
    samples: PositiveInt = 8
    generators: PositiveInt = 1
    ranks: PositiveInt = 1
    slots: PositiveInt = 256
    token_budget: PositiveInt = 8192
    training: TrainingOptions = field(default_factory=TrainingOptions)
    engine: EngineName = "transformers"
    vllm: VLLMOptions = field(default_factory=VLLMOptions)
    kv_cache: KVCache = "keep"  # of running responses, when new weights come
    generator_precision: EnginePrecision = "float32"
    standby: SecondSet = "auto"  # new weights arrive beside those that generators use
    evaluation_engine: EvaluationEngine = "auto"  # for held-out prompts during training
    stragglers: Stragglers = field(default_factory=Stragglers)
    mismatch: MismatchGate = field(default_factory=MismatchGate)
    health: HealthGates = field(default_factory=HealthGates)
    weights: WeightPlane = field(default_factory=WeightPlane)
    placement: DevicePlacement = field(default_factory=DevicePlacement)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)

    def generator(self) -> Generator:
        return Generator(
            model=self.model, samples=self.samples, sampling=self.sampling, chat=self.chat, slots=self.slots,
            engine=self.engine, vllm=self.vllm, kv_cache=self.kv_cache, precision=self.generator_precision,
            standby=self.standby, evaluation_engine=self.evaluation_engine, stragglers=self.stragglers,
            placement=self.placement,
        )  # fmt: skip

    def trainer(
        self,
        loss: Loss,
        aggregation: Aggregation = "token_mean",
        *,
        horizon: float | None = None,
        minibatches: int = 1,
        epochs: int = 1,
        teacher: str | None = None,
    ) -> Trainer:
        return Trainer(
            model=self.model, loss=loss, steps=self.steps, optimizer=self.optimizer, aggregation=aggregation,
            horizon=horizon, minibatches=minibatches, epochs=epochs, token_budget=self.token_budget,
            training=self.training, mismatch=self.mismatch, health=self.health,
            weights=self.weights, checkpoints=self.checkpoints, placement=self.placement,
            teacher=teacher,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class PolicyGradientConfig(SampledConfig):
    """The same with a reward that is computed, in `rewards` replicas."""

    reward: Reward = field(default_factory=ExactMatch)
    rewards: PositiveInt = 1


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class CriticConfig:
    """How the critic of a pipeline that has one learns, beside what the pipeline says of it."""

    critic_optimizer: AdamW = field(default_factory=lambda: AdamW(lr=1e-5))
    critic_training: TrainingOptions = field(default_factory=TrainingOptions)
    critic_ranks: PositiveInt = 1
