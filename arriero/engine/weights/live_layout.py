"""Layouts of tensors that are there: copies, shards of a trainer's ranks, a receiver's whole tensors."""

# pyright: reportUnknownMemberType=false
# DTensor is annotated only in part.

from collections.abc import Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from arriero.engine.weights.layout import WeightError, compare_names, dtype_name, identity
from arriero.engine.weights.plan import Plan
from arriero.engine.weights.ranks import Ranks
from arriero.schemas.layouts import LogicalTensor, Piece, RankLayout, StoredTensor, WorldLayout


def replicated_layout(tensors: Mapping[str, Tensor], ranks: int = 1) -> WorldLayout:
    """Every rank holds these tensors whole; a tensor under two names (tied) is one logical tensor."""
    logical: dict[tuple[int, tuple[int, ...]], str] = {}
    stored: list[StoredTensor] = []
    for name, tensor in sorted(tensors.items()):
        size = tuple(tensor.shape)
        known = logical.setdefault((tensor.data_ptr() if tensor.numel() else id(tensor), size), name)
        if known == name:
            zero = (0,) * len(size)
            piece = Piece(tensor=name, start=zero, stop=size, at=zero)
            stored.append(
                StoredTensor(name=name, dtype=dtype_name(name, tensor), shape=size, pieces=(piece,))
            )
    return WorldLayout(
        tensors=tuple(LogicalTensor(name=s.name, shape=s.shape) for s in stored),
        ranks=(RankLayout(stored=tuple(stored)),) * ranks,
    )


def whole_layout(plan: Plan, into: Mapping[str, Tensor]) -> RankLayout:
    """Of a receiver that stores every tensor that is sent under its own name, whole.

    A further name for one of them (tied) is allowed. WeightError names what has no place, or nothing to fill
    it, and says how many of how many would arrive.
    """
    have = {identity(into[name]) for name in plan.tensors if name in into}
    offered = [name for name in into if name in plan.tensors or identity(into[name]) not in have]
    compare_names(plan.tensors, offered, f"received {{}} of {len(plan.tensors)} tensors")
    stored: list[StoredTensor] = []
    for name, size in plan.tensors.items():
        if tuple(into[name].shape) != size:
            raise WeightError(f"{name} has shape {tuple(into[name].shape)} here, but {size} was sent")
        zero = (0,) * len(size)
        piece = Piece(tensor=name, start=zero, stop=size, at=zero)
        stored.append(StoredTensor(name=name, dtype=plan.dtypes[name], shape=size, pieces=(piece,)))
    return RankLayout(stored=tuple(stored))


def gathered_layout(tensors: Mapping[str, Tensor], ranks: Ranks) -> WorldLayout:
    """What all ranks of a trainer hold of these tensors: shards of DTensors, all of any other tensor.

    Every rank calls it with its own; all get the same. A DTensor may be split along any dimension of its
    mesh; WeightError if a rank's part of it is no box.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    stored: list[StoredTensor] = []
    seen: set[tuple[object, ...]] = set()
    for name, tensor in sorted(tensors.items()):
        local, start = local_part(name, tensor)
        if local.numel() and identity(local) in seen:
            continue  # tied
        seen.add(identity(local))
        shapes[name] = tuple(tensor.shape)
        stop = tuple(a + n for a, n in zip(start, local.shape, strict=True))
        piece = Piece(tensor=name, start=start, stop=stop, at=(0,) * len(start))
        stored.append(
            StoredTensor(name=name, dtype=dtype_name(name, local), shape=tuple(local.shape), pieces=(piece,))
        )
    mine = RankLayout(stored=tuple(stored))
    said = ranks.gather(mine.model_dump_json().encode())
    return WorldLayout(
        tensors=tuple(LogicalTensor(name=name, shape=shape) for name, shape in shapes.items()),
        ranks=tuple(RankLayout.model_validate_json(data) for data in said),
    )


def local_part(name: str, tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """What this rank holds of a tensor, and the index of its first element in the whole."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.dim()
    local = tensor.to_local()
    if any(p.is_partial() or (p.is_shard() and type(p) is not Shard) for p in tensor.placements):
        raise WeightError(
            f"{name} is placed as {tensor.placements}; the weight plane knows shards and copies"
        )
    size, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    assert tuple(size) == tuple(local.shape), "a local shard has the shape of its placement"
    # An empty shard begins behind the end.
    return local, tuple(min(a, n) for a, n in zip(offset, tensor.shape, strict=True))
