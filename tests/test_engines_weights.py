"""What every engine of the generator does with versions of the weights, the same tests for each."""

# pyright: reportUnknownMemberType=false
# torch and transformers are annotated only in part.

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from arriero.components.generator import Generator
from arriero.components.rollout_engine import EngineName, EnginePrecision, KVCache, Request
from arriero.components.sampling import Sampling
from arriero.components.vllm_options import VLLMOptions
from arriero.engine.weights import WeightError, WeightSender
from tests.drive import Alone
from tests.engines import (
    PROMPTS,
    config,
    engines,
    forward_logprobs,
    needs_vllm,
    requests,
    rig,
    saved,
    small_llama,
)


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
def test_weights_that_are_not_the_models_are_refused(engine: EngineName, tmp_path: Path) -> None:
    model = small_llama()
    lacking = {n: t for n, t in model.state_dict().items() if "layers.1.mlp" not in n}
    with (
        rig(config(engine, saved(model, tmp_path))) as r,
        pytest.raises(WeightError, match=r"layers\.1\.mlp"),
    ):
        r.engine.take(_published(lacking, r))


def _published(state: Any, r: Any) -> Any:
    sender = WeightSender("shm://other-" + str(id(r)), state)
    try:
        return sender.publish(0, state)
    finally:
        sender.close()


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


@pytest.mark.parametrize(
    ("engine", "precision"),
    [
        ("transformers", "fp8"),
        ("transformers", "int8"),
        pytest.param("vllm", "fp8", marks=[needs_vllm, pytest.mark.timeout(300)]),  # no int8
    ],
)
def test_a_generator_in_eight_bits_takes_versions_and_differs_by_what_eight_bits_lose(
    engine: EngineName, precision: EnginePrecision, tmp_path: Path
) -> None:
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


@needs_vllm
def test_check_refuses_int8_with_an_engine_that_makes_it_of_checkpoints_only(tmp_path: Path) -> None:
    generator = config("vllm", saved(small_llama(), tmp_path))
    assert list(generator.problems(Alone())) == []
    (problem,) = replace(generator, precision="int8").problems(Alone())
    assert problem.startswith("precision int8 with engine=vllm")
    assert "use fp8, or engine=transformers" in problem


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
