"""Offline: advantage-weighted regression on recorded rollouts (arXiv:1910.00177)."""

from __future__ import annotations

from dataclasses import field

from pydantic import ConfigDict, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.advantage import GroupAdvantage
from arriero.components.checkpoints import Checkpoints
from arriero.components.losses import AWR
from arriero.components.optimizer import AdamW, Optimizer
from arriero.components.recorded import RecordedRollouts
from arriero.components.trainer import Trainer
from arriero.components.training_options import TrainingOptions
from arriero.engine.graph import Graph


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class OfflineConfig:
    """A smaller `beta` imitates the best responses only; weights are at most `max_weight`."""

    model: str
    data: RecordedRollouts
    optimizer: Optimizer = field(default_factory=AdamW)
    beta: PositiveFloat = 1.0
    max_weight: PositiveFloat = 20.0
    steps: PositiveInt = 100
    groups_per_step: PositiveInt = 32
    ranks: PositiveInt = 1
    token_budget: PositiveInt = 8192
    training: TrainingOptions = field(default_factory=TrainingOptions)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)


def offline(cfg: OfflineConfig) -> Graph:
    """No generator and no loop: nothing is sampled, so the age of the data doesn't matter."""
    g = Graph("offline")
    recorded = g.add(cfg.data, name="recorded")()
    advantage = GroupAdvantage(groups=cfg.groups_per_step, baseline="mean", std=True)
    batches = g.add(advantage, name="advantage")(recorded)
    trainer = Trainer(
        model=cfg.model, loss=AWR(beta=cfg.beta, max_weight=cfg.max_weight), steps=cfg.steps,
        optimizer=cfg.optimizer, token_budget=cfg.token_budget,
        training=cfg.training, checkpoints=cfg.checkpoints,
    )  # fmt: skip
    g.add(trainer, ranks=cfg.ranks)(batches)
    return g
