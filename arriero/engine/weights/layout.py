"""What can be wrong with tensors before any byte moves, and the errors that say it."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from math import prod

import torch
from torch import Tensor

from arriero.schemas.weights import DType

TORCH_DTYPES: Mapping[DType, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
_DTYPE_NAMES: Mapping[torch.dtype, DType] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class WeightError(RuntimeError):
    """Weights did not arrive as they were sent; the message names the tensor, or how many of how many."""


class StaleWeights(WeightError):
    """The sender has overwritten this version; take the newest manifest and receive that one.

    If it is raised in the middle of a copy, the parameters hold parts of two versions until then.
    """


class SenderGone(WeightError):
    """Whoever sent this version has ended or died, or doesn't answer.

    It may be announced anew by whoever comes after; else it isn't to be had any more.
    """


def dtype_name(name: str, tensor: Tensor) -> DType:
    """Name of the dtype; WeightError if the bytes of this tensor can't be sent as they are."""
    if hasattr(tensor, "to_local"):
        raise WeightError(f"{name} is a DTensor; give its local shard, `{name}.to_local()`")
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        raise WeightError(
            f"{name} is {tensor.layout} on {tensor.device}; only dense tensors with storage are sent"
        )
    if tensor.dtype not in _DTYPE_NAMES:
        raise WeightError(f"{name} is {tensor.dtype}; the weight plane knows {', '.join(TORCH_DTYPES)}")
    return _DTYPE_NAMES[tensor.dtype]


def overlapping(tensors: Mapping[str, Tensor]) -> set[str]:
    """Names whose memory ranges meet: writing one may destroy another that was already verified."""
    extents = sorted(
        (str(t.device), t.data_ptr(), t.data_ptr() + _extent_bytes(t), name)
        for name, t in tensors.items()
        if t.numel()
    )
    found: set[str] = set()
    widest = None
    for extent in extents:
        if widest is not None and widest[0] == extent[0] and extent[1] < widest[2]:
            found |= {widest[3], extent[3]}
            widest = max(widest, extent, key=lambda item: item[2])
        else:
            widest = extent
    return found


def some(names: Iterable[str], limit: int = 4) -> str:
    """The first few names, for a message."""
    listed = sorted(names)
    return ", ".join(listed[:limit]) + (f" and {len(listed) - limit} more" if len(listed) > limit else "")


def compare_names(wanted: Iterable[str], offered: Iterable[str], count: str) -> None:
    """Raise WeightError if the names differ; `count` has a place for the number that both have."""
    wanted, offered = set(wanted), set(offered)
    missing, extra = wanted - offered, offered - wanted
    if not missing and not extra:
        return
    parts = [count.format(len(wanted & offered))]
    if missing:
        parts.append(f"no place for {some(missing)}")
        near = get_close_matches(min(missing), extra, n=1)
        if near:
            parts.append(f"nearest to {min(missing)} is {near[0]}")
    if extra:
        parts.append(f"nothing for {some(extra)}")
    raise WeightError("; ".join(parts))


def identity(tensor: Tensor) -> tuple[object, ...]:
    """Equal for tensors that are the same elements in the same memory."""
    if not tensor.numel() or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return (id(tensor),)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _extent_bytes(tensor: Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if prod(tensor.shape) else 0
