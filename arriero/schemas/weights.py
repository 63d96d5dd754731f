"""What a trainer announces when it has published weights: where each tensor lies, and its bytes' hash.

A manifest proves itself: its fingerprint is recomputed on validation, so a name, shape or fingerprint that
was changed on the way is rejected before a byte is read.
"""

import json
from collections.abc import Iterable, Mapping
from itertools import pairwise
from math import prod
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


class TensorSpec(BaseModel):
    """One tensor of a published version: `nbytes` bytes at `offset` of its slot, C order."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(min_length=1)]
    dtype: DType
    shape: tuple[NonNegativeInt, ...]
    offset: _Word
    nbytes: _Word
    fingerprint: Fingerprint  # of the bytes

    @model_validator(mode="after")
    def _size_follows_from_shape(self) -> Self:
        want = prod(self.shape) * ITEM_BYTES[self.dtype]
        if self.nbytes != want:
            raise ValueError(f"{self.name}: {self.nbytes} bytes, but {self.dtype}{self.shape} takes {want}")
        if self.offset % ALIGNMENT_BYTES:
            raise ValueError(f"{self.name}: offset {self.offset} is not a multiple of {ALIGNMENT_BYTES}")
        return self


class WeightManifest(BaseModel):
    """One published version, complete in one slot of the buffers at `url`.

    Tied tensors stand in `tensors` under each of their names with one and the same place; any other overlap
    is an error.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: _Word
    url: Annotated[str, Field(pattern=r"^[a-z0-9+]+://[^\s]+$")]
    segment: Fingerprint  # random name of the allocation: tells two runs with one url apart
    slot: NonNegativeInt
    nbytes: _Word  # of the slot, gaps between tensors included
    tensors: Annotated[tuple[TensorSpec, ...], Field(min_length=1)]
    fingerprint: Fingerprint  # see `weights_fingerprint`

    @model_validator(mode="after")
    def _tensors_are_apart(self) -> Self:
        names = {spec.name for spec in self.tensors}
        if len(names) != len(self.tensors):
            raise ValueError(
                f"{len(self.tensors) - len(names)} tensor names stand twice in version {self.version}"
            )
        placed = sorted((spec for spec in self.tensors if spec.nbytes), key=lambda spec: spec.offset)
        for before, spec in pairwise(placed):
            tied = _place(before) == _place(spec)
            if spec.offset < before.offset + before.nbytes and not tied:
                raise ValueError(f"{before.name} and {spec.name} overlap at byte {spec.offset}")
        for spec in self.tensors:
            if spec.offset + spec.nbytes > self.nbytes:
                raise ValueError(f"{spec.name} ends at byte {spec.offset + spec.nbytes} of {self.nbytes}")
        return self

    @model_validator(mode="after")
    def _fingerprint_is_of_these_tensors(self) -> Self:
        want = weights_fingerprint(
            (spec.name, spec.dtype, spec.shape, spec.fingerprint) for spec in self.tensors
        )
        if self.fingerprint != want:
            raise ValueError(
                f"fingerprint {self.fingerprint} of version {self.version}, but its tensors give {want}"
            )
        return self


class ShardManifest(BaseModel):
    """One published version of sharded weights; a cell's place follows from the plan of both sides."""

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
    """Fingerprint of sharded weights, from those of their cells in the order of the plan."""
    state = xxhash.xxh3_128(plan.encode())
    for cell in cells:
        state.update(cell.encode())
    return state.hexdigest()


def weights_fingerprint(tensors: Iterable[tuple[str, str, tuple[int, ...], str]]) -> str:
    """Fingerprint of a set of weights, from (name, dtype, shape, fingerprint) of each tensor in any order."""
    return xxhash.xxh3_128(json.dumps(sorted(tensors)).encode()).hexdigest()


def _place(spec: TensorSpec) -> tuple[object, ...]:
    return spec.offset, spec.dtype, spec.shape, spec.fingerprint
