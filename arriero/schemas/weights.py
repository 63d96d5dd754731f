"""What a trainer announces when it has published weights: where they are, and the hash of every part.

A manifest proves itself: its fingerprint is recomputed on validation, so one that was changed on the way is
rejected before a byte is read.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, Literal, Self

import xxhash
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, model_validator

DType = Literal[
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
]
TransportName = Literal["shm", "gloo", "nccl", "nixl", "store"]
ITEM_BYTES: Mapping[DType, int] = MappingProxyType(
    {
        "float64": 8,
        "float32": 4,
        "float16": 2,
        "bfloat16": 2,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int64": 8,
        "int32": 4,
        "int16": 2,
        "int8": 1,
        "uint8": 1,
        "bool": 1,
    }
)
ALIGNMENT_BYTES = 64  # one cache line; also enough for any vector load

Fingerprint = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]  # xxh3_128, hexadecimal
_Word = Annotated[int, Field(ge=0, lt=2**63)]


class WeightManifest(BaseModel):
    """One published version, complete in one slot; a cell's place follows from the senders' plan."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: _Word
    url: Annotated[str, Field(pattern=r"^[a-z0-9+]+://[^\s]*$")]  # where the first source rank is reached
    session: Fingerprint  # random name of one start of the senders: tells two runs with one url apart
    plan: Fingerprint
    slot: NonNegativeInt
    cells: Annotated[tuple[Fingerprint, ...], Field(min_length=1)]  # of their bytes, in the plan's order
    fingerprint: Fingerprint  # see `cells_fingerprint`

    @model_validator(mode="after")
    def _fingerprint_is_of_these_cells(self) -> Self:
        want = cells_fingerprint(self.plan, self.cells)
        if self.fingerprint != want:
            raise ValueError(
                f"fingerprint {self.fingerprint} of version {self.version}, but its cells give {want}"
            )
        return self


def cells_fingerprint(plan: str, cells: Iterable[str]) -> str:
    """Fingerprint of a version, from those of their cells in the order of the plan."""
    state = xxhash.xxh3_128(plan.encode())
    for cell in cells:
        state.update(cell.encode())
    return state.hexdigest()
