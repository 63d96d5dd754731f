"""Requests of the decode engine: new weights among them, their ends, what is cancelled or refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from arriero.components.rollout_engine import Request
from arriero.components.sampling import Sampling
from tests.decoding import PROMPTS, endless, engine_of, requests, run_all
from tests.engines import forward_logprobs
from tests.tiny_models import EOS, tiny_llama, tiny_tokenizer

torch.set_num_threads(1)


def test_weights_changed_between_steps_mark_later_tokens_only() -> None:
    model = endless(tiny_llama(scale=8.0))
    engine = engine_of(model, Sampling(max_new_tokens=6), version=3)
    engine.add(requests(PROMPTS[:2]))
    engine.step()
    engine.step()
    engine.load(endless(tiny_llama(scale=8.0, seed=1)).state_dict(), version=4)
    done = run_all(engine, [])
    for completion in done.values():
        assert completion.versions.tolist() == [3, 3, 4, 4, 4, 4]
    late = run_all(engine, requests(PROMPTS[2:3]))["0"]
    expected = forward_logprobs(endless(tiny_llama(scale=8.0, seed=1)), PROMPTS[2], late.token_ids, 1.0)
    np.testing.assert_allclose(late.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("recompute", [False, True])
def test_running_requests_keep_old_keys_unless_recomputed(recompute: bool) -> None:
    model, newer = endless(tiny_llama(scale=8.0)), endless(tiny_llama(scale=8.0, seed=1))
    engine = engine_of(model, Sampling(max_new_tokens=12), slots=5)
    engine.add(requests(PROMPTS))
    for _ in range(5):
        engine.step()
    engine.load(newer.state_dict(), version=1)
    if recompute:
        engine.recompute()
    gaps: list[float] = []
    for key, completion in run_all(engine, []).items():
        expected = forward_logprobs(newer, PROMPTS[int(key)], completion.token_ids, 1.0)[5:]
        gaps.append(float(np.abs(completion.logprobs[5:] - expected).max()))
    assert (max(gaps) < 1e-4) == recompute


def test_weights_of_another_shape_or_name_are_refused_and_nothing_is_loaded() -> None:
    model = tiny_llama()
    engine = engine_of(model, Sampling(max_new_tokens=4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for wrong in (tiny_llama(hidden=16).state_dict(), {**before, "surplus": torch.zeros(1)}, {}):
        with pytest.raises(ValueError, match="weights 9 are not those of this model"):
            engine.load(wrong, version=9)
    assert engine.version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_an_end_of_sequence_token_ends_a_response_and_belongs_to_it() -> None:
    done = run_all(engine_of(tiny_llama(), Sampling(max_new_tokens=40)), requests(PROMPTS * 8))
    ends = [completion for completion in done.values() if completion.finish == "stop"]
    assert len(ends) > 20
    for completion in done.values():
        assert EOS not in completion.token_ids[:-1]
        assert (completion.token_ids[-1] == EOS) == (completion.finish == "stop")


@pytest.mark.parametrize("stop", [("1",), ("42",), ("0", "\n"), ("+ ", "(5")])
def test_a_response_ends_at_the_first_stop_string(stop: tuple[str, ...]) -> None:
    tokenizer: Any = tiny_tokenizer()
    model = endless(tiny_llama())
    sampling = Sampling(max_new_tokens=40, stop=stop)
    free = run_all(engine_of(model, Sampling(max_new_tokens=40)), requests(PROMPTS * 8))
    done = run_all(engine_of(model, sampling), requests(PROMPTS * 8))
    for key, completion in done.items():
        text: str = tokenizer.decode(free[key].token_ids.tolist())
        first = min((text.find(each) + len(each) for each in stop if each in text), default=None)
        assert completion.finish == ("length" if first is None else "stop")
        assert tokenizer.decode(completion.token_ids.tolist()) == text[:first]
    assert any(completion.finish == "stop" for completion in done.values())


def test_non_finite_logits_end_one_response_and_leave_its_neighbours_alone() -> None:
    model, poison = endless(tiny_llama(scale=8.0)), 31
    clean = run_all(engine_of(model, Sampling(max_new_tokens=12)), requests(PROMPTS * 2))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["model.embed_tokens.weight"][poison] = math.nan
    engine = engine_of(model, Sampling(max_new_tokens=12))
    engine.load(state, version=0)
    bad = Request(key="bad", prompt_ids=(4, poison, 5), seed=1)
    done = run_all(engine, [bad, *requests(PROMPTS * 2)])
    assert done["bad"].finish == "error"
    assert len(done["bad"].token_ids) == len(done["bad"].logprobs) == 0
    for key, completion in clean.items():
        cut = [*np.flatnonzero(completion.token_ids == poison), len(completion.token_ids) - 1][0] + 1
        np.testing.assert_array_equal(done[key].token_ids, completion.token_ids[:cut])
        assert np.isfinite(done[key].logprobs).all()
        assert done[key].finish == ("length" if cut == 12 else "error")


def test_a_cancelled_request_makes_room_and_the_others_go_on() -> None:
    model = endless(tiny_llama(scale=8.0))
    engine = engine_of(model, Sampling(max_new_tokens=10))
    engine.add(requests(PROMPTS[:4]))
    engine.step()
    engine.cancel("1")
    engine.cancel("nobody")
    assert engine.room() == 1
    engine.add([Request(key="waiting", prompt_ids=PROMPTS[0], seed=9)])
    engine.cancel("waiting")
    done = run_all(engine, [])
    assert sorted(done) == ["0", "2", "3"]
    for key, completion in done.items():
        expected = forward_logprobs(model, PROMPTS[int(key)], completion.token_ids, 1.0)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_a_request_that_cannot_run_is_refused_with_its_key_and_the_limit() -> None:
    engine = engine_of(tiny_llama(), Sampling(max_new_tokens=8), slots=2, max_length=20)
    with pytest.raises(ValueError, match=r"'long': the prompt has 13 tokens, but must have 1\.\.12"):
        engine.add([Request(key="long", prompt_ids=(5,) * 13, seed=0)])
    with pytest.raises(ValueError, match=r"'empty': the prompt has 0 tokens"):
        engine.add([Request(key="empty", prompt_ids=(), seed=0)])
    with pytest.raises(ValueError, match=r"'greedy': max_new_tokens is 9, but must lie in 1\.\.8"):
        engine.add([Request(key="greedy", prompt_ids=(5,), seed=0, max_new_tokens=9)])
    with pytest.raises(ValueError, match=r"'a' is already under way"):
        engine.add([Request(key="a", prompt_ids=(5,), seed=0)] * 2)
    with pytest.raises(ValueError, match="3 requests, but room for 2"):
        engine.add(requests(PROMPTS[:3]))
    assert engine.idle
    run_all(engine, [Request(key="just fits", prompt_ids=(5,) * 12, seed=0)])


def test_a_model_with_a_window_shorter_than_the_context_is_refused() -> None:
    config = MistralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=16,
    )
    with pytest.raises(ValueError, match="window of 16 tokens"):
        engine_of(MistralForCausalLM(config), Sampling(max_new_tokens=4), max_length=17)
    engine_of(MistralForCausalLM(config), Sampling(max_new_tokens=4), max_length=16)
