"""DPO: learn from pairs of responses, without samples and without a reward model (arXiv:2305.18290)."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic import ConfigDict, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.chat import ChatFormat
from arriero.components.fixed_recipe import FixedDataConfig
from arriero.components.losses import DPO
from arriero.components.preferences import PreferenceBatch, PreferenceSource
from arriero.engine.graph import Graph


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class DPOConfig(FixedDataConfig):
    """One step trains on `pairs_per_step` pairs; `kind` square is IPO. The reference is `model` itself."""

    data: PreferenceSource
    chat: ChatFormat = field(default_factory=ChatFormat)
    beta: PositiveFloat = 0.1
    kind: Literal["sigmoid", "square"] = "sigmoid"
    pairs_per_step: PositiveInt = 32
    max_length: PositiveInt = 512


def dpo(cfg: DPOConfig) -> Graph:
    """The reference reads a batch ahead of the trainer, in a process of its own."""
    g = Graph("dpo")
    pairs = g.add(cfg.data, name="pairs")()
    batcher = PreferenceBatch(
        model=cfg.model, pairs=cfg.pairs_per_step, max_length=cfg.max_length, chat=cfg.chat
    )
    batches = g.add(batcher, name="batch")(pairs)
    read = g.add(cfg.reads(cfg.model), name="reference")(batches)
    g.add(cfg.trainer(DPO(beta=cfg.beta, kind=cfg.kind), "sequence_mean"), ranks=cfg.ranks)(read)
    return g
