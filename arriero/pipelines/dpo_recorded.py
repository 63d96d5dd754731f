"""DPO on a recorded run: the best response of each group against its worst (arXiv:2305.18290)."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.fixed_recipe import FixedDataConfig
from arriero.components.losses import DPO
from arriero.components.recorded import RecordedRollouts
from arriero.components.selection import RankedPairs
from arriero.engine.graph import Graph


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class DPORecordedConfig(FixedDataConfig):
    """As `dpo`, of groups whose best and worst reward differ by more than `margin`."""

    data: RecordedRollouts
    margin: NonNegativeFloat = 0.0
    beta: PositiveFloat = 0.1
    kind: Literal["sigmoid", "square"] = "sigmoid"
    pairs_per_step: PositiveInt = 32


def dpo_recorded(cfg: DPORecordedConfig) -> Graph:
    """The reward only ranks: how far two responses are apart doesn't matter."""
    g = Graph("dporecorded")
    recorded = g.add(cfg.data, name="recorded")()
    batches = g.add(RankedPairs(pairs=cfg.pairs_per_step, margin=cfg.margin), name="pairs")(recorded)
    read = g.add(cfg.reads(cfg.model), name="reference")(batches)
    g.add(cfg.trainer(DPO(beta=cfg.beta, kind=cfg.kind), "sequence_mean"), ranks=cfg.ranks)(read)
    return g
