"""A rank of a real trainer, split by FSDP2, as a process of `tests.weight_crew`."""

# pyright: reportUnknownMemberType=false
# Functions of torch are annotated in part.

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.weight_roles import Sender, Setting

TOKENS = [[3, 14, 15, 92, 65, 35, 89, 79]]


def config(*, tied: bool) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=101, tie_word_embeddings=tied, max_position_embeddings=64,
    )  # fmt: skip


class Trainer(Sender):
    """A rank of a real trainer."""

    def __init__(self, setting: Setting, rank: int, meeting: str) -> None:
        super().__init__(setting, rank, meeting)
        torch.manual_seed(0)
        self._model = LlamaForCausalLM(config(tied=setting.shape.tie_word_embeddings))
        mesh = init_device_mesh("cpu", (setting.trainer.num_ranks,))
        for layer in self._model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-2)

    def step(self, version: int) -> None:
        """An optimizer step, and its weights, shard by shard."""
        tokens = torch.tensor(TOKENS)
        loss = self._model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        local = {n: _dtensor(p).to_local() for n, p in self._model.named_parameters()}
        self.sender.publish(version, local)

    def logits(self) -> Any:
        with torch.no_grad():
            return self._model(input_ids=torch.tensor(TOKENS)).logits.numpy()

    def whole(self) -> dict[str, Any]:
        """All parameters, gathered; every rank calls it."""
        gathered = {n: _dtensor(p).full_tensor() for n, p in self._model.named_parameters()}
        return {n: t.detach().numpy() for n, t in gathered.items()}


def _dtensor(parameter: Tensor) -> DTensor:
    assert isinstance(parameter, DTensor), "fully_shard makes DTensors"
    return parameter
