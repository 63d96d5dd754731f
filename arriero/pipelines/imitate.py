"""Supervised fine-tuning on the best responses of a recorded run (RAFT, arXiv:2304.06767)."""

from __future__ import annotations

from dataclasses import field

from pydantic import ConfigDict, FiniteFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.fixed_recipe import FixedDataConfig
from arriero.components.losses import CrossEntropy
from arriero.components.optimizer import AdamW, Optimizer
from arriero.components.recorded import RecordedRollouts
from arriero.components.selection import BestResponses
from arriero.engine.graph import Graph


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class ImitateConfig(FixedDataConfig):
    """Of each recorded group the `keep` best responses, if their reward is `at_least` so much."""

    data: RecordedRollouts
    optimizer: Optimizer = field(default_factory=lambda: AdamW(lr=1e-5))
    keep: PositiveInt = 1
    at_least: FiniteFloat = 1.0
    truncated: bool = False  # take responses that ended at the limit of tokens, too
    groups_per_step: PositiveInt = 32


def imitate(cfg: ImitateConfig) -> Graph:
    """Another model's run makes it distillation by its responses; the own one, rejection sampling."""
    g = Graph("imitate")
    recorded = g.add(cfg.data, name="recorded")()
    best = BestResponses(
        groups=cfg.groups_per_step, keep=cfg.keep, at_least=cfg.at_least, truncated=cfg.truncated
    )
    batches = g.add(best, name="best")(recorded)
    g.add(cfg.trainer(CrossEntropy()), ranks=cfg.ranks)(batches)
    return g
