"""Samples to tensors: what of a sample is forwarded, how it lies in memory, and what the loss is given.

Shape suffixes: B = rows, L = positions, T = trained tokens of a micro-batch.

    batch -> sequence weights (global) -> plan per rank -> MicroBatch: input_ids [B, L] + PackedTokens [T]

Only trained tokens reach the loss, as flat tensors [T]: there is no mask to forget, and padding has no loss.
Three layouts give the same tensors [T]. `padded`: one sequence per row, padded on the right, rows of similar
length together; causal attention never looks to the right, so padding needs no mask. `packed`: all sequences
in one row, without padding, the longest first; only attention sees them apart (`row_attention`).
`shared_prefix`: the same, and what several sequences begin with is forwarded once, as the prompt of a group.
"""

# pyright: reportUnknownMemberType=false
# torch annotates only a part of what is called here.
# ruff: noqa: N815
# Shapes are suffixes of names, of fields too.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from arriero.components.planning import MOVED, RUN_COST, Layout, Tokens, cut_into_runs, in_prefix_order, plan
from arriero.components.row_attention import Rows, rows_of
from arriero.engine.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from arriero.schemas.messages import Sample

__all__ = [
    "Layout",
    "MicroBatch",
    "PackedTokens",
    "check_samples",
    "check_vocabulary",
    "pack",
    "plan",
    "read",
]

_Ids: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTokens:
    """The trained tokens of a micro-batch, sequence by sequence.

    targets_T int64; advantages_T, weights_T, temperatures_T float32; behaviour_T float32 nats, None if any
    sample has none; sequence_T int64: the index in the batch of the sample it belongs to. Samples are never
    cut. reference_T as behaviour_T; proximal_T, entropy_T, divergence_T (these two with gradient), multiplier
    and kl_baseline are given by the trainer to a loss that needs them. versions_T int64: of the weights that
    sampled the token; None as behaviour_T.
    """

    targets_T: Tensor
    advantages_T: Tensor
    weights_T: Tensor
    temperatures_T: Tensor
    behaviour_T: Tensor | None
    sequence_T: Tensor
    reference_T: Tensor | None = None
    proximal_T: Tensor | None = None
    entropy_T: Tensor | None = None
    divergence_T: Tensor | None = None
    versions_T: Tensor | None = None
    multiplier: float | None = None
    kl_baseline: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward pass; positions `index_T`, of rows laid end to end, predict the trained tokens.

    `position_ids_BL` and `rows` None: every row is a sequence and counts from 0.
    """

    input_ids_BL: Tensor
    position_ids_BL: Tensor | None
    rows: Rows | None
    index_T: Tensor
    tokens: PackedTokens


def read(sample: Sample) -> Tokens:
    """The tokens that must be read to predict the last trained one; the first if none is trained."""
    trained = np.flatnonzero(sample.mask)
    return sample.tokens[: int(trained[-1]) if len(trained) else 1]


def pack(
    samples: Sequence[Sample],
    indices: Sequence[int],
    weights: npt.NDArray[np.float64],
    *,
    layout: Layout = "padded",
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """The micro-batch of `samples[i] for i in indices`; `weights` [S] per token, of the whole batch.

    No index: a dummy of one token and T = 0.
    """
    chosen = [samples[i] for i in indices]
    inputs = [read(s) for s in chosen] or [np.zeros(1, np.int32)]
    # The logits at position t - 1 predict token t.
    positions = [np.flatnonzero(s.mask) - 1 for s in chosen] or [np.zeros(0, np.int64)]
    if layout == "padded":
        width = max(len(row) for row in inputs)
        input_ids = np.stack([np.pad(row, (0, width - len(row))) for row in inputs]).astype(np.int64)
        index = np.concatenate([b * width + p for b, p in enumerate(positions)])
        position_ids, rows = None, None
    else:
        paths = _paths(inputs, share=layout == "shared_prefix")
        tokens = 1 + max(int(path[-1]) for path in paths)
        input_ids, position_ids = np.zeros((1, tokens), np.int64), np.zeros((1, tokens), np.int64)
        for row, path in zip(inputs, paths, strict=True):
            input_ids[0, path], position_ids[0, path] = row, np.arange(len(path))
        index = np.concatenate([path[p] for path, p in zip(paths, positions, strict=True)])
        rows = rows_of(paths, _blocks(paths, share=layout == "shared_prefix"), device)

    def on_device(array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return MicroBatch(
        input_ids_BL=on_device(input_ids),
        position_ids_BL=None if position_ids is None else on_device(position_ids),
        rows=rows,
        index_T=on_device(index),
        tokens=_tokens(chosen, indices, weights, device),
    )


def _paths(inputs: Sequence[Tokens], *, share: bool) -> list[_Ids]:
    """For each sequence the places of its tokens; with `share`, equal beginnings have the same places."""
    every = range(len(inputs))
    order, shared = in_prefix_order(inputs, every) if share else (_longest_first(inputs), [0] * len(inputs))
    paths: list[_Ids] = [np.zeros(0, np.int64)] * len(inputs)
    used = 0
    for k, i in enumerate(order):
        own = len(inputs[i]) - shared[k]
        before = paths[order[k - 1]][: shared[k]]
        paths[i] = np.concatenate([before, np.arange(used, used + own)])
        used += own
    return paths


def _blocks(paths: Sequence[_Ids], *, share: bool) -> list[tuple[int, ...]]:
    """Sequences that attend as rows of one shape.

    Runs of similar length; but without `share` those of one length each, which lie in memory as they are
    needed, if there are so few lengths that this costs less than padding and moving does.
    """
    order = _longest_first(paths)
    lengths = [len(paths[i]) for i in order]
    runs = cut_into_runs(lengths, len(paths) * lengths[0])
    padding = sum((end - begin) * lengths[begin] for begin, end in runs) - sum(lengths)
    alike = [tuple(same) for _, same in groupby(order, key=lambda i: len(paths[i]))]
    if not share and (len(alike) - len(runs)) * RUN_COST <= padding + sum(lengths) // MOVED:
        return alike
    return [tuple(order[begin:end]) for begin, end in runs]


def _longest_first(sequences: Sequence[npt.NDArray[np.generic]]) -> list[int]:
    return sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))


def check_samples(samples: Sequence[Sample], *, context: int | None, vocabulary: int | None = None) -> None:
    """ValueError for a sample that doesn't fit into the context, or is trained from its first token on.

    UserError for a token outside the model's `vocabulary`.
    """
    for i, s in enumerate(samples):
        if context is not None and (length := len(read(s))) > context:
            raise ValueError(
                f"sample {i} of group {s.group!r} has {length} tokens to read; the context is {context}"
            )
        if vocabulary is not None:
            check_vocabulary(s.tokens, vocabulary, f"sample {i} of group {s.group!r}")
        if not len(s.tokens) or s.mask[0]:
            raise ValueError(f"sample {i} of group {s.group!r} must begin with a token that isn't trained on")


def check_vocabulary(tokens: npt.ArrayLike, vocabulary: int, where: str) -> None:
    """UserError if a token of `where` has no place in the model's vocabulary."""
    if (largest := int(np.max(tokens, initial=0))) >= vocabulary:
        raise UserError(
            f"{where} has token {largest}, but the model's vocabulary ends at {vocabulary - 1}: "
            "the tokenizer isn't this model's; save both together"
        )


