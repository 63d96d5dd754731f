"""What every engine of the generator must do, the same tests for each."""

# pyright: reportUnknownMemberType=false
# torch and transformers are annotated only in part.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from arriero.components.generator import Generator
from arriero.components.head_padding import HeadPadding, padding_for
from arriero.components.quantized import EightBits, QuantizedLinear
from arriero.components.rollout_engine import EngineName, EnginePrecision, KVCache, Request
from arriero.components.sampling import Sampling
from arriero.components.vllm_engine import own_logprobs
from arriero.components.vllm_options import VLLMOptions
from arriero.engine.weights import WeightError
from tests.drive import Alone
from tests.engines import ENGINES, EOS, STORIES, forward_logprobs, loaded, needs_vllm, rig, saved, small_llama
from tests.tiny_models import tiny_tokenizer

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13, 14, 15], [4], [20, 21, 22, 23]]

engines = pytest.mark.parametrize("engine", ENGINES)


def config(
    engine: EngineName, model: str, *, slots: int = 8, kv_cache: KVCache = "keep", **sampling: Any
) -> Generator:
    return Generator(
        model=model, engine=engine, samples=1, slots=slots, context=256, kv_cache=kv_cache,
        sampling=replace(Sampling(max_new_tokens=40), **sampling),
    )  # fmt: skip


def requests(number: int = 5, *, tokens: int | None = None, seed: int = 100) -> list[Request]:
    return [
        Request(key=str(n), prompt_ids=PROMPTS[n % 5], seed=seed + n, max_new_tokens=tokens)
        for n in range(number)
    ]


@engines
@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.skipif(not STORIES.is_dir(), reason=f"stories260K isn't there: {STORIES}")
def test_log_probabilities_are_those_of_a_plain_forward_pass(engine: EngineName, temperature: float) -> None:
    model = loaded(STORIES)
    with rig(config(engine, str(STORIES), temperature=temperature)) as r:
        r.take(model)
        done = r.finish(requests(10))
    for key, c in done.items():
        want = forward_logprobs(model, PROMPTS[int(key) % 5], c.token_ids, temperature)
        assert np.abs(c.logprobs - want).max() < 1e-4


@engines
def test_tokens_come_as_often_as_the_model_says(engine: EngineName, tmp_path: Path) -> None:
    model, number = small_llama(scale=4.0), 3000
    with rig(config(engine, saved(model, tmp_path), slots=250, temperature=0.7)) as r:
        r.take(model)
        asked = [Request(key=str(n), prompt_ids=PROMPTS[0], seed=n, max_new_tokens=1) for n in range(number)]
        done = r.finish(asked)
    drawn = np.bincount([c.token_ids[0] for c in done.values()], minlength=32) / number
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1] / 0.7
    # 32 classes: the expected distance of n samples is below sqrt(32 / n) / 2.
    assert np.abs(drawn - logits.softmax(-1).numpy()).sum() / 2 < math.sqrt(32 / number) / 2 * 1.5


@engines
@pytest.mark.parametrize("tied", [False, True])
def test_new_weights_hold_from_the_next_step_on_and_running_requests_go_on(
    engine: EngineName, tied: bool, tmp_path: Path
) -> None:
    old, new = small_llama(tied=tied), small_llama(tied=tied, seed=1)
    with rig(config(engine, saved(old, tmp_path))) as r:
        r.take(old)
        r.engine.add(requests(tokens=12))
        assert r.steps(5) == []
        r.take(new)
        during = r.finish()
        after = r.finish(requests(tokens=12))
    for c in during.values():
        assert c.versions.tolist() == [0] * 5 + [1] * 7
    for key, c in after.items():
        assert set(c.versions.tolist()) == {1}
        assert np.abs(c.logprobs - forward_logprobs(new, PROMPTS[int(key)], c.token_ids)).max() < 1e-4


@engines
@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
def test_running_requests_keep_old_keys_unless_they_are_to_be_recomputed(
    engine: EngineName, kv_cache: KVCache, tmp_path: Path
) -> None:
    old, new = small_llama(), small_llama(seed=1)
    with rig(config(engine, saved(old, tmp_path), kv_cache=kv_cache)) as r:
        r.take(old)
        r.engine.add(requests(tokens=12))
        r.steps(5)
        r.take(new)
        done = r.finish()
    gaps = [
        np.abs(c.logprobs - forward_logprobs(new, PROMPTS[int(key)], c.token_ids))[5:].max()
        for key, c in done.items()
    ]
    assert (max(gaps) < 1e-4) == (kv_cache == "recompute")


