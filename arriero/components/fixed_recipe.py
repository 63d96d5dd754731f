"""The configuration that pipelines share which train on what is there: nothing is sampled."""

from __future__ import annotations

from dataclasses import field

from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.checkpoints import Checkpoints
from arriero.components.losses import Aggregation, Loss
from arriero.components.optimizer import AdamW, Optimizer
from arriero.components.reference import ReferenceLogprobs
from arriero.components.trainer import Trainer
from arriero.components.training_options import TrainingOptions


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class FixedDataConfig:
    """Which model is trained, by what, for how many steps, on how many ranks."""

    model: str
    optimizer: Optimizer = field(default_factory=AdamW)
    steps: PositiveInt = 100
    ranks: PositiveInt = 1
    token_budget: PositiveInt = 8192
    training: TrainingOptions = field(default_factory=TrainingOptions)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)

    def reads(self, model: str) -> ReferenceLogprobs:
        """Who says what another model thinks of the responses."""
        return ReferenceLogprobs(model=model, token_budget=self.token_budget)

    def trainer(self, loss: Loss, aggregation: Aggregation = "token_mean") -> Trainer:
        return Trainer(
            model=self.model, loss=loss, steps=self.steps, optimizer=self.optimizer, aggregation=aggregation,
            token_budget=self.token_budget, training=self.training, checkpoints=self.checkpoints,
        )  # fmt: skip
