"""DPO: learn from pairs of responses, without samples and without a reward model (arXiv:2305.18290)."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic import ConfigDict, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.checkpoints import Checkpoints
from arriero.components.losses import DPO
from arriero.components.optimizer import AdamW, Optimizer
from arriero.components.preferences import PreferenceBatch, PreferenceSource
from arriero.components.reference import ReferenceLogprobs
from arriero.components.trainer import Trainer
from arriero.components.training_options import TrainingOptions
from arriero.engine.graph import Graph


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class DPOConfig:
    """One step trains on `pairs_per_step` pairs; `kind` square is IPO. The reference is `model` itself."""

    model: str
    data: PreferenceSource
    optimizer: Optimizer = field(default_factory=AdamW)
    beta: PositiveFloat = 0.1
    kind: Literal["sigmoid", "square"] = "sigmoid"
    steps: PositiveInt = 100
    pairs_per_step: PositiveInt = 32
    max_length: PositiveInt = 512
    ranks: PositiveInt = 1
    token_budget: PositiveInt = 8192
    training: TrainingOptions = field(default_factory=TrainingOptions)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)


def dpo(cfg: DPOConfig) -> Graph:
    """The reference reads a batch ahead of the trainer, in a process of its own."""
    g = Graph("dpo")
    pairs = g.add(cfg.data, name="pairs")()
    batcher = PreferenceBatch(model=cfg.model, pairs=cfg.pairs_per_step, max_length=cfg.max_length)
    batches = g.add(batcher, name="batch")(pairs)
    read = g.add(ReferenceLogprobs(model=cfg.model, token_budget=cfg.token_budget), name="reference")(batches)
    trainer = Trainer(
        model=cfg.model, loss=DPO(beta=cfg.beta, kind=cfg.kind), steps=cfg.steps, optimizer=cfg.optimizer,
        aggregation="sequence_mean", token_budget=cfg.token_budget,
        training=cfg.training, checkpoints=cfg.checkpoints,
    )  # fmt: skip
    g.add(trainer, ranks=cfg.ranks)(read)
    return g
