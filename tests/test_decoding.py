"""The decode engine against plain forward passes, `generate` and exact probabilities."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
)

from arriero.components.decoding import DecodeEngine
from arriero.components.rollout_engine import Completion, Request
from arriero.components.sampling import Sampling, draw, nucleus, sampling_logprobs, uniforms
from tests.decoding import PROMPTS, endless, engine_of, requests, run_all
from tests.engines import forward_logprobs
from tests.tiny_models import save_tiny_llama, tiny_gpt2, tiny_llama, tiny_qwen2, tiny_tokenizer

torch.set_num_threads(1)

MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tiny_llama(scale=8.0),
    "llama, grouped heads, tied": lambda: tiny_llama(kv_heads=2, tied=True, scale=8.0),
    "gpt2": lambda: tiny_gpt2(scale=8.0),
    "qwen2": lambda: tiny_qwen2(scale=8.0),
}


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_equal_a_plain_forward_pass_with_reused_slots(
    name: str, temperature: float
) -> None:
    model = endless(MODELS[name]())
    engine = engine_of(model, Sampling(max_new_tokens=20, temperature=temperature), slots=3)
    ten = [
        Request(key=str(i), prompt_ids=PROMPTS[i % 5], seed=i, max_new_tokens=1 + (7 * i) % 20)
        for i in range(10)
    ]
    done = run_all(engine, ten)
    for request in ten:
        completion = done[request.key]
        assert len(completion.token_ids) == request.max_new_tokens
        expected = forward_logprobs(model, list(request.prompt_ids), completion.token_ids, temperature)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4, rtol=0)
        assert completion.finish == "length"


def test_requests_that_arrive_while_others_run_leave_those_unchanged() -> None:
    model = endless(tiny_llama(scale=8.0))
    alone = run_all(engine_of(model, Sampling(max_new_tokens=30)), requests([PROMPTS[0]]))["0"]
    engine = engine_of(model, Sampling(max_new_tokens=30))
    engine.add(requests([PROMPTS[0]]))
    done: list[Completion] = []
    for step in range(30):
        if step in (3, 11, 12):
            newcomer = Request(
                key=f"late {step}", prompt_ids=tuple(range(4, 20)), seed=step, max_new_tokens=5
            )
            engine.add([newcomer])
        done += engine.step()
    together = next(completion for completion in done if completion.key == "0")
    np.testing.assert_array_equal(together.token_ids, alone.token_ids)
    np.testing.assert_allclose(together.logprobs, alone.logprobs, atol=1e-5)
    for completion in done:
        prompt = PROMPTS[0] if completion.key == "0" else tuple(range(4, 20))
        expected = forward_logprobs(model, prompt, completion.token_ids, 1.0)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4, rtol=0)


def test_the_same_requests_give_the_same_bits() -> None:
    model = tiny_llama(scale=8.0)
    first = run_all(engine_of(model, Sampling(max_new_tokens=16)), requests(PROMPTS * 3))
    second = run_all(engine_of(model, Sampling(max_new_tokens=16)), requests(PROMPTS * 3))
    for key, completion in first.items():
        assert completion.token_ids.tobytes() == second[key].token_ids.tobytes()
        assert completion.logprobs.tobytes() == second[key].logprobs.tobytes()


def test_greedy_tokens_equal_those_of_generate() -> None:
    model: Any = endless(tiny_llama(scale=8.0))
    done = run_all(engine_of(model, Sampling(max_new_tokens=24, greedy=True)), requests(PROMPTS))
    for key, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            expected = model.generate(
                input_ids=torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=24,
            )
        assert done[str(key)].token_ids.tolist() == expected[0, len(prompt) :].tolist()


def test_a_prompt_that_several_requests_share_is_computed_once() -> None:
    model = tiny_llama()
    tokens_seen: list[int] = []

    def count(module: torch.nn.Module, arguments: tuple[Tensor, ...]) -> None:
        tokens_seen.append(arguments[0].numel())

    model.model.embed_tokens.register_forward_pre_hook(count)
    engine = engine_of(model, Sampling(max_new_tokens=4), slots=16)
    engine.add(requests([PROMPTS[1]] * 10))
    engine.step()
    assert tokens_seen == [len(PROMPTS[1])]


def test_many_prompts_are_computed_in_passes_of_bounded_size() -> None:
    model = endless(tiny_llama(scale=8.0))
    whole = run_all(engine_of(model, Sampling(max_new_tokens=6), slots=8), requests(PROMPTS))
    parts = run_all(
        engine_of(model, Sampling(max_new_tokens=6), slots=8, prefill_tokens=7), requests(PROMPTS)
    )
    for key, completion in whole.items():
        np.testing.assert_array_equal(completion.token_ids, parts[key].token_ids)
        np.testing.assert_allclose(completion.logprobs, parts[key].logprobs, atol=1e-5)


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch() -> None:
    model = tiny_llama(scale=8.0)
    wanted = Request(key="wanted", prompt_ids=PROMPTS[1], seed=77)
    alone = run_all(engine_of(model, Sampling(max_new_tokens=16)), [wanted])["wanted"]
    for neighbours in (1, 6):
        others = requests(PROMPTS[:1] * neighbours, seed=1000)
        among = run_all(engine_of(model, Sampling(max_new_tokens=16)), [*others, wanted])["wanted"]
        np.testing.assert_array_equal(among.token_ids, alone.token_ids)


def test_a_response_cut_in_two_and_continued_draws_the_same_tokens() -> None:
    model = endless(tiny_llama(scale=8.0))
    whole = run_all(engine_of(model, Sampling(max_new_tokens=20)), requests(PROMPTS[:1]))["0"]
    engine = engine_of(model, Sampling(max_new_tokens=20))
    head = run_all(engine, [Request(key="a", prompt_ids=PROMPTS[0], seed=0, max_new_tokens=8)])["a"]
    longer = [*PROMPTS[0], *head.token_ids.tolist()]
    tail = run_all(engine, [Request(key="b", prompt_ids=longer, seed=0, max_new_tokens=12)])["b"]
    assert [*head.token_ids, *tail.token_ids] == whole.token_ids.tolist()


def test_sampled_frequencies_follow_the_exact_probabilities() -> None:
    model: Any = tiny_llama(vocab_size=8, scale=12.0)
    num_samples, temperature = 4000, 0.8
    sampling = Sampling(max_new_tokens=1, temperature=temperature)
    engine = DecodeEngine(model, tiny_tokenizer(8), sampling, slots=num_samples, max_length=8)
    done = run_all(engine, requests([(4, 5, 6)] * num_samples))
    counts = np.bincount([completion.token_ids[0] for completion in done.values()], minlength=8)
    with torch.no_grad():
        logits_V = model(input_ids=torch.tensor([[4, 5, 6]])).logits[0, -1]
    expected = (logits_V / temperature).softmax(-1).double().numpy() * num_samples
    assert expected.min() > 5
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 24.32  # the 99.9 % point for 7 degrees of freedom, from tables


def test_uniform_numbers_are_uniform_over_seeds_and_positions() -> None:
    seeds = np.repeat(np.arange(200, dtype=np.uint64), 100)
    numbers = uniforms(seeds, np.tile(np.arange(100), 200))
    assert 0.0 <= numbers.min() <= numbers.max() < 1.0
    counts = np.bincount((numbers * 50).astype(int), minlength=50)
    assert ((counts - 400) ** 2 / 400).sum() < 85.35  # the 99.9 % point for 49 degrees of freedom
    grid = numbers.reshape(200, 100)
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.03


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits_BV = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).expand(3, 5)
    edges_B = torch.tensor([0.0, 0.5, 1.0 - 2.0**-52], dtype=torch.float64)
    token_B, logprob_B = draw(logits_BV, edges_B, Sampling())
    assert torch.equal(token_B, torch.tensor([1, 3, 3]))
    torch.testing.assert_close(logprob_B, torch.full((3,), math.log(0.5)))


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.3, [0]), (0.49, [0]), (0.51, [0, 1]), (0.74, [0, 1]), (0.8, [0, 1, 2]), (0.9, [0, 1, 2, 3])],
)
def test_top_p_keeps_exactly_the_nucleus_and_renormalises(top_p: float, kept: list[int]) -> None:
    # Shuffled, so that the order of ids isn't that of probabilities: 1/2, 1/4, 1/8, 1/16, 1/16.
    ids, probabilities = [3, 0, 4, 1, 2], torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])
    logits_1V = torch.empty(1, 5)
    logits_1V[0, ids] = probabilities.log()
    expected_1V = torch.zeros(1, 5, dtype=torch.bool)
    expected_1V[0, [ids[rank] for rank in kept]] = True
    assert torch.equal(nucleus(logits_1V, top_p), expected_1V)
    logp_V = sampling_logprobs(logits_1V, Sampling(top_p=top_p))[0]
    mass = float(probabilities[kept].sum())
    for rank in range(5):
        want = math.log(float(probabilities[rank]) / mass) if rank in kept else -math.inf
        assert float(logp_V[ids[rank]]) == pytest.approx(want)


def test_top_p_samples_stay_in_the_nucleus_of_the_model() -> None:
    model: Any = endless(tiny_llama(scale=8.0))
    sampling = Sampling(max_new_tokens=8, top_p=0.4, temperature=0.7)
    for key, completion in run_all(engine_of(model, sampling), requests(PROMPTS * 4)).items():
        sequence = torch.tensor([[*PROMPTS[int(key) % 5], *completion.token_ids.tolist()]])
        with torch.no_grad():
            logits_RV = model(input_ids=sequence).logits[0, -len(completion.token_ids) - 1 : -1]
        logp_RV = sampling_logprobs(logits_RV, sampling)
        assert logp_RV.isfinite().sum(-1).max() < 32
        expected = logp_RV.gather(-1, sequence[0, -len(completion.token_ids) :, None])[:, 0]
        np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=1e-4)


def test_eager_attention_gives_the_same_log_probabilities() -> None:
    model = endless(tiny_llama(scale=8.0))
    fast = run_all(engine_of(model, Sampling(max_new_tokens=8)), requests(PROMPTS))
    changeable: Any = model
    changeable.set_attn_implementation("eager")
    for key, completion in run_all(engine_of(model, Sampling(max_new_tokens=8)), requests(PROMPTS)).items():
        np.testing.assert_allclose(completion.logprobs, fast[key].logprobs, atol=1e-5)


def test_a_saved_tiny_model_loads_and_samples_alike(tmp_path: Path) -> None:
    loader: Any = AutoModelForCausalLM
    tokenizers: Any = AutoTokenizer
    saved = save_tiny_llama(tmp_path / "tiny", layers=1, seed=3)
    tokenizer = tokenizers.from_pretrained(saved)
    assert tokenizer.decode(tokenizer("12+34=\n(5)")["input_ids"]) == "12+34=\n(5)"
    ours = run_all(engine_of(tiny_llama(layers=1, seed=3), Sampling(max_new_tokens=8)), requests(PROMPTS))
    engine = DecodeEngine(
        loader.from_pretrained(saved), tokenizer, Sampling(max_new_tokens=8), slots=4, max_length=48
    )
    for key, completion in run_all(engine, requests(PROMPTS)).items():
        np.testing.assert_array_equal(completion.token_ids, ours[key].token_ids)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_gives_the_log_probabilities_of_a_plain_forward_pass() -> None:
    model = endless(tiny_llama(scale=8.0))
    done = run_all(engine_of(model, Sampling(max_new_tokens=20), device="cuda"), requests(PROMPTS * 3))
    torch.nn.Module.to(model, "cpu")
    for key, completion in done.items():
        expected = forward_logprobs(model, PROMPTS[int(key) % 5], completion.token_ids, 1.0)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-3)


def test_the_cache_takes_memory_for_what_is_decoded_and_not_for_the_whole_context() -> None:
    """At 10**9 tokens of context nothing could be allocated in advance."""
    model = endless(tiny_llama(scale=8.0))
    done = run_all(engine_of(model, Sampling(max_new_tokens=40), max_length=10**9), requests(PROMPTS))
    for key, completion in done.items():
        expected = forward_logprobs(model, PROMPTS[int(key)], completion.token_ids, 1.0)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4, rtol=0)


def test_a_greedy_request_beside_sampled_ones_is_the_one_of_a_greedy_engine() -> None:
    sampling = Sampling(max_new_tokens=6)
    mixed = requests(PROMPTS)
    mixed[1] = dataclasses.replace(mixed[1], greedy=True)
    together = run_all(engine_of(endless(tiny_llama(scale=8.0)), sampling), mixed)
    plain = run_all(engine_of(endless(tiny_llama(scale=8.0)), sampling), requests(PROMPTS))
    greedy = Sampling(max_new_tokens=6, greedy=True)
    likeliest = run_all(engine_of(endless(tiny_llama(scale=8.0)), greedy), requests(PROMPTS))
    for key, completion in together.items():
        expected = likeliest[key] if key == "1" else plain[key]
        assert completion.token_ids.tolist() == expected.token_ids.tolist()
    assert likeliest["1"].token_ids.tolist() != plain["1"].token_ids.tolist()