@engines
@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
def test_a_prompt_that_was_seen_under_old_weights_is_computed_again(
    engine: EngineName, kv_cache: KVCache, tmp_path: Path
) -> None:
    old, new, prompt = small_llama(), small_llama(seed=1), [4 + n % 27 for n in range(200)]
    asked = [Request(key=str(n), prompt_ids=prompt, seed=n, max_new_tokens=6) for n in range(3)]
    long = Request(key="running", prompt_ids=prompt, seed=9, max_new_tokens=40)
    with rig(config(engine, saved(old, tmp_path), kv_cache=kv_cache)) as r:
        r.take(old)
        r.finish(asked)
        r.engine.add([long])  # holds its blocks, so that they stay in the prefix cache
        r.steps(3)
        r.take(new)
        done = r.finish(asked)
    for c in (done[request.key] for request in asked):
        assert np.abs(c.logprobs - forward_logprobs(new, prompt, c.token_ids)).max() < 1e-4


@engines
def test_new_weights_overtake_a_full_queue(engine: EngineName, tmp_path: Path) -> None:
    old, new = small_llama(), small_llama(seed=1)
    with rig(config(engine, saved(old, tmp_path), slots=64)) as r:
        r.take(old)
        r.engine.add(requests(60, tokens=6))
        r.steps(2)
        waiting = [Request(key=f"w{n}", prompt_ids=PROMPTS[n], seed=n, max_new_tokens=6) for n in range(4)]
        r.engine.add(waiting)
        assert r.engine.room() == 0
        r.take(new)
        done = r.finish()
    assert len(done) == 64
    for key, c in done.items():
        assert c.versions.tolist() == ([1] * 6 if key.startswith("w") else [0] * 2 + [1] * 4)
    for n, request in enumerate(waiting):
        c = done[request.key]
        assert np.abs(c.logprobs - forward_logprobs(new, PROMPTS[n], c.token_ids)).max() < 1e-4


@engines
def test_cancelled_requests_make_room_and_the_others_go_on(engine: EngineName, tmp_path: Path) -> None:
    model = small_llama()
    with rig(config(engine, saved(model, tmp_path), slots=4)) as r:
        r.take(model)
        r.engine.add(requests(4, tokens=10))
        r.steps(3)
        r.engine.cancel("1")
        r.engine.cancel("nobody")
        assert r.engine.room() == 1
        r.engine.add([Request(key="new", prompt_ids=PROMPTS[0], seed=9, max_new_tokens=10)])
        r.engine.cancel("new")
        done = r.finish()
        assert sorted(done) == ["0", "2", "3"]
        r.engine.add(requests(4, tokens=10))
        for n in range(4):
            r.engine.cancel(str(n))
        assert (r.engine.idle, r.engine.room(), r.engine.step()) == (True, 4, [])
        again = r.finish(requests(4, tokens=10))
    for key, c in (done | again).items():
        assert np.abs(c.logprobs - forward_logprobs(model, PROMPTS[int(key)], c.token_ids)).max() < 1e-4


@engines
def test_responses_end_one_by_one_and_each_at_its_own_limit(engine: EngineName, tmp_path: Path) -> None:
    model = small_llama()
    limits = [1, 7, 3, 12, 3]
    asked = [
        Request(key=str(n), prompt_ids=PROMPTS[n], seed=n, max_new_tokens=limit)
        for n, limit in enumerate(limits)
    ]
    with rig(config(engine, saved(model, tmp_path))) as r:
        r.take(model)
        r.engine.add(asked)
        ended = [sorted(c.key for c in r.engine.step()) for _ in range(12)]
    expected = [sorted(str(n) for n, limit in enumerate(limits) if limit == step) for step in range(1, 13)]
    assert ended == expected


@engines
def test_non_finite_logits_invalidate_one_response_and_leave_its_neighbours_alone(
    engine: EngineName, tmp_path: Path
) -> None:
    model, poison = small_llama(), 31
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["model.embed_tokens.weight"][poison] = math.nan
    with rig(config(engine, saved(model, tmp_path))) as r:
        r.take(state)
        done = r.finish([Request(key="bad", prompt_ids=[4, poison, 5], seed=1), *requests(5)])
        again = r.finish(requests(5, seed=7))
    bad = done.pop("bad")
    assert (bad.finish, len(bad.token_ids), len(bad.logprobs)) == ("error", 0, 0)
    for key, c in [*done.items(), *again.items()]:
        # A response that drew the poisoned token itself ends after it.
        drawn = np.flatnonzero(c.token_ids[:39] == poison)
        assert (c.finish, len(c.token_ids)) == (("error", drawn[0] + 1) if len(drawn) else ("length", 40))
        want = forward_logprobs(model, PROMPTS[int(key)], c.token_ids)
        assert np.abs(c.logprobs - want).max() < 1e-4


