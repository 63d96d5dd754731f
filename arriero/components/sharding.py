"""A policy split over ranks: FSDP2, with copies of the split model where ranks are left (HSDP).

    ranks = copies x shards: a mesh ("replicate", "shard"); layers are gathered one by one, used and let go
    gradients are summed over all ranks: the loss is normalised over the whole batch already

Everything outside of the forward pass sees the part of a parameter that this rank holds, a plain tensor.
"""

# pyright: reportUnknownMemberType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torch import Tensor

    from arriero.components.forward import PackedForward


def shard(
    forward: PackedForward, *, shards: int, ranks: int, compute: torch.dtype | None, wide_head: bool
) -> dist.ProcessGroup:
    """Split the parameters of `forward` in place; the group of ranks that hold one copy together.

    `compute`: what layers are gathered and computed in; gradients are summed in float32. `wide_head`: what
    stands outside of the layers, the head too, stays float32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (ranks // shards, shards), mesh_dim_names=("replicate", "shard"))
    group = mesh.get_group("shard")
    used = mesh if ranks > shards else mesh["shard"]
    inner = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    outer = MixedPrecisionPolicy(param_dtype=None if wide_head else compute, reduce_dtype=torch.float32)
    for layer in layers(forward.model):
        fully_shard(layer, mesh=used, mp_policy=inner)
    fully_shard(forward, mesh=used, mp_policy=outer)
    for module in forward.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other, and 1.0 needs no other
    return group


def layers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The repeated blocks of a decoder: the longest list of modules in it."""
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    if lists:
        yield from max(lists, key=len)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank; all ranks of its mesh call it together."""
    if not isinstance(tensor, DTensor):
        return tensor
    gathered: Tensor = tensor.full_tensor()
    return gathered


def sharded_like(parameter: Tensor, held: Tensor) -> Tensor:
    """`held` as this rank's part of a tensor that is split like `parameter`."""
    if not isinstance(parameter, DTensor):
        return held
    untyped: Any = DTensor  # `from_local` is annotated only in part
    tensor: Tensor = untyped.from_local(
        held, parameter.device_mesh, parameter.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip
    return tensor
