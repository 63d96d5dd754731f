"""How far a policy is from a teacher at each trained token: both distributions, a chunk of them at a time.

    hidden [T, H] of both -> for each chunk: logits [C, V] of both -> divergence [C], and the logits are gone

As in `head`, the logits of all tokens are never whole: backward makes each chunk anew.

Shape suffixes: T = tokens, C = tokens of a chunk, V = vocabulary, H = hidden of the policy, G = that of the
teacher.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch annotates only a part of what is called here.
# ruff: noqa: N815
# Shapes are suffixes of names, of fields too.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from torch import Tensor

    from arriero.components.head import Head

# Logits [C, V] of policy and teacher -> [C].
Between: TypeAlias = Callable[["Tensor", "Tensor"], "Tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Taught:
    """What the teacher read, the head it would say it with, and how the two are compared."""

    hidden_TG: Tensor
    linear: torch.nn.Linear
    between: Between


def divergence(
    head: Head, hidden_TH: Tensor, linear: torch.nn.Linear, temperatures_T: Tensor, taught: Taught
) -> Tensor:
    """`taught.between` [T] of the logits over the temperatures, differentiable in what is the policy's.

    Of heads of unequal width the rows that both have are compared: behind the tokens is what fills up a head.
    """
    shared = min(len(linear.weight), len(taught.linear.weight))
    dtype = head.dtype or linear.weight.dtype
    size = head.chunk(len(linear.weight))
    # Without a token there is still a chunk, of none: each rank's backward pass reaches every parameter.
    begins = range(0, max(len(hidden_TH), 1), size)
    untyped: Any = checkpoint  # returns whatever the function does
    parts: list[Tensor] = [
        untyped(
            _chunk, hidden_TH[b : b + size], *_rows(linear, shared), temperatures_T[b : b + size],
            taught.hidden_TG[b : b + size], *_rows(taught.linear, shared), taught.between, dtype,
            use_reentrant=False, preserve_rng_state=False,
        )
        for b in begins
    ]  # fmt: skip
    return torch.cat(parts)


def _rows(linear: torch.nn.Linear, number: int) -> tuple[Tensor, Tensor | None]:
    untyped: Any = linear  # torch types a bias as if there always was one
    bias_V: Tensor | None = untyped.bias
    return linear.weight[:number], None if bias_V is None else bias_V[:number]


def _chunk(
    hidden_CH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    temperatures_C: Tensor,
    teacher_CG: Tensor,
    teacher_VG: Tensor,
    teacher_V: Tensor | None,
    between: Between,
    dtype: torch.dtype,
) -> Tensor:
    with torch.autocast(hidden_CH.device.type, enabled=False):
        with torch.no_grad():
            teacher_CV = _logits(teacher_CG, teacher_VG, teacher_V, temperatures_C, dtype)
        return between(_logits(hidden_CH, weight_VH, bias_V, temperatures_C, dtype), teacher_CV)


def _logits(
    hidden_CX: Tensor, weight_VX: Tensor, bias_V: Tensor | None, temperatures_C: Tensor, dtype: torch.dtype
) -> Tensor:
    """[C, V] in float32, or in float64 where the product is."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    logits_CV = (hidden_CX.to(dtype) @ weight_VX.to(dtype).T).to(wide)
    return (logits_CV if bias_V is None else logits_CV + bias_V) / temperatures_C[:, None]
