"""A reward model from pairs of responses (arXiv:2203.02155)."""

from __future__ import annotations

from dataclasses import field

from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.chat import ChatFormat
from arriero.components.checkpoints import Checkpoints
from arriero.components.optimizer import AdamW
from arriero.components.preferences import PreferenceBatch, PreferenceSource
from arriero.components.reward_model import RewardTrainer
from arriero.components.training_options import TrainingOptions
from arriero.engine.graph import Graph


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class RewardModelConfig:
    """One step trains on `pairs_per_step` pairs of responses of at most `max_length` tokens."""

    model: str
    data: PreferenceSource
    chat: ChatFormat = field(default_factory=ChatFormat)
    optimizer: AdamW = field(default_factory=lambda: AdamW(lr=1e-5))
    steps: PositiveInt = 100
    pairs_per_step: PositiveInt = 32
    max_length: PositiveInt = 512
    ranks: PositiveInt = 1
    token_budget: PositiveInt = 8192
    training: TrainingOptions = field(default_factory=TrainingOptions)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)


def reward_model(cfg: RewardModelConfig) -> Graph:
    """What comes out, under `model/` of the run directory, is what `ppo` takes as its reward model."""
    g = Graph("rewardmodel")
    pairs = g.add(cfg.data, name="pairs")()
    batcher = PreferenceBatch(
        model=cfg.model, pairs=cfg.pairs_per_step, max_length=cfg.max_length, chat=cfg.chat
    )
    batches = g.add(batcher, name="batch")(pairs)
    trainer = RewardTrainer(
        model=cfg.model, steps=cfg.steps, optimizer=cfg.optimizer, token_budget=cfg.token_budget,
        training=cfg.training, checkpoints=cfg.checkpoints,
    )  # fmt: skip
    g.add(trainer, name="trainer", ranks=cfg.ranks)(batches)
    return g
