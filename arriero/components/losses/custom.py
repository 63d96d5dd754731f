"""A function of a user's own file as a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydantic.dataclasses import dataclass

from arriero.components.losses.loss import Loss, Need, Unclipped

if TYPE_CHECKING:
    from torch import Tensor

    from arriero.components.packing import PackedTokens


@dataclass(frozen=True, kw_only=True)
class Custom(Unclipped, Loss):
    """`function(logprobs_T, tokens)` gives the loss [T] of each trained token; the rest says what it is.

    See `Loss` and `Facts` for the facts: the graph check relies on them, and the laws test some.
    """

    function: Callable[..., Any]
    needs_behaviour: bool  # type: ignore[misc]  # a fact of the function, so not of this class
    ratio_control: bool  # type: ignore[misc]
    needs: tuple[Need, ...] = ()
    policy_gradient: bool = True

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        losses_T: Tensor = self.function(logprobs_T, tokens)
        return losses_T
