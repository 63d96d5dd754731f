"""Offline: advantage-weighted regression on recorded rollouts (arXiv:1910.00177)."""

from __future__ import annotations

from pydantic import ConfigDict, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.advantage import GroupAdvantage
from arriero.components.fixed_recipe import FixedDataConfig
from arriero.components.losses import AWR
from arriero.components.recorded import RecordedRollouts
from arriero.engine.graph import Graph


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class OfflineConfig(FixedDataConfig):
    """A smaller `beta` imitates the best responses only; weights are at most `max_weight`."""

    data: RecordedRollouts
    beta: PositiveFloat = 1.0
    max_weight: PositiveFloat = 20.0
    groups_per_step: PositiveInt = 32


def offline(cfg: OfflineConfig) -> Graph:
    """No generator and no loop: nothing is sampled, so the age of the data doesn't matter."""
    g = Graph("offline")
    recorded = g.add(cfg.data, name="recorded")()
    advantage = GroupAdvantage(groups=cfg.groups_per_step, baseline="mean", std=True)
    batches = g.add(advantage, name="advantage")(recorded)
    g.add(cfg.trainer(AWR(beta=cfg.beta, max_weight=cfg.max_weight)), ranks=cfg.ranks)(batches)
    return g