def _tokens(
    chosen: list[Sample], indices: Sequence[int], weights: npt.NDArray[np.float64], device: torch.device | str
) -> PackedTokens:
    counts = [int(s.mask.sum()) for s in chosen]

    def trained(arrays: list[npt.NDArray[np.generic]], dtype: type[np.generic]) -> Tensor:
        picked = [a[s.mask] for a, s in zip(arrays, chosen, strict=True)]
        flat = np.concatenate(picked) if picked else np.zeros(0)
        return torch.from_numpy(flat.astype(dtype)).to(device)

    def spread(values: list[float] | list[int], dtype: type[np.generic]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=dtype), counts)).to(device)

    def logprobs(arrays: list[npt.NDArray[np.float32] | None]) -> Tensor | None:
        known = [a for a in arrays if a is not None]
        return trained([*known], np.float32) if len(known) == len(arrays) else None

    def versions(arrays: list[npt.NDArray[np.int32] | None]) -> Tensor | None:
        known = [a for a in arrays if a is not None]
        return trained([*known], np.int64) if len(known) == len(arrays) else None

    return PackedTokens(
        targets_T=trained([s.tokens for s in chosen], np.int64),
        advantages_T=trained([s.advantages for s in chosen], np.float32),
        weights_T=spread([float(weights[i]) for i in indices], np.float32),
        temperatures_T=spread([s.temperature for s in chosen], np.float32),
        behaviour_T=logprobs([s.logprobs for s in chosen]),
        sequence_T=spread(list(indices), np.int64),
        reference_T=logprobs([s.reference for s in chosen]),
        versions_T=versions([s.versions for s in chosen]),
    )
