"""A tiny random Llama with a character vocabulary as a Hugging Face directory, written without torch."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# safetensors and tokenizers are annotated only in part.

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

_SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
_HIDDEN, _LAYERS, _HEADS, _MLP, _CONTEXT = 64, 2, 4, 232, 64


def write_tiny_llama(directory: Path, *, characters: str, seed: int = 0) -> int:
    """Write config, safetensors and tokenizer; the number of parameters (about 125 thousand)."""
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    names = [*_SPECIAL, *characters]
    weights = _weights(len(names), np.random.default_rng(seed))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(_config(len(names)), indent=2))
    _write_tokenizer(directory, names)
    return sum(w.size for w in weights.values())


def _weights(vocabulary: int, draw: np.random.Generator) -> dict[str, Floats]:
    """Normal with deviation 0.02, as transformers initialises a Llama; embedding and output are tied."""

    def normal(rows: int, columns: int) -> Floats:
        return (draw.standard_normal((rows, columns)) * 0.02).astype(np.float32)

    ones = np.ones(_HIDDEN, np.float32)
    weights = {"model.embed_tokens.weight": normal(vocabulary, _HIDDEN), "model.norm.weight": ones}
    for layer in range(_LAYERS):
        at = f"model.layers.{layer}"
        weights |= {f"{at}.self_attn.{p}_proj.weight": normal(_HIDDEN, _HIDDEN) for p in "qkvo"}
        weights |= {f"{at}.mlp.{p}_proj.weight": normal(_MLP, _HIDDEN) for p in ("gate", "up")}
        weights[f"{at}.mlp.down_proj.weight"] = normal(_HIDDEN, _MLP)
        weights |= {f"{at}.{p}_layernorm.weight": ones.copy() for p in ("input", "post_attention")}
    return weights


def _config(vocabulary: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocabulary,
        "hidden_size": _HIDDEN, "intermediate_size": _MLP, "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS, "num_key_value_heads": _HEADS, "max_position_embeddings": _CONTEXT,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True, "attention_bias": False,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "dtype": "float32",
    }  # fmt: skip


def _write_tokenizer(directory: Path, names: list[str]) -> None:
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel

    tokenizer = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(_SPECIAL)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "bos_token": "<bos>",
        "eos_token": "<eos>", "unk_token": "<unk>", "clean_up_tokenization_spaces": False,
        "model_max_length": _CONTEXT,
    }  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
