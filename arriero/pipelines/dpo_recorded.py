"""DPO on a recorded run: the best response of each group against its worst (arXiv:2305.18290)."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic import ConfigDict, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.losses import DPO
from arriero.components.optimizer import AdamW, Optimizer
from arriero.components.recorded import RecordedRollouts
from arriero.components.reference import ReferenceLogprobs
from arriero.components.selection import RankedPairs
from arriero.components.trainer import Trainer
from arriero.components.training_options import TrainingOptions
from arriero.engine.graph import Graph


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class DPORecordedConfig:
    """As `dpo`, of groups whose best and worst reward differ by more than `margin`."""

    model: str
    data: RecordedRollouts
    optimizer: Optimizer = field(default_factory=AdamW)
    margin: NonNegativeFloat = 0.0
    beta: PositiveFloat = 0.1
    kind: Literal["sigmoid", "square"] = "sigmoid"
    steps: PositiveInt = 100
    pairs_per_step: PositiveInt = 32
    ranks: PositiveInt = 1
    token_budget: PositiveInt = 8192
    training: TrainingOptions = field(default_factory=TrainingOptions)


def dpo_recorded(cfg: DPORecordedConfig) -> Graph:
    """The reward only ranks: how far two responses are apart doesn't matter."""
    g = Graph("dporecorded")
    recorded = g.add(cfg.data, name="recorded")()
    batches = g.add(RankedPairs(pairs=cfg.pairs_per_step, margin=cfg.margin), name="pairs")(recorded)
    read = g.add(ReferenceLogprobs(model=cfg.model, token_budget=cfg.token_budget), name="reference")(batches)
    trainer = Trainer(
        model=cfg.model, loss=DPO(beta=cfg.beta, kind=cfg.kind), steps=cfg.steps, optimizer=cfg.optimizer,
        aggregation="sequence_mean", token_budget=cfg.token_budget, training=cfg.training,
    )  # fmt: skip
    g.add(trainer, ranks=cfg.ranks)(read)
    return g
