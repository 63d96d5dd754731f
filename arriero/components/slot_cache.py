"""A preallocated KV cache whose rows all end at the same column.

    column:   0 .................... end ....... columns
    row 0       . . . . . p p p p r r r | . . .
    row 1       . p p p p p p p r r r r | . . .      p prompt, r response, . somebody's leftovers (masked)
    row 2       . . . . . . . . . p p p | . . .      just admitted: its prompt was copied in to end here

A decoding step writes one column for all rows (a plain copy, no scatter) and attends over all columns: a
window inside of longer rows would cost a CPU three times as much, because its prefetchers run along memory.
So the number of columns follows the longest row: whenever they are used up, the rows are laid out anew,
moved to the front, with as many free columns as an eighth of their length.

Only the columns of a row count for it, but masked ones are still multiplied (by zero) and have to hold finite
numbers: `clear` the row of a sequence that overflowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

# The softmax of a CPU wants full vector registers: 14 columns take longer than 16.
_MULTIPLE = 8


class SlotCache(Cache):
    """Keys and values of up to `slots` rows of up to `max_length` tokens, per layer [slots, heads, columns,
    head_dim].

    Rows [0, `rows`) are in use; the owner keeps them so with `copy_rows`. Passed to a model as its cache
    for one decoding step, after `advance`.
    """

    def __init__(self, *, slots: int, max_length: int) -> None:
        super().__init__(layers=[])
        self.rows = 0
        self.columns = 0
        self.end = 0
        self._slots = slots
        self._most_columns = _columns_for(max_length)
        self._storage: list[tuple[Tensor, Tensor]] = []  # flat, for the most columns
        self._tensors: list[tuple[Tensor, Tensor]] = []  # views of it, with the columns of now

    def advance(self, width: int) -> None:
        """Open a new column for all rows in use; `width`: the longest row before it."""
        if self.end == self.columns:
            self._lay_out(_columns_for(width), width=width, end=width)
        self.end += 1

    def fit(self, length: int, *, width: int) -> None:
        """Make room for new rows of up to `length`; `width`: the longest row in use, 0 if there is none."""
        if width == 0 or self.end < length:
            self._lay_out(_columns_for(length), width=width, end=length)

    def write(self, layers: Sequence[tuple[Tensor, Tensor]], source_N: Tensor, rows_N: Tensor) -> None:
        """Copy row `source_N[i]` of computed states [B, heads, length, head_dim] into row `rows_N[i]`."""
        if not self._storage:
            self._storage = [(self._allocate(keys), self._allocate(values)) for keys, values in layers]
            self._tensors = self._views(self.columns, layers)
        for own, computed in zip(self._tensors, layers, strict=True):
            for buffer, states in zip(own, computed, strict=True):
                buffer[rows_N, :, self.end - states.shape[2] : self.end] = states[source_N]

    def copy_rows(self, source_N: Tensor, rows_N: Tensor, *, width: int) -> None:
        """Copy rows onto others, the last `width` columns."""
        for pair in self._tensors:
            for buffer in pair:
                buffer[rows_N, :, self.end - width : self.end] = buffer[
                    source_N, :, self.end - width : self.end
                ]

    def clear(self, rows_N: Tensor) -> None:
        """Zero whole rows, so that no NaN stays behind in masked columns."""
        for pair in self._tensors:
            for buffer in pair:
                buffer[rows_N] = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the attention of layer `layer_idx`: take the new column, give all columns."""
        keys, values = self._tensors[layer_idx]
        keys, values = keys[: self.rows], values[: self.rows]
        keys[:, :, self.end - 1 : self.end] = key_states
        values[:, :, self.end - 1 : self.end] = value_states
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns besides the one that is being written."""
        return self.columns - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.columns, 0

    def _allocate(self, like: Tensor) -> Tensor:
        size = self._slots * like.shape[1] * self._most_columns * like.shape[3]
        return torch.zeros(size, dtype=like.dtype, device=like.device)

    def _views(self, columns: int, like: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        def view(flat: Tensor, tensor: Tensor) -> Tensor:
            shape = (self._slots, tensor.shape[1], columns, tensor.shape[3])
            return flat[: shape[0] * shape[1] * shape[2] * shape[3]].view(shape)

        pairs = zip(self._storage, like, strict=True)
        return [(view(own[0], keys), view(own[1], values)) for own, (keys, values) in pairs]

    def _lay_out(self, columns: int, *, width: int, end: int) -> None:
        """Change the number of columns and where rows end; the last `width` columns of the rows stay."""
        views = self._views(columns, self._tensors) if self._tensors else []
        for old_pair, new_pair in zip(self._tensors, views, strict=True):
            for old, new in zip(old_pair, new_pair, strict=True):
                if width:
                    # A copy between: both lie in the same storage. The numbers in all other places stay
                    # finite.
                    block = old[: self.rows, :, self.end - width : self.end].clone()
                    new[: self.rows, :, end - width : end] = block
        self._tensors, self.columns, self.end = views, columns, end


def _columns_for(width: int) -> int:
    """Columns for rows of `width`, the free ones included."""
    least = width + max(4, width // 8)
    return -(-least // _MULTIPLE) * _MULTIPLE
