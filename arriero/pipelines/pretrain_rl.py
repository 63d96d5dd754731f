"""Pretraining from scratch, fine-tuning, reinforcement learning: the Echo Chamber study (arXiv:2504.07912).

One configuration, three runs (`--stage`), each with the `model/` of the run before, which its manifest names.
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.chat import ChatFormat
from arriero.components.losses import CrossEntropy
from arriero.components.mixture import ExampleMixture
from arriero.components.optimizer import AdamW, Optimizer
from arriero.components.supervised import SupervisedBatch
from arriero.components.trainer import Trainer
from arriero.engine.graph import Graph
from arriero.pipelines.aipo import AIPOConfig, aipo


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Supervised:
    """A supervised stage: its data in shares, and how it learns them."""

    data: ExampleMixture
    steps: PositiveInt = 1000
    examples_per_step: PositiveInt = 64
    max_length: PositiveInt = 1024
    optimizer: Optimizer = field(default_factory=lambda: AdamW(lr=1e-3, schedule="cosine", floor=0.1))


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class PretrainRLConfig(AIPOConfig):
    """`pretrain` and `sft` are the supervised stages; all other options are those of the stage `rl`."""

    stage: Literal["pretrain", "sft", "rl"]
    pretrain: Supervised
    sft: Supervised


def pretrain_rl(cfg: PretrainRLConfig) -> Graph:
    """The mixture decides what there is to find; RL picks one way of answering from it and turns it up."""
    if cfg.stage == "rl":
        return aipo(cfg)
    stage, chat = (cfg.pretrain, ChatFormat()) if cfg.stage == "pretrain" else (cfg.sft, cfg.chat)
    g = Graph(cfg.stage)
    batcher = SupervisedBatch(
        model=cfg.model, examples=stage.examples_per_step, max_length=stage.max_length, chat=chat
    )
    batches = g.add(batcher, name="batch")(g.add(stage.data, name="examples")())
    trainer = Trainer(
        model=cfg.model, loss=CrossEntropy(), steps=stage.steps, optimizer=stage.optimizer,
        token_budget=cfg.token_budget, training=cfg.training, checkpoints=cfg.checkpoints,
    )  # fmt: skip
    g.add(trainer, ranks=cfg.ranks)(batches)
    return g
