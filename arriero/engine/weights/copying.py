"""Bytes of one tensor into a slot and out of it, hashed on the way.

Host copies go in chunks that stay in the cache, so that the hash reads them for almost nothing. What is
hashed at the receiver is what was read back from its own parameter, never what was meant to be written.
"""

import ctypes
import threading
from collections.abc import Iterator
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from arriero.engine.weights.layout import TORCH_DTYPES, WeightError
from arriero.schemas.weights import ALIGNMENT_BYTES, DType

Bytes: TypeAlias = npt.NDArray[np.uint8]
# Read back while it is in the cache, and short enough that memcpy doesn't go around the cache. With shorter
# chunks, threads would wait for each other's interpreter.
HOST_CHUNK_BYTES = 512 << 10
STAGING_BYTES = 32 << 20


class Staging(threading.local):
    """A page-locked buffer between slots and an accelerator, one per thread, made at its first use."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def like(self, tensor: Tensor) -> Tensor:
        """A part of the buffer with the dtype and length of flat `tensor`, at most STAGING_BYTES."""
        if self._buffer is None:
            pin = tensor.device.type == "cuda"
            self._buffer = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=pin)
        return self._buffer[: tensor.numel() * tensor.element_size()].view(tensor.dtype)


def warm_buffer(nbytes: int) -> Bytes:
    """Memory that begins at a cache line and was touched once.

    Bytes that lie a little further in their line than those they are copied from take a slow path of memcpy.
    """
    memory = np.ones(nbytes + ALIGNMENT_BYTES, dtype=np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[begin : begin + nbytes]


class Sent(Protocol):
    """What a receiver knows of a tensor (or a cell of one) before its bytes arrive."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> DType: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def fingerprint(self) -> str: ...


def held(tensor: Tensor) -> Tensor | Bytes:
    """A tensor as the functions here take it fastest: its bytes, where they are contiguous on the host."""
    tensor = tensor.detach()
    return as_bytes(tensor) if tensor.device.type == "cpu" and tensor.is_contiguous() else tensor


def store(source: Tensor | Bytes, slot: Bytes, staging: Staging) -> str:
    """Copy `source` into `slot` in C order; the fingerprint of the source's bytes."""
    state = xxhash.xxh3_128()
    start = 0
    for chunk in _host_chunks(source, staging):
        # Hashed first, the bytes are in the cache, and one long copy bypasses it on its way out.
        state.update(chunk.data)
        slot[start : start + chunk.size] = chunk
        start += chunk.size
    assert start == slot.size, "a slot has the size of its tensor"
    return state.hexdigest()


def fingerprint(tensor: Tensor | Bytes, staging: Staging) -> str:
    """Fingerprint of the bytes of a tensor in C order, read from where they are."""
    view = held(tensor) if isinstance(tensor, Tensor) else tensor
    state = xxhash.xxh3_128()
    for chunk in _host_chunks(view, staging) if isinstance(view, Tensor) else (view,):
        state.update(chunk.data)
    return state.hexdigest()


def load(spec: Sent, slot: Bytes, into: Tensor | Bytes, staging: Staging) -> None:
    """Copy a slot's bytes into a parameter, in place, and verify the parameter; WeightError names it.

    `into` as bytes is a parameter that has the dtype of what was sent.
    """
    if isinstance(into, Tensor) and into.dtype == TORCH_DTYPES[spec.dtype]:
        into = held(into)
    if not isinstance(into, Tensor):
        state = xxhash.xxh3_128()
        for start in range(0, slot.size, HOST_CHUNK_BYTES):
            chunk = into[start : start + HOST_CHUNK_BYTES]
            chunk[:] = slot[start : start + HOST_CHUNK_BYTES]
            state.update(chunk.data)
        _check(spec, slot, state.hexdigest())
        return
    target = into.detach()
    if target.dtype != TORCH_DTYPES[spec.dtype]:
        _check_buffer(spec, slot)
        for sent, place in _pairs(spec, slot, target):
            _copy(sent, place, staging)
            _check_cast(spec, sent, place)
    elif target.device.type == "cpu":
        state = xxhash.xxh3_128()
        for sent, place in _pairs(spec, slot, target):
            place.copy_(sent)
            state.update(as_bytes(place.contiguous()).data)
        _check(spec, slot, state.hexdigest())
    else:
        for sent, place in _pairs(spec, slot, target):
            _copy(sent, place, staging)
        _check(spec, slot, fingerprint(target, staging))


