"""The mark of a checkpoint, written last: without it, or if its files are others, it doesn't count."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from arriero.schemas.lineage import Digest
from arriero.schemas.messages import Message


class Frontier(Message):
    """What the ledger said when a checkpoint was made; it may have been some events ahead of the weights.

    `cursor`: the number that the next training prompt gets. `best_version`: of those with held-out prompts so
    far the one with the largest share of right samples, `best_share`.
    """

    events: NonNegativeInt = 0
    cursor: NonNegativeInt = 0
    admitted: NonNegativeInt = 0
    trained: NonNegativeInt = 0
    dropped: dict[str, NonNegativeInt] = Field(default_factory=dict)
    held_out_sent: NonNegativeInt = 0
    held_out_back: NonNegativeInt = 0
    best_version: NonNegativeInt | None = None
    best_share: float | None = None


class CheckpointFile(Message):
    """One file of a checkpoint, beside its mark."""

    name: str = Field(pattern=r"^\w[\w.-]*$")
    bytes: NonNegativeInt
    sha256: Digest


class CheckpointMark(Message):
    """`checkpoint.json`. `version`: the optimizer steps in it; `ranks`: those that wrote it."""

    format: Literal[1] = 1
    run_id: str
    node: str
    version: NonNegativeInt
    ranks: PositiveInt
    files: tuple[CheckpointFile, ...]
    frontier: Frontier = Frontier()
