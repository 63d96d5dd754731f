"""Attention heads widened with zeros: the same function, for kernels that don't know small heads.

vLLM's attention on a CPU takes heads of 32 numbers and more; models of a few hundred thousand parameters have
narrower ones. A head of d numbers becomes one of D = r * d, r whole:

- Rotary embedding turns number i of a head together with number i + d/2, by base^(-2i/d) per position. In
  the wide head, number r * i is turned by base^(-2ri/D), the same angle. So number i moves to r * i, in both
  halves.
- Scores are divided by sqrt(D) and no longer by sqrt(d): queries are multiplied by sqrt(r).
- What is added is zero in queries, keys, values and in the columns of the output projection.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# What is known to have nothing but projections between the hidden state and the heads.
_MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
_ROPES = ("default", "linear", "llama3")  # one angle per frequency, whatever its index


@dataclass(frozen=True, kw_only=True)
class HeadPadding:
    """Heads of `narrow` numbers become heads of `wide`."""

    narrow: int
    wide: int

    def widen(self, name: str, tensor: Tensor) -> Tensor:
        """Tensor `name` of a checkpoint for the model with wide heads; what isn't attention's as it is."""
        kind = name.split(".")[-2] if name.count(".") else ""
        if kind in ("q_proj", "k_proj"):
            scale = math.sqrt(self.wide / self.narrow) if kind == "q_proj" else 1.0
            return self._spread(tensor * scale, step=self.wide // self.narrow)
        if kind == "v_proj":
            return self._spread(tensor, step=1)
        if kind == "o_proj" and name.endswith(".weight"):
            return self._spread(tensor.T, step=1).T.contiguous()
        return tensor

    def _spread(self, tensor: Tensor, *, step: int) -> Tensor:
        """Rows [heads * narrow, ...] -> [heads * wide, ...]; number i of a half goes to `step` * i of it.

        With `step` 1 the numbers stay together, at the beginning of the head.
        """
        import torch

        heads = tensor.shape[0] // self.narrow
        rows = tensor.reshape(heads, self.narrow, *tensor.shape[1:])
        out = rows.new_zeros((heads, self.wide, *tensor.shape[1:]))
        number = torch.arange(self.narrow)
        half = self.narrow // 2
        place = number if step == 1 else (number // half) * (self.wide // 2) + (number % half) * step
        out[:, place] = rows
        return out.reshape(heads * self.wide, *tensor.shape[1:])


def padding_for(directory: Path, sizes: tuple[int, ...]) -> HeadPadding | None:
    """How the heads of the model in `directory` fit one of `sizes`; None if they do as they are.

    ValueError, saying why, if they can't be made to fit.
    """
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    narrow = config.get("head_dim") or (hidden // heads if heads and hidden else None)
    if narrow is None or narrow in sizes:
        return None
    positions: dict[str, str] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = positions.get("rope_type", "default")
    names: list[str] = config.get("architectures") or []
    wide = next((size for size in sizes if size % narrow == 0), None)
    if wide is None or narrow % 2 or rope not in _ROPES or not set(names) & set(_MODELS):
        raise ValueError(
            f"heads of {narrow} numbers don't fit the attention of this machine ({list(sizes)}), and can't "
            f"be widened for {names[0] if names else 'it'} with {rope} positions; set engine=transformers"
        )
    return HeadPadding(narrow=narrow, wide=wide)
