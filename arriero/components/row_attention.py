"""Attention of a packed forward pass: the layers see every token once, attention sees whole sequences.

    packed [1, N]: the tokens of all sequences, without padding; what sequences begin with alike stands once
      q, k, v of N tokens -> rows of whole sequences, blocks of similar length -> causal attention -> N tokens

A sequence attends to its own row and to nothing else, so the fast causal kernel is used, without a mask.
Where the packed tokens are the rows already, one after the other, nothing is moved. Otherwise moving to rows
and back is a sum over bags of rows, forward and backward: a fixed order, without atomics.

Shape suffixes: N = packed tokens, M = places in all rows, B and L = rows and places per row of a block,
A = attention heads, D = size of a head, X = anything.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch and transformers annotate only a part of what is called here.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from torch import Tensor

NAME = "arriero_rows"

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bags:
    """Row i of the result is the sum of the rows `index[offsets[i] : offsets[i + 1]]`; of none it is zero."""

    index: Tensor
    offsets: Tensor

    def sums(self, x: Tensor) -> Tensor:
        """[bags, D] of `x` [rows, D]."""
        if not len(self.index):  # the kernel refuses a table of indices without any
            return x.new_zeros(len(self.offsets), x.shape[1])
        return torch.nn.functional.embedding_bag(self.index, x, self.offsets, mode="sum")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """From tokens to places and back, and the transposed of both."""

    to_places: Bags
    from_places: Bags
    to_tokens: Bags
    from_tokens: Bags


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Where packed tokens stand in rows. `shapes` are (B, L) of each block; places count through all.

    A token of several sequences stands in a row of each and is read back from the first. Padding is zero.
    `moves` None: place i holds token i.
    """

    shapes: tuple[tuple[int, int], ...]
    moves: Moves | None

    def spread(self, x_NX: Tensor) -> Tensor:
        """[M, X]: each place holds its token."""
        return x_NX if self.moves is None else _moved(x_NX, self.moves.to_places, self.moves.from_places)

    def collect(self, x_MX: Tensor) -> Tensor:
        """[N, X]: each token as it stands in its first place."""
        return x_MX if self.moves is None else _moved(x_MX, self.moves.to_tokens, self.moves.from_tokens)


def rows_of(paths: list[Ids], blocks: list[tuple[int, ...]], device: torch.device | str) -> Rows:
    """Rows of sequences whose tokens are `paths[i]`; `blocks` are the sequences that share one shape."""
    shapes: list[tuple[int, int]] = []
    tokens: list[Ids] = []  # per place: its token, -1 for padding
    for block in blocks:
        width = max(len(paths[i]) for i in block)
        place_BL = np.full((len(block), width), -1, dtype=np.int64)
        for b, i in enumerate(block):
            place_BL[b, : len(paths[i])] = paths[i]
        shapes.append(place_BL.shape)
        tokens.append(place_BL.ravel())
    token_M = np.concatenate(tokens)
    if np.array_equal(token_M, np.arange(len(token_M))):
        return Rows(shapes=tuple(shapes), moves=None)
    places = np.flatnonzero(token_M >= 0)
    by_token = places[np.argsort(token_M[places], kind="stable")]
    held, first = np.unique(token_M[by_token], return_index=True)
    first_N = by_token[first]
    is_first_M = np.zeros(len(token_M), np.bool_)
    is_first_M[first_N] = True

    def bags(index: Ids, counts: npt.NDArray[Any]) -> Bags:
        offsets = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)
        return Bags(index=torch.from_numpy(index).to(device), offsets=torch.from_numpy(offsets).to(device))

    moves = Moves(
        to_places=bags(token_M[places], token_M >= 0),
        from_places=bags(by_token, np.diff([*first, len(by_token)])),
        to_tokens=bags(first_N, np.ones(len(held))),
        from_tokens=bags(token_M[is_first_M], is_first_M),
    )
    return Rows(shapes=tuple(shapes), moves=moves)


def register() -> str:
    """The name of this attention, known to transformers from now on."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    untyped: tuple[Any, Any, Any] = (AttentionInterface, AttentionMaskInterface, torch.compiler)
    # Its shapes change with every micro-batch: compiled layers leave it as it is.
    untyped[0].register(NAME, untyped[2].disable(attend))
    untyped[1].register(NAME, sdpa_mask)
    return NAME


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    rows: Rows | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention [1, N, A, D] of the packed tokens; without `rows` what `sdpa` does."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    kernel: Callable[..., tuple[Tensor, Tensor | None]] = sdpa_attention_forward
    if rows is None:
        return kernel(module, query, key, value, attention_mask, **options)
    window: int | None = options.get("sliding_window")
    spread = [rows.spread(x[0].transpose(0, 1)) for x in (query, key, value)]
    blocks: list[Tensor] = []
    begin = 0
    for B, L in rows.shapes:
        end = begin + B * L
        heads = [x_MAD[begin:end].view(B, L, *x_MAD.shape[1:]).transpose(1, 2) for x_MAD in spread]
        mask = None if window is None or window >= L else _band(L, window, query.device)
        attended_BLAD, _ = kernel(module, *heads, mask, **options)
        blocks.append(attended_BLAD.flatten(0, 1))
        begin = end
    return rows.collect(torch.cat(blocks) if len(blocks) > 1 else blocks[0])[None], None


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """[1, 1, L, L]: true where a token sees one of the last `window`, itself included."""
    position_L = torch.arange(length, device=device)
    behind_LL = position_L[:, None] - position_L
    return ((behind_LL >= 0) & (behind_LL < window))[None, None]


def _moved(x_NX: Tensor, forward: Bags, backward: Bags) -> Tensor:
    untyped: Any = _BagSum  # `apply` of a Function isn't typed
    moved: Tensor = untyped.apply(x_NX.flatten(1), forward, backward)
    return moved.view(len(moved), *x_NX.shape[1:])


class _BagSum(torch.autograd.Function):
    """Sums over bags; the gradient is the sum over the bags of the transposed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Bags, backward: Bags) -> Tensor:
        ctx.bags = backward
        return forward.sums(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        bags: Bags = ctx.bags
        return bags.sums(grad_outputs[0].contiguous()), None, None