@engines
def test_a_request_that_cannot_run_is_refused_with_its_key_and_the_limit(
    engine: EngineName, tmp_path: Path
) -> None:
    model = small_llama()
    with rig(config(engine, saved(model, tmp_path), slots=2)) as r:
        r.take(model)
        with pytest.raises(ValueError, match=r"'long': the prompt has 217 tokens, but must have 1\.\.216"):
            r.engine.add([Request(key="long", prompt_ids=[5] * 217, seed=0)])
        with pytest.raises(ValueError, match=r"'empty': the prompt has 0 tokens"):
            r.engine.add([Request(key="empty", prompt_ids=[], seed=0)])
        with pytest.raises(ValueError, match=r"'greedy': max_new_tokens is 41, but must lie in 1\.\.40"):
            r.engine.add([Request(key="greedy", prompt_ids=[5], seed=0, max_new_tokens=41)])
        with pytest.raises(ValueError, match=r"'a' is already under way"):
            r.engine.add([Request(key="a", prompt_ids=[5], seed=0)] * 2)
        with pytest.raises(ValueError, match="3 requests, but room for 2"):
            r.engine.add(requests(3))
        assert r.engine.idle
        done = r.finish([Request(key="just fits", prompt_ids=[5] * 216, seed=0)])
    assert len(done["just fits"].token_ids) == 40


@engines
def test_an_end_of_sequence_token_ends_a_response_and_belongs_to_it(
    engine: EngineName, tmp_path: Path
) -> None:
    model = small_llama(scale=1.0, ends=True)
    with rig(config(engine, saved(model, tmp_path, ends=True), slots=40)) as r:
        r.take(model)
        done = r.finish(requests(40))
    assert sum(c.finish == "stop" for c in done.values()) > 10
    for c in done.values():
        assert EOS not in c.token_ids[:-1]
        assert (c.token_ids[-1] == EOS) == (c.finish == "stop")


@engines
@pytest.mark.parametrize("stop", [("1",), ("0", "\n"), ("42", "7+")])
def test_a_response_ends_at_the_first_stop_string(
    engine: EngineName, stop: tuple[str, ...], tmp_path: Path
) -> None:
    tokenizer: Any = tiny_tokenizer()
    model = small_llama(scale=1.0)
    with rig(config(engine, saved(model, tmp_path), slots=40, stop=stop)) as r:
        r.take(model)
        done = r.finish(requests(40))
    for c in done.values():
        text: str = tokenizer.decode(c.token_ids.tolist())
        before: str = tokenizer.decode(c.token_ids[:-1].tolist())
        assert not any(each in before for each in stop)
        assert c.finish == ("stop" if any(each in text for each in stop) else "length")
    assert any(c.finish == "stop" for c in done.values())


@engines
def test_weights_that_are_not_the_models_are_refused(engine: EngineName, tmp_path: Path) -> None:
    model = small_llama()
    lacking = {n: t for n, t in model.state_dict().items() if "layers.1.mlp" not in n}
    with (
        rig(config(engine, saved(model, tmp_path))) as r,
        pytest.raises(WeightError, match=r"layers\.1\.mlp"),
    ):
        r.engine.take(_published(lacking, r))


def _published(state: Any, r: Any) -> Any:
    from arriero.engine.weights import WeightSender

    sender = WeightSender("shm://other-" + str(id(r)), state)
    try:
        return sender.publish(0, state)
    finally:
        sender.close()


@engines
def test_a_group_alone_in_the_engine_is_the_same_every_time(engine: EngineName, tmp_path: Path) -> None:
    model = small_llama()
    with rig(config(engine, saved(model, tmp_path)), deterministic=True) as r:
        r.take(model)
        first = r.finish(requests(5))
        other = r.finish(requests(5, seed=7))
        again = r.finish(requests(5))
    for key, c in first.items():
        np.testing.assert_array_equal(c.token_ids, again[key].token_ids)
        np.testing.assert_array_equal(c.logprobs, again[key].logprobs)
    assert any(not np.array_equal(c.token_ids, other[key].token_ids) for key, c in first.items())


@engines
def test_a_generator_in_half_precision_is_close_to_the_trainer_but_not_equal(
    engine: EngineName, tmp_path: Path
) -> None:
    model = small_llama(scale=4.0)
    half = Generator(
        model=saved(model, tmp_path), engine=engine, samples=1, slots=8, context=256, precision="bfloat16",
        sampling=Sampling(max_new_tokens=20),
    )  # fmt: skip
    with rig(half) as r:
        r.take(model)
        done = r.finish(requests(5))
    gaps = [
        np.abs(c.logprobs - forward_logprobs(model, PROMPTS[int(key)], c.token_ids)).max()
        for key, c in done.items()
    ]
    assert 1e-4 < max(gaps) < 0.3


