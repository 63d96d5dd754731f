"""Distillation on a recorded run: a teacher reads what was sampled then (arXiv:2306.13649)."""

from __future__ import annotations

from dataclasses import field

from pydantic import ConfigDict, Field, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.advantage import GroupAdvantage
from arriero.components.losses import OnPolicyDistillation
from arriero.components.optimizer import AdamW, Optimizer
from arriero.components.recorded import RecordedRollouts
from arriero.components.reference import ReferenceLogprobs
from arriero.components.trainer import Trainer
from arriero.components.training_options import TrainingOptions
from arriero.engine.graph import Graph


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class DistillRecordedConfig:
    """`teacher` has the vocabulary of `model`; the ratio of model to recorded policy is at most `rho`."""

    model: str
    teacher: str
    data: RecordedRollouts
    optimizer: Optimizer = field(default_factory=AdamW)
    rho: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    steps: PositiveInt = 100
    groups_per_step: PositiveInt = 32
    ranks: PositiveInt = 1
    token_budget: PositiveInt = 8192
    training: TrainingOptions = field(default_factory=TrainingOptions)


def distill_recorded(cfg: DistillRecordedConfig) -> Graph:
    """Nothing is sampled: the further `model` is from the policy of the record, the fewer tokens count."""
    g = Graph("distillrecorded")
    recorded = g.add(cfg.data, name="recorded")()
    batcher = GroupAdvantage(groups=cfg.groups_per_step, baseline="none", rewards="reported")
    batches = g.add(batcher, name="batch")(recorded)
    teacher = ReferenceLogprobs(model=cfg.teacher, token_budget=cfg.token_budget)
    read = g.add(teacher, name="teacher")(batches)
    trainer = Trainer(
        model=cfg.model, loss=OnPolicyDistillation(rho=cfg.rho), steps=cfg.steps, optimizer=cfg.optimizer,
        token_budget=cfg.token_budget, training=cfg.training,
    )  # fmt: skip
    g.add(trainer, ranks=cfg.ranks)(read)
    return g
