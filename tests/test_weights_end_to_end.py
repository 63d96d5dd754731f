"""A trainer sharded by FSDP2 on 2 and 4 ranks, engines with tensor parallelism 1 and 2: one set of weights.

What the engines received is put together again by rules written here, not by the plan's: halves are joined,
fused projections are cut, and the model must answer bit for bit as the trainer's does.
"""

# pyright: reportUnknownMemberType=false
# Functions of torch are annotated in part.

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from arriero.engine.weights import destroy
from arriero.schemas.layouts import LlamaShape, Parallelism
from tests.weight_crew import Crew
from tests.weight_roles import Sender, Setting, TransportName

torch.set_num_threads(1)
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


def _dtensor(parameter: Tensor) -> DTensor:
    assert isinstance(parameter, DTensor), "fully_shard makes DTensors"
    return parameter


def joined(
    halves: list[dict[str, Tensor]], *, heads: int, key_value_heads: int, head: int
) -> dict[str, Tensor]:
    """A Hugging Face state dict from the ranks of an engine; each has so many heads of its own."""
    state: dict[str, Tensor] = {}
    for name in halves[0]:
        parts = [half[name] for half in halves]
        if "qkv_proj" in name:
            sizes = [heads * head, key_value_heads * head, key_value_heads * head]
            split = [torch.split(part, sizes) for part in parts]
            for i, single in enumerate(("q_proj", "k_proj", "v_proj")):
                state[name.replace("qkv_proj", single)] = torch.cat([s[i] for s in split])
        elif "gate_up_proj" in name:
            for i, single in enumerate(("gate_proj", "up_proj")):
                state[name.replace("gate_up_proj", single)] = torch.cat([p.chunk(2)[i] for p in parts])
        elif "o_proj" in name or "down_proj" in name:
            state[name] = torch.cat(parts, dim=1)
        elif "embed_tokens" in name or "lm_head" in name:
            state[name] = torch.cat(parts)[:101]
        else:
            assert all(torch.equal(part, parts[0]) for part in parts)
            state[name] = parts[0]
    return state


@pytest.fixture
def place() -> Iterator[str]:
    url = f"shm://test-{uuid4().hex}"
    yield url
    destroy(url)


@pytest.mark.parametrize(
    ("ranks", "tied", "transport"),
    [
        (2, False, "shm"),
        (4, True, "shm"),
        pytest.param(2, True, "gloo", marks=pytest.mark.slow),
        pytest.param(4, False, "gloo", marks=pytest.mark.slow),
    ],
)
def test_engines_answer_as_the_trainer_does_after_every_step(
    place: str, tmp_path: Path, ranks: int, tied: bool, transport: TransportName
) -> None:
    llama = config(tied=tied)
    setting = Setting(transport, place, Parallelism(fsdp=ranks), LlamaShape.model_validate(llama))
    crew = Crew(setting, tmp_path, Trainer)
    try:
        engines = crew.receivers("tp1-0/0", "tp2-0/0", "tp2-0/1")
        for version in (1, 2):
            crew.all_senders("step", version)
            for engine in engines:
                engine.tell("take", version - 1)
            assert [engine.answer() for engine in engines] == [version] * 3
            want = torch.from_numpy(crew.all_senders("logits")[0])
            held = [{n: torch.from_numpy(a) for n, a in engine.ask("tensors").items()} for engine in engines]
            for halves, heads, key_value_heads in ((held[:1], 4, 2), (held[1:], 2, 1)):
                state = joined(halves, heads=heads, key_value_heads=key_value_heads, head=8)
                assert ("lm_head.weight" in state) is not tied
                model = LlamaForCausalLM(llama)
                tied_name = {"lm_head.weight": model.lm_head.weight} if tied else {}
                model.load_state_dict({**state, **tied_name})
                with torch.no_grad():
                    assert torch.equal(model(input_ids=torch.tensor(TOKENS)).logits, want)
        taken = crew.report(2)
        assert taken == (("tp1-0/0", "tp2-0/0", "tp2-0/1"), {})
    finally:
        crew.end()
