"""A random policy of a chosen shape, what publishes it, and the place of a generator of it."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from arriero.components.policy import load_model
from arriero.engine.runtime.context import Context
from arriero.engine.weights import WeightSender, destroy
from arriero.launchers.demo_model import write_tiny_llama


def write_model(directory: Path, *, hidden: int, layers: int, heads: int, context: int) -> None:
    """A random Llama with a tokenizer of characters; its MLP is three times as wide as `hidden`.

    It has no end of sequence, so that all responses have the same length.
    """
    write_tiny_llama(directory, characters="0123456789+= ")
    tokens = json.loads((directory / "config.json").read_text())["vocab_size"]
    config = LlamaConfig(
        vocab_size=tokens, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=context,
        eos_token_id=None,
    )  # fmt: skip
    untyped: Any = LlamaForCausalLM
    untyped(config).save_pretrained(directory)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def generator_context(*, staleness: int) -> Context:
    """Of the only generator of a run of its own."""
    return Context(
        run_id=f"bench-{uuid4().hex[:8]}", run_dir=Path(), node="generator", replica=0, rank=0, ranks=1,
        seed=0, deterministic=False, staleness=staleness, loop="weights",
    )  # fmt: skip


@contextmanager
def publishing(model: str, context: Context) -> Generator[tuple[WeightSender, dict[str, Tensor]], None, None]:
    """What publishes the weights of a model directory over shared memory, and they, as a trainer has them."""
    tensors = {n: p.detach() for n, p in load_model(model).named_parameters()}
    sender = WeightSender(context.weights_url, tensors)
    try:
        yield sender, tensors
    finally:
        sender.close()
        destroy(context.weights_url)
