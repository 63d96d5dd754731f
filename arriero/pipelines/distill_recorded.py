"""Distillation on a recorded run: a teacher reads what was sampled then (arXiv:2306.13649)."""

from __future__ import annotations

from pydantic import ConfigDict, Field, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.advantage import GroupAdvantage
from arriero.components.fixed_recipe import FixedDataConfig
from arriero.components.losses import OnPolicyDistillation
from arriero.components.recorded import RecordedRollouts
from arriero.engine.graph import Graph


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class DistillRecordedConfig(FixedDataConfig):
    """`teacher` has the vocabulary of `model`; the ratio of model to recorded policy is at most `rho`."""

    teacher: str
    data: RecordedRollouts
    rho: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    groups_per_step: PositiveInt = 32


def distill_recorded(cfg: DistillRecordedConfig) -> Graph:
    """Nothing is sampled: the further `model` is from the policy of the record, the fewer tokens count."""
    g = Graph("distillrecorded")
    recorded = g.add(cfg.data, name="recorded")()
    batcher = GroupAdvantage(groups=cfg.groups_per_step, baseline="none", rewards="reported")
    batches = g.add(batcher, name="batch")(recorded)
    read = g.add(cfg.reads(cfg.teacher), name="teacher")(batches)
    g.add(cfg.trainer(OnPolicyDistillation(rho=cfg.rho)), ranks=cfg.ranks)(read)
    return g