@engines
@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_a_generator_in_eight_bits_takes_versions_and_differs_by_what_eight_bits_lose(
    engine: EngineName, precision: EnginePrecision, tmp_path: Path
) -> None:
    if (engine, precision) == ("vllm", "int8"):
        pytest.skip("vLLM makes int8 projections of checkpoints only; check refuses it")
    # Random signs: the largest number of a row says little of it, the worst case for one scale per row.
    old, new = small_llama(scale=4.0), small_llama(scale=4.0, seed=1)
    with rig(replace(config(engine, saved(old, tmp_path)), precision=precision)) as r:
        for model in (old, new):
            r.take(model)
            done = r.finish(requests(5))
            gaps = np.concatenate([
                np.abs(c.logprobs - forward_logprobs(model, PROMPTS[int(key)], c.token_ids))
                for key, c in done.items()
            ])  # fmt: skip
            assert 1e-3 < gaps.mean() < (0.15 if precision == "fp8" else 0.03)


def test_eight_bits_are_as_far_off_as_their_type_says_and_what_is_not_finite_stays_so() -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    x = torch.eye(64)
    kinds: list[tuple[EightBits, float]] = [("int8", 0.5 / 127), ("fp8", 2.0**-4)]
    layers = {kind: QuantizedLinear(torch.nn.Linear(64, 40, bias=False), kind) for kind, _ in kinds}
    for kind, most in kinds:
        layer = layers[kind]
        layer.take(weight)
        assert (layer.q.element_size(), layer.q.shape) == (1, (40, 64))
        with torch.no_grad():
            got: torch.Tensor = layer(x).T
        # int8: half a step of a row; float8 with 3 bits behind the point: half a unit of the last one.
        scale = weight.abs().amax(1, keepdim=True) if kind == "int8" else weight.abs() + 2e-3
        assert bool(((got - weight).abs() <= most * scale * 1.01).all())
    weight[3, 5] = math.nan
    for layer in layers.values():
        layer.take(weight)
        finite: torch.Tensor = layer(torch.ones(1, 64)).isfinite()
        assert finite.logical_not().nonzero()[:, 1].tolist() == [3]


@engines
@pytest.mark.slow
@pytest.mark.parametrize("standby", [False, True])
def test_memory_is_flat_over_two_hundred_weight_updates(
    engine: EngineName, standby: bool, tmp_path: Path
) -> None:
    versions = [small_llama(tied=True), small_llama(tied=True, seed=1)]
    process = psutil.Process()
    with rig(replace(config(engine, saved(versions[0], tmp_path)), standby=standby)) as r:
        r.take(versions[0])
        r.engine.add(requests(5))
        used: list[int] = []
        for n in range(200):
            r.take(versions[(n + 1) % 2])
            r.steps(1)
            if r.engine.idle:
                r.engine.add(requests(5))
            if n >= 40:
                used.append(process.memory_info().rss)
    model_bytes = sum(p.numel() * 4 for p in versions[0].parameters())
    # Were a version left behind at each update, this would be 160 times the model.
    assert max(used) - used[0] < 16 * model_bytes


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_split_over_two_processes_takes_weights_in_flight(tied: bool, tmp_path: Path) -> None:
    old, new = small_llama(tied=tied), small_llama(tied=tied, seed=1)
    split = VLLMOptions(tensor_parallel=2, kv_cache_bytes=64 << 20)
    with rig(replace(config("vllm", saved(old, tmp_path)), vllm=split)) as r:
        r.take(old)
        r.engine.add(requests(tokens=12))
        r.steps(5)
        r.take(new)
        during = r.finish()
        after = r.finish(requests(tokens=12))
    assert all(c.versions.tolist() == [0] * 5 + [1] * 7 for c in during.values())
    for key, c in after.items():
        assert np.abs(c.logprobs - forward_logprobs(new, PROMPTS[int(key)], c.token_ids)).max() < 1e-4


