"""The loss of a critic."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def value_loss(
    values_T: Tensor, returns_T: Tensor, *, old_values_T: Tensor | None = None, clip: float | None = None
) -> Tensor:
    """`(V - R)^2 / 2` [T]; with `clip` the larger of it and that of V held within `clip` of `old_values_T`.

    Source: the implementation of PPO, arXiv:2005.12729, section 3. ValueError for one of the two without the
    other.
    """
    plain_T = (values_T - returns_T).square()
    if (clip is None) != (old_values_T is None):
        raise ValueError(f"clip={clip}: clipping needs both a width and the values before the update")
    if clip is None or old_values_T is None:
        return plain_T / 2
    held_T = old_values_T + (values_T - old_values_T).clamp(-clip, clip)
    return plain_T.maximum((held_T - returns_T).square()) / 2
