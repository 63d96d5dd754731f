"""KTO: learn from responses that were liked and others that weren't, each by itself (arXiv:2402.01306)."""

from __future__ import annotations

from dataclasses import field

from pydantic import ConfigDict, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.checkpoints import Checkpoints
from arriero.components.losses import KTO
from arriero.components.optimizer import AdamW, Optimizer
from arriero.components.preferences import PreferenceBatch, PreferenceSource
from arriero.components.reference import ReferenceLogprobs
from arriero.components.trainer import Trainer
from arriero.components.training_options import TrainingOptions
from arriero.engine.graph import Graph


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class KTOConfig:
    """The chosen responses are the liked ones. Gains count from `kl` nats of log(pi/ref) on."""

    model: str
    data: PreferenceSource
    optimizer: Optimizer = field(default_factory=AdamW)
    beta: PositiveFloat = 0.1
    kl: NonNegativeFloat = 0.0
    liked: PositiveFloat = 1.0  # the weight of a response of either kind
    disliked: PositiveFloat = 1.0
    steps: PositiveInt = 100
    pairs_per_step: PositiveInt = 32
    max_length: PositiveInt = 512
    ranks: PositiveInt = 1
    token_budget: PositiveInt = 8192
    training: TrainingOptions = field(default_factory=TrainingOptions)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)


def kto(cfg: KTOConfig) -> Graph:
    """As `dpo`, but no response is compared with the other of its pair: both are judged by the reference."""
    g = Graph("kto")
    pairs = g.add(cfg.data, name="pairs")()
    batcher = PreferenceBatch(model=cfg.model, pairs=cfg.pairs_per_step, max_length=cfg.max_length)
    batches = g.add(batcher, name="batch")(pairs)
    read = g.add(ReferenceLogprobs(model=cfg.model, token_budget=cfg.token_budget), name="reference")(batches)
    trainer = Trainer(
        model=cfg.model, loss=KTO(beta=cfg.beta, kl=cfg.kl, liked=cfg.liked, disliked=cfg.disliked),
        steps=cfg.steps, optimizer=cfg.optimizer, aggregation="sequence_mean", token_budget=cfg.token_budget,
        training=cfg.training, checkpoints=cfg.checkpoints,
    )  # fmt: skip
    g.add(trainer, ranks=cfg.ranks)(read)
    return g
