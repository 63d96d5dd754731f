"""What every engine of the generator does with requests, the same tests for each."""

# pyright: reportUnknownMemberType=false
# torch and transformers are annotated only in part.

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from arriero.components.rollout_engine import EngineName, Request
from tests.engines import (
    PROMPTS,
    STORIES,
    config,
    engines,
    forward_logprobs,
    loaded,
    requests,
    rig,
    saved,
    small_llama,
)
from tests.tiny_models import EOS, tiny_tokenizer


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
