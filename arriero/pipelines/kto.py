"""KTO: learn from responses that were liked and others that weren't, each by itself (arXiv:2402.01306)."""

from __future__ import annotations

from dataclasses import field

from pydantic import ConfigDict, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.chat import ChatFormat
from arriero.components.fixed_recipe import FixedDataConfig
from arriero.components.labelled import LabelledBatch, LabelledSource
from arriero.components.losses import KTO
from arriero.engine.graph import Graph


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class KTOConfig(FixedDataConfig):
    """Gains count from `kl` nats of log(pi/ref) on; without it, from an estimate of the batch.

    `balance`: however many responses of each kind a batch has, both weigh the same, times `liked` or
    `disliked`.
    """

    data: LabelledSource
    chat: ChatFormat = field(default_factory=ChatFormat)
    beta: PositiveFloat = 0.1
    kl: NonNegativeFloat | None = None
    balance: bool = True
    liked: PositiveFloat = 1.0
    disliked: PositiveFloat = 1.0
    examples_per_step: PositiveInt = 64
    max_length: PositiveInt = 512


def kto(cfg: KTOConfig) -> Graph:
    """No response is compared with another one of its prompt: each is judged by the reference."""
    g = Graph("kto")
    judged = g.add(cfg.data, name="judged")()
    batcher = LabelledBatch(
        model=cfg.model, examples=cfg.examples_per_step, max_length=cfg.max_length, balance=cfg.balance,
        mismatched=cfg.kl is None, chat=cfg.chat,
    )  # fmt: skip
    batches = g.add(batcher, name="batch")(judged)
    read = g.add(cfg.reads(cfg.model), name="reference")(batches)
    loss = KTO(beta=cfg.beta, kl=cfg.kl, liked=cfg.liked, disliked=cfg.disliked)
    g.add(cfg.trainer(loss, "sequence_mean"), ranks=cfg.ranks)(read)
    return g
