"""Messages as bytes: msgspec-msgpack of plain fields, then pydantic validation. Nothing is ever unpickled.

A message is `[kind, schema, fields]`; `schema` is a hash of the class's JSON schema, so that two processes
with different code refuse each other's records instead of misreading them. Arrays travel as raw bytes in a
msgpack extension whose code names the dtype; decoding makes views of the received buffer, not copies.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from typing import Any, TypeVar

import msgspec
import numpy as np
from pydantic import BaseModel, ValidationError

from arriero.engine.errors import one_line
from arriero.schemas.messages import Message

M = TypeVar("M", bound=Message)

MAX_BYTES = 2**31 - 1  # of one message; a size that a header of 32 bits holds on every transport

_DTYPES = {
    code: np.dtype(name) for code, name in enumerate(("int32", "float32", "bool", "int64", "float64"), 1)
}
_CODES = {dtype.num: code for code, dtype in _DTYPES.items()}


class CodecError(ValueError):
    """Bytes that are no valid message of the expected kind, or a message that has no byte form."""


def encode(message: Message) -> bytes:
    """The message as bytes. Raises CodecError for a field value that can't travel."""
    kind = type(message)
    try:
        data = _ENCODER.encode((kind.__name__, schema_hash(kind), message.__dict__))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CodecError(f"{kind.__name__} can't be encoded: {error}") from error
    if len(data) > MAX_BYTES:
        raise CodecError(f"{kind.__name__} takes {len(data)} bytes, more than {MAX_BYTES}; send less at once")
    return data


def decode(data: bytes | memoryview, kind: type[M]) -> M:
    """A validated `kind`. Raises CodecError naming what arrived instead, or the field that is wrong."""
    try:
        name, schema, fields = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise CodecError(f"{len(data)} bytes are no {kind.__name__}: {error}") from error
    if name != kind.__name__ or schema != schema_hash(kind):
        raise CodecError(
            f"{name[:80]} (schema {schema[:80]}) arrived where {kind.__name__} (schema {schema_hash(kind)}) "
            "is expected; all processes of a run need the same code"
        )
    try:
        return kind.model_validate(fields)
    except (ValidationError, RecursionError) as error:
        raise CodecError(f"{kind.__name__} is not valid: {one_line(error)}") from error


@cache
def schema_hash(kind: type[BaseModel]) -> str:
    """Eight hexadecimal digits that change when the fields of `kind`, or of what it holds, change."""
    schema = json.dumps(kind.model_json_schema(), sort_keys=True)
    return hashlib.sha256(schema.encode()).hexdigest()[:8]


def _to_wire(value: Any) -> Any:
    if type(value) is np.ndarray:
        code = _CODES.get(value.dtype.num)
        if code is None or value.ndim != 1:
            raise TypeError(f"array of {value.dtype} with shape {value.shape}; records hold packed arrays")
        return msgspec.msgpack.Ext(code, value.data)
    if isinstance(value, BaseModel):
        return value.__dict__
    raise TypeError(f"a {type(value).__name__} can't travel")


def _from_wire(code: int, data: memoryview) -> np.ndarray[Any, Any]:
    dtype = _DTYPES.get(code)
    if dtype is None:
        raise ValueError(f"unknown array code {code}")
    return np.frombuffer(data, dtype)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_wire)
_DECODER = msgspec.msgpack.Decoder(tuple[str, str, dict[str, Any]], ext_hook=_from_wire)
