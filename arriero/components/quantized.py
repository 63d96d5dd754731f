"""Projections in eight bits: one scale per output, made from the weights as they arrive.

    W [out, in]  ~  scale [out, 1] * q [out, in],   scale = max |W| of the row / largest number of the type

Embeddings, norms and the output layer stay in bfloat16, and so does the arithmetic: what is halved is memory,
and what of it a decoding step reads. Source: LLM.int8(), arXiv:2208.07339, section 2.1 (row-wise absmax);
FP8 formats, arXiv:2209.05433 (E4M3).
"""

# pyright: reportUnknownMemberType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

EightBits = Literal["fp8", "int8"]
_TYPES: Mapping[EightBits, tuple[torch.dtype, float]] = {
    "fp8": (torch.float8_e4m3fn, 448.0),
    "int8": (torch.int8, 127.0),
}


class QuantizedLinear(nn.Module):
    """x [..., in] -> [..., out], in the type of x. Its weight is `take`n, never trained."""

    q: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear, kind: EightBits) -> None:
        super().__init__()
        self._dtype, self._largest = _TYPES[kind]
        weight = linear.weight
        self.register_buffer("q", torch.zeros_like(weight, dtype=self._dtype))
        self.register_buffer("scale", torch.ones_like(weight[:, :1], dtype=torch.float32))
        self.bias: nn.Parameter | None = linear.bias

    def take(self, weight: Tensor) -> None:
        """Quantise new weights [out, in] in place; a row that isn't finite gives what isn't finite."""
        wide = weight.to(self.q.device, torch.float32)
        scale = wide.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / self._largest
        scaled = (wide / scale).nan_to_num(0.0)
        self.q.copy_(scaled.round() if self._dtype is torch.int8 else scaled)
        self.scale.copy_(scale)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.linear(x, self.q.to(x.dtype)) * self.scale.squeeze(1).to(x.dtype)
        return y if self.bias is None else y + self.bias


class QuantizedProjections:
    """The linear layers of `model`, but for the output layer, replaced by quantised ones.

    `arriving` are tensors for their new weights, by name; `take` quantises what is there. ValueError if the
    model has none.
    """

    def __init__(self, model: PreTrainedModel, kind: EightBits) -> None:
        self.arriving: dict[str, Tensor] = {}
        self._layers: dict[str, QuantizedLinear] = {}
        module: Any = model  # transformers hides the annotations of nn.Module
        output = cast("object", model.get_output_embeddings())
        layers: list[tuple[str, nn.Module]] = list(module.named_modules())
        for name, layer in layers:
            if isinstance(layer, nn.Linear) and layer is not output:
                parent, _, own = name.rpartition(".")
                quantized = QuantizedLinear(layer, kind)
                setattr(module.get_submodule(parent), own, quantized)
                self._layers[f"{name}.weight"] = quantized
                self.arriving[f"{name}.weight"] = layer.weight.detach().to("cpu")
        if not self._layers:
            raise ValueError(
                f"{type(model).__name__} has no linear layer to quantise; use precision=bfloat16"
            )

    def tensors(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """Where a version is received, by the names of the checkpoint."""
        own: set[str] = {f"{n.removesuffix('weight')}{part}" for n in self._layers for part in ("q", "scale")}
        state: dict[str, Tensor] = model.state_dict(keep_vars=True)
        return {name: t for name, t in state.items() if name not in own} | self.arriving

    def take(self) -> None:
        """Quantise what has arrived."""
        for name, layer in self._layers.items():
            layer.take(self.arriving[name])
