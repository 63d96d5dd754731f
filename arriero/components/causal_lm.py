"""The forward pass of a Hugging Face causal language model, as the decode engine needs it.

The one place where the engine touches what transformers leaves untyped, or names differently from version
to version.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache


class CausalForward:
    """Logits after token sequences. The model moves to `device` and to evaluation mode.

    Raises ValueError for a model that can't be given a KV cache, positions and a mask of our own: no such
    arguments, an attention that takes no mask, or layers with a window shorter than `max_length` or without
    attention.

    Shapes: B sequences, L tokens (padded on the left to one length), W columns of the cache, V vocabulary.
    """

    def __init__(self, model: PreTrainedModel, *, max_length: int, device: torch.device) -> None:
        self._arguments = _arguments(model)
        _refuse_windows(model, max_length)
        self._model: Any = model.train(False)  # its call is not typed
        self._model.to(device)
        self.device = device

    def prompt(self, sequences: list[NDArray[np.int64]]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Logits [B, V] after each sequence; keys and values per layer [B, heads, L, head_dim]."""
        lengths_B = np.array([len(sequence) for sequence in sequences])
        longest = int(lengths_B.max())
        starts_B = longest - lengths_B
        # Padded with a token of its own: padding then computes nothing that the sequence itself doesn't.
        tokens_BL = np.stack([np.pad(seq, (longest - len(seq), 0), mode="edge") for seq in sequences])
        positions_BL = np.maximum(np.arange(longest) - starts_B[:, None], 0)
        mask_B1LL = None
        if starts_B.any():
            key_L = torch.arange(longest, device=self.device)
            query_L1 = key_L[:, None]
            real_B1L = key_L >= self.tensor(starts_B)[:, None, None]
            # Padding attends to itself: the softmax over nothing at all is NaN.
            mask_B1LL = self._additive((real_B1L & (key_L <= query_L1)) | (key_L == query_L1))[:, None]
        cache: Any = DynamicCache()  # the tensors of its layers are typed as if they could be missing
        logits_BV = self._call(tokens_BL, positions_BL, mask_B1LL, cache)
        return logits_BV, [(layer.keys, layer.values) for layer in cache.layers]

    def next(
        self, tokens_B: NDArray[np.int64], positions_B: NDArray[np.int64], visible_BW: Tensor, cache: Cache
    ) -> Tensor:
        """Logits [B, V] after one more token per row; `visible_BW`: the columns of the cache it sees."""
        return self._call(
            tokens_B[:, None], positions_B[:, None], self._additive(visible_BW)[:, None, None], cache
        )

    def state(self) -> dict[str, Tensor]:
        """The model's own weights by name, not copies."""
        state: dict[str, Tensor] = self._model.state_dict()
        return state

    def tensor(self, array: NDArray[Any]) -> Tensor:
        """`array` on the model's device."""
        return torch.as_tensor(np.ascontiguousarray(array), device=self.device)

    def _call(
        self, tokens_BL: NDArray[np.int64], positions_BL: NDArray[np.int64], mask: Tensor | None, cache: Cache
    ) -> Tensor:
        cache_name, options = self._arguments
        output = self._model(
            input_ids=self.tensor(tokens_BL),
            position_ids=self.tensor(positions_BL),
            attention_mask=mask,
            use_cache=True,
            **{cache_name: cache},
            **options,
        )
        logits_BV: Tensor = output.logits[:, -1]
        return logits_BV

    def _additive(self, visible: Tensor) -> Tensor:
        """0 where visible, else -inf: the form that attention needs, made once and not in every layer."""
        zero = torch.zeros((), dtype=self._model.dtype, device=self.device)
        return torch.where(visible, zero, float("-inf"))


def end_ids(*owners: object) -> set[int]:
    """All end-of-sequence ids that the owners (generation config, model config, tokenizer) name."""
    ids: set[int] = set()
    for owner in owners:
        named: int | list[int] | None = getattr(owner, "eos_token_id", None)
        if named is not None:
            ids.update(named if isinstance(named, list) else [named])
    return ids


def _arguments(model: PreTrainedModel) -> tuple[str, dict[str, int]]:
    """The name of the cache argument, and the argument that asks for logits at the last position only."""
    known = inspect.signature(model.forward).parameters
    cache_name = next((name for name in ("cache", "past_key_values") if name in known), None)
    if cache_name is None or "position_ids" not in known:
        raise ValueError(
            f"{type(model).__name__}.forward takes no {'position_ids' if cache_name else 'KV cache'}; "
            "take a decoder-only causal language model"
        )
    return cache_name, {"logits_to_keep": 1} if "logits_to_keep" in known else {}


def _refuse_windows(model: PreTrainedModel, max_length: int) -> None:
    whole: Any = model.config  # partly untyped
    config = whole.get_text_config()
    name, attention = type(model).__name__, getattr(config, "_attn_implementation", "sdpa")
    if attention not in ("sdpa", "eager"):
        raise ValueError(f"{name} uses {attention} attention; load it with attn_implementation='sdpa'")
    kinds: set[str] = set(getattr(config, "layer_types", None) or ())
    window: int | None = getattr(config, "sliding_window", None)
    # Without layer types (older Mistral), a window holds for every layer unless `use_sliding_window` denies
    # it.
    windowed = "sliding_attention" in kinds or (not kinds and getattr(config, "use_sliding_window", True))
    other = kinds - {"full_attention", "sliding_attention"}
    if other or (windowed and window is not None and window < max_length):
        raise ValueError(
            f"{name} has layers of {sorted(kinds) or 'windowed attention'} with a window of {window} tokens; "
            f"only full attention is supported, or a window of at least max_length ({max_length}): lower that"
        )
