"""Which tensor lies where in a slot, and whether what a receiver holds can take it.

Names, shapes and dtypes are compared before any byte moves: a sync that would deliver only a part, or
nothing, is an error that says how many of how many.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod

import torch
import xxhash
from torch import Tensor

from arriero.schemas.weights import ALIGNMENT_BYTES, ITEM_BYTES, DType, TensorSpec, WeightManifest

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


@dataclass(frozen=True)
class Place:
    """Where one tensor lies in a slot, in bytes."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """Places of all tensors, by name; tied tensors share one. `nbytes` is the length of the slot."""

    places: tuple[Place, ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Layout":
        """Layout that depends on names, shapes, dtypes and ties alone, not on the order of the mapping."""
        if not tensors:
            raise WeightError("no tensors to publish")
        places: list[Place] = []
        seen: dict[tuple[object, ...], int] = {}
        end = 0
        for name in sorted(tensors):
            tensor = tensors[name]
            dtype = dtype_name(name, tensor)
            nbytes = tensor.numel() * ITEM_BYTES[dtype]
            offset = seen.setdefault(identity(tensor), end) if nbytes else 0
            if nbytes and offset == end:
                end = -(-(offset + nbytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            places.append(Place(name, dtype, tuple(tensor.shape), offset, nbytes))
        return cls(tuple(places), end)

    def fingerprint(self) -> str:
        """Equal for two layouts whose slots can be used for each other."""
        return xxhash.xxh3_128(repr(self).encode()).hexdigest()

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise WeightError, naming the tensor, if `tensors` no longer fit this layout."""
        now = Layout.of(tensors)
        if now == self:
            return
        before = {place.name: place for place in self.places}
        compare_names(before, tensors, f"given {{}} of the {len(before)} tensors of the layout")
        for place in now.places:
            old = before[place.name]
            if (old.dtype, old.shape) != (place.dtype, place.shape):
                got, want = f"{place.dtype}{place.shape}", f"{old.dtype}{old.shape}"
                raise WeightError(
                    f"{place.name} is now {got}, but the layout has {want}; make a new WeightSender"
                )
        moved = next(place.name for place in now.places if place != before[place.name])
        raise WeightError(f"tensors are tied otherwise than in the layout, first seen at {moved}")


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


def match(manifest: WeightManifest, into: Mapping[str, Tensor]) -> dict[str, tuple[TensorSpec, Tensor]]:
    """Pair every tensor of the manifest with the parameter that takes it.

    A tied name may be absent at the receiver, and the receiver may have one more name for a parameter that is
    received; anything else that is missing or extra, another shape, or a dtype that is no cast between
    floats, raises WeightError.
    """
    sent = {spec.name: spec for spec in manifest.tensors}
    pairs = {name: (sent[name], into[name]) for name in into if name in sent}
    arrived = {spec.offset for spec, _ in pairs.values() if spec.nbytes}
    aliased = {identity(tensor) for _, tensor in pairs.values()}
    wanted = {
        name for name, spec in sent.items() if name in pairs or spec.offset not in arrived or not spec.nbytes
    }
    offered = [name for name, tensor in into.items() if name in pairs or identity(tensor) not in aliased]
    compare_names(wanted, offered, f"received {{}} of {len(sent)} tensors of version {manifest.version}")
    for name, (spec, tensor) in pairs.items():
        dtype = dtype_name(name, tensor)
        if tuple(tensor.shape) != spec.shape:
            raise WeightError(f"{name} has shape {tuple(tensor.shape)} here, but {spec.shape} was sent")
        floats = tensor.is_floating_point() and TORCH_DTYPES[spec.dtype].is_floating_point
        if dtype != spec.dtype and not floats:
            raise WeightError(f"{name} is {dtype} here, but {spec.dtype} was sent; only floats are cast")
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            raise WeightError(
                f"{name} is an expanded view here: its elements share memory and can't be written"
            )
    return pairs


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
    if not tensor.numel():
        return (id(tensor),)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _extent_bytes(tensor: Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if prod(tensor.shape) else 0
