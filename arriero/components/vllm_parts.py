"""A rank's part of a checkpoint tensor, as the loaders of an inference engine take it.

A loader of vLLM gets a tensor of the checkpoint and narrows it to what its rank stores. `Part` has the shape
of the whole tensor and the memory of that part: narrowed to it, it is a plain tensor.
"""

# pyright: reportUnknownMemberType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from arriero.engine.weights import WeightError

_aten: Any = torch.ops.aten


class Part(Tensor):
    """The tensor of that name and `shape`, of which `held` is there, from index `start` on."""

    tensor: str
    held: Tensor
    start: tuple[int, ...]

    @staticmethod
    def __new__(cls: type[Part], name: str, held: Tensor, shape: Sequence[int], start: Sequence[int]) -> Part:
        make: Any = Tensor._make_wrapper_subclass
        part: Part = make(cls, tuple(shape), dtype=held.dtype, device=held.device)
        part.tensor, part.held, part.start = name, held, tuple(start)
        return part

    def __repr__(self) -> str:  # type: ignore[override]  # a Tensor's takes what to print
        return f"Part({self.tensor}, {tuple(self.held.shape)} of {tuple(self.shape)} at {self.start})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stubs say nothing of its arguments
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is _aten.slice.Tensor:
            return _narrowed(*args)
        if func is _aten.detach.default:
            return args[0]
        parts = [repr(argument) for argument in args if isinstance(argument, Part)]
        raise WeightError(f"the engine's loader wants all of {parts[0]}: {func}")


def _narrowed(
    part: Part, dim: int = 0, begin: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    size = part.shape[dim]
    low, high = begin or 0, min(size if end is None else end, size)
    at = low - part.start[dim]
    if step != 1 or at < 0 or at + high - low > part.held.shape[dim]:
        raise WeightError(f"the engine's loader wants {low} to {high} of dimension {dim} of {part!r}")
    held = part.held.narrow(dim, at, high - low)
    shape, start = list(part.shape), list(part.start)
    shape[dim], start[dim] = high - low, 0
    return held if tuple(shape) == tuple(held.shape) else Part(part.tensor, held, shape, start)
