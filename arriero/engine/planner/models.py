"""Shapes of dense decoder-only transformers: parameters, operations and cache bytes from eight numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from arriero.engine.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A Llama-like model: grouped-query attention, a gated feed-forward block of three matrices."""

    name: str
    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    vocab: int
    head: int
    tied: bool = False

    @property
    def layer_params(self) -> int:
        attention = self.hidden * self.head * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.feed_forward + 2 * self.hidden

    @property
    def params(self) -> int:
        """All parameters, embedding and output matrix included (once if tied)."""
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        return tables + self.layers * self.layer_params + self.hidden

    @property
    def matmul_params(self) -> int:
        """Parameters that every token is multiplied with; the input embedding is a look-up."""
        return self.vocab * self.hidden + self.layers * self.layer_params

    def forward_flops(self, context: float) -> float:
        """Operations per token that attends to `context` earlier ones: 2 a parameter, and attention."""
        return 2.0 * self.matmul_params + 4.0 * self.layers * self.heads * self.head * context

    def cache_bytes(self, bytes_per_number: int) -> int:
        """Bytes of keys and values that one token leaves in the cache."""
        return 2 * self.layers * self.kv_heads * self.head * bytes_per_number


def _llama(name: str, layers: int, hidden: int, feed_forward: int, heads: int) -> ModelShape:
    return ModelShape(
        name=name, layers=layers, hidden=hidden, feed_forward=feed_forward, heads=heads, kv_heads=8,
        vocab=128256, head=128,
    )  # fmt: skip


def _qwen(
    name: str,
    layers: int,
    hidden: int,
    feed_forward: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    tied: bool = False,
) -> ModelShape:
    return ModelShape(
        name=name, layers=layers, hidden=hidden, feed_forward=feed_forward, heads=heads, kv_heads=kv_heads,
        vocab=vocab, head=128, tied=tied,
    )  # fmt: skip


# Sources: Llama 3.1: arXiv:2407.21783, table 3; Qwen2.5: the models' config.json.
MODELS: Mapping[str, ModelShape] = {
    m.name: m
    for m in (
        _llama("llama-3.1-8b", 32, 4096, 14336, 32),
        _llama("llama-3.1-70b", 80, 8192, 28672, 64),
        _llama("llama-3.1-405b", 126, 16384, 53248, 128),
        _qwen("qwen2.5-1.5b", 28, 1536, 8960, 12, 2, 151936, tied=True),
        _qwen("qwen2.5-7b", 28, 3584, 18944, 28, 4, 152064),
        _qwen("qwen2.5-32b", 64, 5120, 27648, 40, 8, 152064),
        _qwen("qwen2.5-72b", 80, 8192, 29568, 64, 8, 152064),
    )
}


def model(name: str) -> ModelShape:
    """A named size, or the shape in a Hugging Face model directory or `config.json`. Raises UserError."""
    if (found := MODELS.get(name.lower())) is not None:
        return found
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise UserError(
            f"model {name} is neither a directory with config.json nor one of {', '.join(MODELS)}"
        )
    return from_config(path)


def from_config(path: Path) -> ModelShape:
    """The shape that a `config.json` describes. Raises UserError naming what is missing or not dense."""
    try:
        config = cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read as JSON: {error}") from error
    if experts := next(
        (k for k in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(k)), None
    ):
        raise UserError(f"{path}: {experts}={config[experts]}; the planner knows dense models only")
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        return ModelShape(
            name=str(config.get("_name_or_path") or path.parent.name),
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            feed_forward=int(config["intermediate_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            vocab=int(config["vocab_size"]),
            head=int(config.get("head_dim") or hidden // heads),
            tied=bool(config.get("tie_word_embeddings", False)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: {error} is needed as a number to know the model's shape") from error
