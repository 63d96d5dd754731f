"""A trainer sharded by FSDP2 on 2 and 4 ranks, engines with tensor parallelism 1 and 2: one set of weights.

What the engines received is put together again by rules written here, not by the plan's: halves are joined,
fused projections are cut, and the model must answer bit for bit as the trainer's does.
"""

# pyright: reportUnknownMemberType=false
# Functions of torch are annotated in part.

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from arriero.engine.weights import destroy
from arriero.schemas.layouts import LlamaShape, Parallelism
from tests.weight_crew import Crew
from tests.weight_roles import Setting, TransportName
from tests.weight_trainer import TOKENS, Trainer, config

torch.set_num_threads(1)


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
