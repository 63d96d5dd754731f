"""Tiny random models and a character tokenizer, built in memory: no test downloads anything.

Token ids: 0 padding, 1 start, 2 end of sequence, 3 unknown, then one id per character.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

M = TypeVar("M", bound=PreTrainedModel)

PAD, BOS, EOS, UNK = range(4)
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = "0123456789+-*/=() .,?:\n" + string.ascii_letters + "!\"#$%&';<>@[]^_{|}~"


def tiny_tokenizer(vocab_size: int = 32) -> PreTrainedTokenizerBase:
    """One id per character; 5 <= vocab_size, ids beyond the known characters have placeholder names."""
    if vocab_size <= len(SPECIAL):
        raise ValueError(f"vocab_size is {vocab_size}, but {len(SPECIAL)} ids are special; take more")
    names = [*SPECIAL, *CHARACTERS][:vocab_size]
    names += [f"<extra_{i}>" for i in range(vocab_size - len(names))]
    tokenizer = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast: Any = PreTrainedTokenizerFast  # its constructor is not typed
    made: PreTrainedTokenizerBase = fast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    return made


def tiny_llama(
    *,
    vocab_size: int = 32,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int | None = None,
    max_positions: int = 512,
    tied: bool = False,
    scale: float = 1.0,
    seed: int = 0,
) -> LlamaForCausalLM:
    """A random float32 Llama in evaluation mode; a larger `scale` of its matrices peaks what it predicts."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        initializer_range=0.02 * scale,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return _random(lambda: LlamaForCausalLM(config), seed)


def tiny_gpt2(
    *, vocab_size: int = 32, hidden: int = 32, layers: int = 2, scale: float = 1.0, seed: int = 0
) -> GPT2LMHeadModel:
    """A random GPT-2: learned positions, dropout, tied embeddings."""
    config = GPT2Config(
        vocab_size=vocab_size,
        n_embd=hidden,
        n_layer=layers,
        n_head=4,
        n_positions=256,
        initializer_range=0.02 * scale,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return _random(lambda: GPT2LMHeadModel(config), seed)


def tiny_qwen2(
    *, vocab_size: int = 32, hidden: int = 32, layers: int = 2, scale: float = 1.0, seed: int = 0
) -> Qwen2ForCausalLM:
    """A random Qwen2: grouped heads, biases on the projections."""
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.02 * scale,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return _random(lambda: Qwen2ForCausalLM(config), seed)


def save_tiny_llama(
    path: Path, *, vocab_size: int = 32, hidden: int = 32, layers: int = 2, seed: int = 0
) -> Path:
    """Write a tiny Llama with its tokenizer as a Hugging Face directory; gives `path`."""
    model = tiny_llama(vocab_size=vocab_size, hidden=hidden, layers=layers, seed=seed)
    parts: tuple[Any, Any] = (model, tiny_tokenizer(vocab_size))  # `save_pretrained` is partly untyped
    for part in parts:
        part.save_pretrained(path)
    return path


def _random(make: Callable[[], M], seed: int) -> M:
    """What `make` builds from random numbers of `seed`, in evaluation mode; the global state stays."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        model = make()
    finally:
        torch.set_rng_state(before)
    model.train(False)
    return model
