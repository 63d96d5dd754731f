"""One-dimensional packed arrays as pydantic field types: dtype and shape are checked, bytes not copied.

An array field takes a numpy array of exactly its dtype: no silent cast, so a float64 log-probability or an
int64 token id is refused where it is made, not found out in training. Arrays of records are read-only: an
array that is given becomes so, and only a view of one that can still be written is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic_core import core_schema

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue


@dataclass(frozen=True)
class Packed:
    """Marks a numpy field: one dimension, `dtype`, C-contiguous."""

    dtype: str

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        want = np.dtype(self.dtype)

        def validate(value: object) -> np.ndarray[Any, Any]:
            if type(value) is not np.ndarray:
                raise ValueError(f"a numpy array of {want} is needed, not {type(value).__name__}")
            if value.dtype is not want and value.dtype != want:
                raise ValueError(f"dtype {value.dtype} where {want} is needed; convert it where it is made")
            if value.ndim != 1 or not (flags := value.flags).c_contiguous:
                raise ValueError(f"shape {value.shape} where one contiguous dimension is needed")
            base = value.base
            # Whoever holds a writable base could still change this part of it.
            if base is not None and (flags.writeable or _writable(base)):
                value = value.copy()
            elif not flags.writeable:
                return value
            value.setflags(write=False)
            return value

        return core_schema.no_info_plain_validator_function(validate)

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"type": "string", "contentEncoding": "binary", "dtype": self.dtype}


def _writable(base: object) -> bool:
    return isinstance(base, np.ndarray) and base.flags.writeable


Int32Array: TypeAlias = Annotated[npt.NDArray[np.int32], Packed("int32")]
Float32Array: TypeAlias = Annotated[npt.NDArray[np.float32], Packed("float32")]
BoolArray: TypeAlias = Annotated[npt.NDArray[np.bool_], Packed("bool")]


def finite_exactly_where(values: npt.NDArray[np.float32], mask: npt.NDArray[np.bool_]) -> bool:
    """Whether `values` [L] is finite where `mask` [L] is true, and NaN or infinite everywhere else."""
    return same_bits(np.isfinite(values), mask)


def same_bits(a: npt.NDArray[np.bool_], b: npt.NDArray[np.bool_]) -> bool:
    """Whether two masks are equal. Comparing bytes is several times faster than `(a == b).all()`."""
    return a.tobytes() == b.tobytes()
