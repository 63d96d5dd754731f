"""Supervised fine-tuning on the best responses of a recorded run (RAFT, arXiv:2304.06767)."""

from __future__ import annotations

from dataclasses import field

from pydantic import ConfigDict, FiniteFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.losses import CrossEntropy
from arriero.components.optimizer import AdamW, Optimizer
from arriero.components.recorded import RecordedRollouts
from arriero.components.selection import BestResponses
from arriero.components.trainer import Trainer
from arriero.components.training_options import TrainingOptions
from arriero.engine.graph import Graph


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class ImitateConfig:
    """Of each recorded group the `keep` best responses, if their reward is `at_least` so much."""

    model: str
    data: RecordedRollouts
    optimizer: Optimizer = field(default_factory=lambda: AdamW(lr=1e-5))
    keep: PositiveInt = 1
    at_least: FiniteFloat = 1.0
    truncated: bool = False  # take responses that ended at the limit of tokens, too
    steps: PositiveInt = 100
    groups_per_step: PositiveInt = 32
    ranks: PositiveInt = 1
    token_budget: PositiveInt = 8192
    training: TrainingOptions = field(default_factory=TrainingOptions)


def imitate(cfg: ImitateConfig) -> Graph:
    """Another model's run makes it distillation by its responses; the own one, rejection sampling."""
    g = Graph("imitate")
    recorded = g.add(cfg.data, name="recorded")()
    best = BestResponses(
        groups=cfg.groups_per_step, keep=cfg.keep, at_least=cfg.at_least, truncated=cfg.truncated
    )
    batches = g.add(best, name="best")(recorded)
    trainer = Trainer(
        model=cfg.model, loss=CrossEntropy(), steps=cfg.steps, optimizer=cfg.optimizer,
        token_budget=cfg.token_budget, training=cfg.training,
    )  # fmt: skip
    g.add(trainer, ranks=cfg.ranks)(batches)
    return g