@engines
def test_a_stop_string_may_begin_in_an_earlier_segment(engine: EngineName, tmp_path: Path) -> None:
    tokenizer: Any = tiny_tokenizer()
    model = small_llama(scale=1.0)
    first, second = (tokenizer.convert_tokens_to_ids(c) for c in "42")
    state = {n: t.clone() for n, t in model.state_dict().items()}
    state["lm_head.weight"] = torch.zeros_like(state["lm_head.weight"])
    state["lm_head.weight"][second] = 50.0  # sampled whenever the hidden state has a positive sum
    prompt = [5, 6, first]
    with rig(config(engine, saved(model, tmp_path), stop=("42",), slots=40)) as r:
        r.take(state)
        asked = [
            Request(key=str(n), prompt_ids=prompt, seed=n, max_new_tokens=9, sampled=1) for n in range(40)
        ]
        done = r.finish(asked)
    for c in done.values():
        text: str = tokenizer.decode([first, *c.token_ids.tolist()])
        assert "42" not in text[:-1]
        assert c.finish == ("stop" if "42" in text else "length")
    assert any(c.token_ids.tolist() == [second] for c in done.values())


def _flat(positions: Sequence[dict[int, float]]) -> Any:
    """As vLLM records it: several tokens per position, in one list."""
    ends = np.cumsum([len(p) for p in positions]).tolist()
    return SimpleNamespace(
        start_indices=[0, *ends[:-1]],
        end_indices=ends,
        token_ids=[t for p in positions for t in p],
        logprobs=[v for p in positions for v in p.values()],
    )


def test_the_log_probability_of_a_token_is_its_own_and_never_the_first_entry() -> None:
    tokens = np.array([7, 8, 9], np.int32)
    given = _flat([{3: -0.1, 7: -2.5}, {8: -0.5}, {9: -3.0, 1: -0.2}])
    np.testing.assert_allclose(own_logprobs(tokens, given), [-2.5, -0.5, -3.0])


def test_a_log_probability_that_is_missing_is_nan_and_never_zero() -> None:
    tokens = np.array([7, 8, 9], np.int32)
    assert np.isnan(own_logprobs(tokens, _flat([{7: -1.0}, {5: -1.0}, {9: -1.0}]))).tolist() == [
        False,
        True,
        False,
    ]
    assert np.isnan(own_logprobs(tokens, _flat([{7: -1.0}, {8: -1.0}]))).all()
    assert np.isnan(own_logprobs(tokens, None)).all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rope", ["default", "llama3"])
def test_a_model_with_widened_heads_is_the_same_function(bias: bool, rope: str) -> None:
    ropes: dict[str, Any] = {
        "default": {"rope_type": "default", "rope_theta": 500.0},
        "llama3": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        },
    }  # fmt: skip
    shape: dict[str, Any] = {
        "vocab_size": 32, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "attention_bias": bias,
        "max_position_embeddings": 128, "rope_parameters": ropes[rope],
    }  # fmt: skip
    torch.default_generator.manual_seed(0)
    narrow = LlamaForCausalLM(LlamaConfig(head_dim=8, **shape)).double().train(False)
    wide = LlamaForCausalLM(LlamaConfig(head_dim=32, **shape)).double().train(False)
    with torch.no_grad():
        for p in narrow.parameters():
            p.normal_(std=0.3)
        padding = HeadPadding(narrow=8, wide=32)
        wide.load_state_dict({n: padding.widen(n, t) for n, t in narrow.state_dict().items()})
        tokens = torch.randint(32, (3, 100))
        torch.testing.assert_close(wide(tokens).logits, narrow(tokens).logits, rtol=1e-8, atol=1e-8)


def test_heads_that_cannot_be_widened_are_refused_with_the_remedy(tmp_path: Path) -> None:
    saved(small_llama(), tmp_path)
    assert padding_for(tmp_path, (32, 64)) is None
    assert padding_for(tmp_path, (64, 96)) == HeadPadding(narrow=32, wide=64)
    with pytest.raises(ValueError, match=r"heads of 32 numbers don't fit.*set engine=transformers"):
        padding_for(tmp_path, (80,))


def test_check_refuses_what_an_engine_does_not_read_or_cannot_do(tmp_path: Path) -> None:
    model = saved(small_llama(), tmp_path)

    def problems(**options: Any) -> str:
        return "\n".join(Generator(model=model, **options).problems(Alone()))

    assert problems() == ""
    assert "set engine=vllm or leave these out" in problems(vllm=VLLMOptions(tensor_parallel=2))
    greedy = problems(engine="vllm", sampling=Sampling(greedy=True, temperature=0.5))
    assert "log-probabilities of temperature 1" in greedy
    assert "precision int8 with engine=vllm" in problems(engine="vllm", precision="int8")
    second: dict[str, Any] = {"engine": "vllm", "evaluation_engine": "own"}
    assert "vllm.memory_share=0.85 leaves no room for it" in problems(**second)
    assert "leaves no room" not in problems(**second, vllm=VLLMOptions(memory_share=0.4))
