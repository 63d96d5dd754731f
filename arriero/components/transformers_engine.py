"""The embedded engine: `DecodeEngine` on a model of transformers, with its end of the weight plane."""

# pyright: reportUnknownMemberType=false
# transformers annotates only a part of what is called here.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from arriero.components.decoding import DecodeEngine
from arriero.components.parking import Parking, own_memory
from arriero.components.policy import load_model
from arriero.components.quantized import QuantizedProjections
from arriero.components.rollout_engine import Completion
from arriero.components.second_set import room_for, second_set
from arriero.engine.weights import Standby, WeightReceiver

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from arriero.components.generator import Generator
    from arriero.engine.runtime.context import Context
    from arriero.schemas.weights import WeightManifest

_DTYPES = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
    "fp8": torch.bfloat16, "int8": torch.bfloat16,
}  # fmt: skip


class TransformersEngine(DecodeEngine):
    """A `RolloutEngine` in this process; weights arrive in its parameters, cast to their type."""

    def __init__(self, config: Generator, context: Context, tokenizer: PreTrainedTokenizerBase) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = load_model(config.model, device=device, dtype=_DTYPES[config.precision])
        self._quantized: QuantizedProjections | None = None
        if config.precision == "fp8" or config.precision == "int8":
            self._quantized = QuantizedProjections(model, config.precision)
        super().__init__(
            model,
            tokenizer,
            config.sampling,
            slots=config.slots,
            max_length=config.context or int(getattr(model.config, "max_position_embeddings", 4096)),
            version=-1,
            device=device,
        )
        self.vocabulary: int | None = getattr(model.config, "vocab_size", None)
        own_memory(model.parameters())
        module: Any = model  # transformers hides the annotations of nn.Module
        self._memory: dict[str, torch.Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
        self._parking, self._lost = Parking(), False
        self._taken: WeightManifest | None = None
        self._recompute = config.kv_cache == "recompute"
        self._into: dict[str, torch.Tensor] = (
            model.state_dict(keep_vars=True) if self._quantized is None else self._quantized.tensors(model)
        )
        self._receiver = WeightReceiver(f"{context.node}-{context.replica}", context.secret)
        own = {id(tensor): tensor.nbytes for tensor in self._into.values()}  # tied ones once
        twice = second_set(config, context, [room_for(sum(own.values()), device)])
        self._standby = Standby(self._receiver, self._into) if twice else None
        self.receives_beside = twice

    def sleep(self, level: int) -> None:
        if not self._parking.parked:
            self.forget_cache()
            self._lost = level == 2
            # Buffers that the model computes for itself don't arrive with the weights.
            self._parking.park(self._memory, lost=self._into.keys() if self._lost else ())

    def step(self) -> list[Completion]:
        if self._parking.parked:
            self._parking.unpark()
            if self._lost and self._taken is not None:
                self.take(self._taken)
        return super().step()

    def prepare(self, manifest: WeightManifest) -> None:
        if self._standby is not None:
            self._standby.prepare(manifest)

    def take(self, manifest: WeightManifest) -> None:
        if self._parking.parked:
            self._parking.unpark()
        if self._standby is None:
            self._receiver.receive(manifest, self._into)
        else:
            if self._standby.ready != manifest.version:
                self._standby.prepare(manifest)
            self._standby.switch()
        if self._quantized is not None:
            self._quantized.take()
        self._taken = manifest
        self.set_version(manifest.version)
        if self._recompute:
            self.recompute()

    def close(self) -> None:
        self._receiver.close()