def _check(spec: Sent, slot: Bytes, got: str) -> None:
    if got != spec.fingerprint:
        _check_buffer(spec, slot)
        raise WeightError(
            f"{spec.name} does not hold what was sent: read back {got}, sent {spec.fingerprint}; "
            "the parameter was written by something else, or shares memory with another one"
        )


def _check_buffer(spec: Sent, slot: Bytes) -> None:
    got = xxhash.xxh3_128(slot.data).hexdigest()
    if got != spec.fingerprint:
        raise WeightError(f"{spec.name}: the buffer holds {got}, but {spec.fingerprint} was sent")


def _check_cast(spec: Sent, sent: Tensor, held: Tensor) -> None:
    want, got = sent.to(held.dtype), held.to("cpu")
    # Bytes first: comparing them is fast, and they differ only where a NaN has two encodings.
    if not np.array_equal(as_bytes(want.contiguous()), as_bytes(got.contiguous())):
        values, found = want.double(), got.double()
        if not bool(((values == found) | (values.isnan() & found.isnan())).all()):
            raise WeightError(
                f"{spec.name} does not hold what was sent, cast from {spec.dtype} to {held.dtype}"
            )
    if torch.finfo(held.dtype).max < torch.finfo(sent.dtype).max:
        values = want.float() if want.element_size() == 1 else want
        if not bool(values.isfinite().all()):
            overflow = int((sent.double().isfinite() & ~values.isfinite()).sum())
            if overflow:
                raise WeightError(f"{spec.name}: {overflow} values of {spec.dtype} overflow in {held.dtype}")


def _copy(sent: Tensor, held: Tensor, staging: Staging) -> None:
    if held.device.type == "cpu" or not held.is_contiguous():
        held.copy_(sent)
    else:
        pinned = staging.like(sent)
        pinned.copy_(sent)
        held.copy_(pinned)


def _pairs(spec: Sent, slot: Bytes, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of the slot and the parameter, chunk by chunk; a strided parameter goes by rows."""
    sent = torch.as_tensor(slot).view(TORCH_DTYPES[spec.dtype]).view(spec.shape)
    chunk_bytes = HOST_CHUNK_BYTES if target.device.type == "cpu" else STAGING_BYTES
    items = chunk_bytes // max(sent.element_size(), target.element_size())
    if target.is_contiguous():
        yield from zip(_split(sent.view(-1), items), _split(target.view(-1), items), strict=True)
    else:
        yield from zip(_split(sent, items), _split(target, items), strict=True)


def _split(tensor: Tensor, items: int) -> Iterator[Tensor]:
    """Parts of about `items` elements, along the first dimension."""
    if not tensor.dim() or not tensor.numel():
        yield tensor
        return
    rows = max(items * tensor.shape[0] // tensor.numel(), 1)
    for start in range(0, tensor.shape[0], rows):
        yield tensor[start : start + rows]


def _host_chunks(tensor: Tensor | Bytes, staging: Staging) -> Iterator[Bytes]:
    """Bytes of a tensor in C order, chunk by chunk; each is valid until the next is taken."""
    view = held(tensor) if isinstance(tensor, Tensor) else tensor
    if not isinstance(view, Tensor):
        for start in range(0, view.size, HOST_CHUNK_BYTES):
            yield view[start : start + HOST_CHUNK_BYTES]
        return
    tensor = view
    if tensor.device.type == "cpu":
        for part in _split(tensor, HOST_CHUNK_BYTES // tensor.element_size()):
            yield as_bytes(part.contiguous())
    else:
        for part in _split(tensor.contiguous().view(-1), STAGING_BYTES // tensor.element_size()):
            pinned = staging.like(part)
            pinned.copy_(part)
            yield from _host_chunks(pinned, staging)


def as_bytes(tensor: Tensor) -> Bytes:
    """The memory of a contiguous host tensor.

    Not by `numpy()`, after which torch never again gives the memory of that storage back.
    """
    if not tensor.nbytes:
        return np.empty(0, np.uint8)
    memory: Any = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # lives as long as the array does
    array: Bytes = np.frombuffer(memory, np.uint8)
    return array
