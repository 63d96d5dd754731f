"""Supervised fine-tuning: the responses of a data set, by cross-entropy."""

from __future__ import annotations

from dataclasses import field

from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.chat import ChatFormat
from arriero.components.fixed_recipe import FixedDataConfig
from arriero.components.losses import CrossEntropy
from arriero.components.optimizer import AdamW, Optimizer
from arriero.components.supervised import ExampleSource, SupervisedBatch
from arriero.engine.graph import Graph


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class SFTConfig(FixedDataConfig):
    """One step trains on `examples_per_step` examples of at most `max_length` tokens."""

    data: ExampleSource
    chat: ChatFormat = field(default_factory=ChatFormat)
    optimizer: Optimizer = field(default_factory=lambda: AdamW(lr=1e-5))
    examples_per_step: PositiveInt = 32
    drop_last: bool = False  # the examples at the end that make no whole step; false: a smaller one
    max_length: PositiveInt = 512


def sft(cfg: SFTConfig) -> Graph:
    """No loop: nothing samples, so nobody waits for versions."""
    g = Graph("sft")
    examples = g.add(cfg.data, name="examples")()
    batcher = SupervisedBatch(
        model=cfg.model,
        examples=cfg.examples_per_step,
        max_length=cfg.max_length,
        drop_last=cfg.drop_last,
        chat=cfg.chat,
    )
    batches = g.add(batcher, name="batch")(examples)
    g.add(cfg.trainer(CrossEntropy()), ranks=cfg.ranks)(batches)
    return g
