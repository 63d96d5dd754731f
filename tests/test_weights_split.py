"""Engines that split a model over ranks take their own parts of it, and nothing else."""

# pyright: reportUnknownMemberType=false
# Functions of torch are annotated in part.

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from arriero.components.engine_layout import engine_layout, engine_layouts
from arriero.components.generator import Generator
from arriero.components.policy import load_tokenizer
from arriero.components.rollout_engine import Request, RolloutEngine, open_engine
from arriero.components.sampling import Sampling
from arriero.components.vllm_options import VLLMOptions
from arriero.components.vllm_parts import Part
from arriero.engine.runtime.context import Context
from arriero.engine.weights import WeightError, WeightReceiver, WeightSender, destroy
from arriero.engine.weights.plane import open_inlet
from arriero.schemas.layouts import LlamaShape, Parallelism
from arriero.schemas.weights import WeightManifest
from tests.engines import forward_logprobs, needs_vllm
from tests.tiny_models import tiny_tokenizer
from tests.weight_crew import Crew
from tests.weight_roles import SECRET, Setting
from tests.weight_trainer import Trainer, config

torch.set_num_threads(1)


@pytest.fixture
def place() -> Iterator[str]:
    url = f"shm://test-{uuid4().hex}"
    yield url
    destroy(url)


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """As a trainer publishes them: tied ones once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_a_loader_gets_the_part_that_is_there_and_no_other() -> None:
    whole = torch.arange(60.0).view(6, 10)
    part = Part("up", whole[2:4], (6, 10), (2, 0))
    assert part.shape == (6, 10)
    assert torch.equal(part.narrow(0, 2, 2), whole[2:4])
    assert torch.equal(part[2:3, 5:], whole[2:3, 5:])
    both = Part("down", whole[3:, 5:], (6, 10), (3, 5))
    assert torch.equal(both.narrow(0, 3, 3).narrow(1, 5, 5), whole[3:, 5:])
    with pytest.raises(WeightError, match=r"wants 1 to 3 of dimension 0 of Part\(up, \(2, 10\) of \(6, 10\)"):
        part.narrow(0, 1, 2)
    with pytest.raises(WeightError, match=r"wants all of Part\(up"):
        part.add(1)


@pytest.mark.parametrize("tied", [False, True])
def test_two_ranks_of_an_engine_receive_each_its_half_and_the_halves_make_the_model(
    place: str, tied: bool
) -> None:
    qwen = Qwen2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=1, vocab_size=101, tie_word_embeddings=tied,
    )  # fmt: skip
    model = Qwen2ForCausalLM(qwen)
    state = tensors(model)
    sender = WeightSender(place, state, receivers=engine_layouts(qwen, state, (2,)))
    manifest = sender.publish(0, state)
    halves: list[dict[str, torch.Tensor]] = []
    for rank in (0, 1):

        def stores(shapes: Any, rank: int = rank) -> Any:
            world = engine_layout(qwen, shapes, 2)
            assert world is not None
            return world.ranks[rank]

        receiver = WeightReceiver(f"generator-0/{rank}", stores=stores)
        into = receiver.tensors(manifest)
        receiver.receive(manifest, into)
        halves.append(into)
        receiver.close()
    assert sender.failures() == {}
    layer = "model.layers.0."
    for name in ("self_attn.q_proj.weight", "self_attn.q_proj.bias", "mlp.up_proj.weight"):
        assert torch.equal(torch.cat([h[layer + name] for h in halves]), state[layer + name])
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        assert torch.equal(torch.cat([h[layer + name] for h in halves], dim=1), state[layer + name])
    for name in ("self_attn.k_proj.weight", "self_attn.k_proj.bias", "input_layernorm.weight"):
        assert all(torch.equal(h[layer + name], state[layer + name]) for h in halves)  # one head for both
    embedding = "model.embed_tokens.weight"
    assert [h[embedding].shape[0] for h in halves] == [64, 37]  # vLLM's vocabulary of 128, halved
    assert torch.equal(torch.cat([h[embedding] for h in halves]), state[embedding])
    assert sum(t.numel() for t in halves[0].values()) < 0.7 * sum(t.numel() for t in state.values())
    sender.close()


def test_parts_that_the_trainer_did_not_plan_for_are_refused(place: str) -> None:
    llama = LlamaForCausalLM(config(tied=True))
    state = tensors(llama)
    manifest = WeightSender(place, state).publish(0, state)

    def stores(shapes: Any) -> Any:
        world = engine_layout(llama.config, shapes, 2)
        assert world is not None
        return world.ranks[0]

    receiver = WeightReceiver("generator-0/0", stores=stores)
    with pytest.raises(WeightError, match="plan with this receiver's layout"):
        receiver.receive(manifest, receiver.tensors(manifest))
    receiver.close()


def newest(url: str, after: int) -> WeightManifest:
    inlet = open_inlet(url, "looker-on", SECRET)
    manifest = inlet.newest(after, 10.0)
    inlet.close()
    assert manifest is not None
    return manifest


def engine(directory: Path, ranks: int) -> RolloutEngine:
    generator = Generator(
        model=str(directory), engine="vllm", samples=1, slots=4, context=32,
        sampling=Sampling(max_new_tokens=8),
        vllm=VLLMOptions(tensor_parallel=ranks, kv_cache_bytes=64 << 20),
    )  # fmt: skip
    context = Context(
        run_id=f"test-{uuid4().hex[:8]}", run_dir=Path(), node=f"split{ranks}", replica=0, rank=0, ranks=1,
        seed=5, deterministic=False, staleness=1, loop="weights", secret=SECRET,
    )  # fmt: skip
    return open_engine(generator, context, load_tokenizer(str(directory)))


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ranks", "tied", "transport"), [(2, True, "gloo"), (4, False, "shm")])
def test_generators_of_one_and_two_ranks_sample_with_the_weights_of_a_trainer_of_several(
    place: str, tmp_path: Path, ranks: int, tied: bool, transport: Any
) -> None:
    llama = config(tied=tied)
    model = LlamaForCausalLM(llama)
    model.save_pretrained(tmp_path / "model")
    tokenizer: Any = tiny_tokenizer(101)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "model")
    setting = Setting(transport, place, Parallelism(fsdp=ranks), LlamaShape.model_validate(llama))
    crew = Crew(setting, tmp_path, Trainer)
    with ExitStack() as stack:
        stack.callback(crew.end)
        engines = [engine(tmp_path / "model", n) for n in (1, 2)]
        for each in engines:
            stack.callback(each.close)
        for version in (1, 2):
            crew.all_senders("step", version)
            manifest = newest(crew.url, version - 1)
            state = {n: torch.from_numpy(a) for n, a in crew.all_senders("whole")[0].items()}
            model.load_state_dict(state, strict=not tied)
            for each in engines:
                each.take(manifest)
                each.add([Request(key=str(n), prompt_ids=[3 + n, 9, 4], seed=n) for n in range(3)])
                done = [c for _ in range(8) for c in each.step()]
                assert len(done) == 3
                for c in done:
                    want = forward_logprobs(model, [3 + int(c.key), 9, 4], c.token_ids)
                    assert set(c.versions.tolist()) == {version}
                    assert np.abs(c.logprobs - want).max() < 1e-4
            taken, failed = crew.report(version)
            assert (set(taken), failed) == ({"split1-0/0", "split2-0/0", "split2-0/1"}, {})
