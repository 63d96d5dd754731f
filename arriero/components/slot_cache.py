"""A KV cache in buffers that are used again and again, whose rows all end at the same column.

    column:   0 .................... end ....... columns
    row 0       . . . . . p p p p r r r | . . .
    row 1       . p p p p p p p r r r r | . . .      p prompt, r response, . somebody's leftovers (masked)
    row 2       . . . . . . . . . p p p | . . .      just admitted: its prompt was copied in to end here

A decoding step writes one column for all rows (a plain copy, no scatter) and attends over all columns: a
window inside of longer rows would cost a CPU three times as much, because its prefetchers run along memory.
So the number of columns follows the longest row: whenever they are used up, the rows are laid out anew,
moved to the front, with as many free columns as an eighth of their length. The buffers grow to the longest
rows there have been: for the whole context of a model they would rarely fit into memory.

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
        self._room = 0  # columns that the storage holds
        self._storage: list[tuple[Tensor, Tensor]] = []  # flat
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
            self._tensors = [
                (self._view(own[0], self.columns, keys), self._view(own[1], self.columns, values))
                for own, (keys, values) in zip(self._storage, layers, strict=True)
            ]
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
        size = self._slots * like.shape[1] * self._room * like.shape[3]
        return torch.zeros(size, dtype=like.dtype, device=like.device)

    def _view(self, flat: Tensor, columns: int, like: Tensor) -> Tensor:
        shape = (self._slots, like.shape[1], columns, like.shape[3])
        return flat[: shape[0] * shape[1] * shape[2] * shape[3]].view(shape)

    def _lay_out(self, columns: int, *, width: int, end: int) -> None:
        """Change the number of columns and where rows end; the last `width` columns of the rows stay."""
        grows = columns > self._room
        if grows:
            self._room = min(self._most_columns, max(columns, self._room * 3 // 2))
        for layer, old_pair in enumerate(self._tensors):
            pairs = zip(self._storage[layer], old_pair, strict=True)
            flats = [self._allocate(old) if grows else flat for flat, old in pairs]
            views = [self._view(flat, columns, old) for flat, old in zip(flats, old_pair, strict=True)]
            for old, new in zip(old_pair, views, strict=True):
                if width:
                    # A copy between: both may lie in the same storage. The numbers in all other places stay
                    # finite.
                    block = old[: self.rows, :, self.end - width : self.end].clone()
                    new[: self.rows, :, end - width : end] = block
            # Layer by layer: the old storage of all of them beside the new one might not fit.
            self._storage[layer], self._tensors[layer] = (flats[0], flats[1]), (views[0], views[1])
        self.columns, self.end = columns, end


def _columns_for(width: int) -> int:
    """Columns for rows of `width`, the free ones included."""
    least = width + max(4, width // 8)
    return -(-least // _MULTIPLE) * _MULTIPLE
