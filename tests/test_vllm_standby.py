"""Versions that arrive beside a vLLM engine that decodes, and are put in use between two steps."""

# pyright: reportUnknownMemberType=false
# torch, transformers and vLLM are annotated only in part.

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from arriero.components.generator import Generator
from arriero.components.rollout_engine import Completion, KVCache, Request
from arriero.components.sampling import Sampling
from arriero.components.vllm_options import VLLMOptions
from arriero.engine.weights import WeightError
from arriero.engine.weights.shm import Segment
from arriero.launchers.launch import inline
from arriero.launchers.options import LaunchOptions
from arriero.launchers.rundir import create
from arriero.pipelines.aipo import AIPOConfig, aipo
from arriero.schemas.run import RunOptions
from arriero.schemas.weights import WeightManifest
from tests.drive import Alone
from tests.engines import Rig, forward_logprobs, needs_vllm, rig, saved, small_llama, state_of
from tests.inline_runs import policy_gradient_fields
from tests.tiny_models import tiny_llama

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13, 14, 15], [4]]

pytestmark = [needs_vllm, pytest.mark.timeout(300)]


def config(model: str, *, standby: bool = True, kv_cache: KVCache = "keep", **options: Any) -> Generator:
    return Generator(
        model=model, engine="vllm", samples=1, slots=8, context=256, kv_cache=kv_cache, standby=standby,
        sampling=Sampling(max_new_tokens=200), **options,
    )  # fmt: skip


def requests(tokens: int, *, seed: int = 0) -> list[Request]:
    return [
        Request(key=str(n), prompt_ids=ids, seed=seed + n, max_new_tokens=tokens)
        for n, ids in enumerate(PROMPTS)
    ]


def arrive(r: Rig, manifest: WeightManifest) -> int:
    """Decode while a version arrives, and say in how many steps."""
    failed: list[WeightError] = []

    def prepare() -> None:
        try:
            r.engine.prepare(manifest)
        except WeightError as error:
            failed.append(error)

    steps = 0
    arriving = threading.Thread(target=prepare)
    arriving.start()
    while arriving.is_alive():
        assert r.engine.step() == [], "responses have to be longer than what decodes meanwhile"
        steps += 1
    if failed:
        raise failed[0]
    return steps


def check(
    done: Mapping[str, Completion], models: Mapping[int, PreTrainedModel], *, recomputed: bool = False
) -> None:
    """Tokens up to the switch are those of the model before it, and those of a whole version its own."""
    for key, c in done.items():
        first, last = int(c.versions[0]), int(c.versions[-1])
        gaps = {
            v: np.abs(c.logprobs - forward_logprobs(models[v], PROMPTS[int(key)], c.token_ids))
            for v in {first, last}
        }
        assert gaps[first][c.versions == first].max() < 1e-4
        assert first == last or (gaps[last][c.versions == last].max() < 1e-4) == recomputed


@pytest.mark.parametrize(
    ("standby", "tied", "kv_cache"),
    [(True, False, "keep"), (True, True, "recompute"), (False, True, "keep")],
)
def test_running_requests_keep_the_weights_in_use_until_the_switch(
    standby: bool, tied: bool, kv_cache: KVCache, tmp_path: Path
) -> None:
    models = dict(enumerate(small_llama(tied=tied, seed=n) for n in range(3)))
    with rig(config(saved(models[0], tmp_path), standby=standby, kv_cache=kv_cache)) as r:
        r.take(models[0])
        for version in (1, 2):
            r.engine.add(requests(200, seed=version))
            r.steps(2)
            manifest = r.publish(models[version])
            steps = arrive(r, manifest)
            r.engine.take(manifest)
            during, after = r.finish(), r.finish(requests(12, seed=version))
            for c in during.values():
                assert c.versions.tolist() == [version - 1] * (2 + steps) + [version] * (198 - steps)
            check(during, models, recomputed=kv_cache == "recompute")
            check(after, models)


def test_the_engine_decodes_while_a_version_of_many_bytes_arrives(tmp_path: Path) -> None:
    model = tiny_llama(vocab_size=32, hidden=512, layers=6, heads=4, kv_heads=2, tied=True, scale=1.0)
    changeable: Any = model
    changeable.config.eos_token_id = changeable.generation_config.eos_token_id = None
    state = {name: tensor.clone() for name, tensor in state_of(model).items()}
    with rig(config(saved(model, tmp_path))) as r:
        r.take(state)
        r.engine.add(requests(200))
        state["model.norm.weight"] += 0.01
        manifest = r.publish(state)
        steps = arrive(r, manifest)
        r.engine.take(manifest)
        assert steps > 0
        for c in r.finish().values():
            assert c.versions.tolist() == [0] * steps + [1] * (200 - steps)


def test_a_version_that_fails_its_verification_leaves_the_engine_as_it_was(tmp_path: Path) -> None:
    old, new = small_llama(), small_llama(seed=1)
    with rig(config(saved(old, tmp_path))) as r:
        r.take(old)
        r.engine.add(requests(200))
        manifest = r.publish(new)
        memory = Segment.open(manifest.url)
        memory.slot(manifest.slot, 0, 1)[:] ^= 1
        with pytest.raises(WeightError, match="the buffer holds"):
            arrive(r, manifest)
        memory.slot(manifest.slot, 0, 1)[:] ^= 1
        check(r.finish(), {0: old})
        r.engine.add(requests(200))
        arrive(r, manifest)
        r.engine.take(manifest)
        memory.close()
        check(r.finish(), {0: old, 1: new})
        check(r.finish(requests(12)), {1: new})


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU what vLLM compiles is of use")
def test_nothing_is_compiled_for_log_probabilities_on_a_cpu(tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    model = small_llama()
    compiled = counters["frames"]["total"]
    with rig(config(saved(model, tmp_path))) as r:
        r.take(model)
        check(r.finish(requests(2)), {0: model})
    assert counters["frames"]["total"] == compiled


def test_a_twin_has_the_biases_of_the_version_too(tmp_path: Path) -> None:
    models = dict(enumerate(_qwen(seed) for seed in range(3)))
    with rig(config(saved(models[0], tmp_path))) as r:
        for version, model in models.items():
            assert r.take(model) == version
            check(r.finish(requests(12)), models)


def _qwen(seed: int) -> PreTrainedModel:
    """A random Qwen2: biases in its attention, which aren't zero."""
    shape = Qwen2Config(
        vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, eos_token_id=None,
    )  # fmt: skip
    untyped: Any = Qwen2ForCausalLM
    model: Any = untyped(shape).train(False)
    with torch.no_grad():
        for n, p in enumerate(model.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * seed + n)) / 2)
    return cast("PreTrainedModel", model)


def test_a_twin_in_eight_bits_differs_by_what_eight_bits_lose(tmp_path: Path) -> None:
    models = [small_llama(scale=4.0, seed=n) for n in range(3)]
    with rig(config(saved(models[0], tmp_path), precision="fp8")) as r:
        for model in models:
            r.take(model)
            gaps = np.concatenate([
                np.abs(c.logprobs - forward_logprobs(model, PROMPTS[int(key)], c.token_ids))
                for key, c in r.finish(requests(40)).items()
            ])  # fmt: skip
            assert 1e-3 < gaps.mean() < 0.15


def test_a_twin_fills_tensors_in_place_where_a_captured_graph_holds_them(tmp_path: Path) -> None:
    from arriero.components.vllm_loading import Twin

    models = [small_llama(tied=True, seed=n) for n in range(3)]
    with rig(config(saved(models[0], tmp_path), standby=False)) as r:
        r.take(models[0])
        worker: Any = vars(r.engine)["_llm"].model_executor.driver_worker.worker
        module = worker.get_model()
        addresses = {n: p.data_ptr() for n, p in module.named_parameters()}
        twin = Twin(module, worker.vllm_config, in_place=True)
        for version, model in enumerate(models):
            twin.fill(state_of(model).items())
            twin.switch()
            assert {n: p.data_ptr() for n, p in module.named_parameters()} == addresses
            assert module.lm_head.weight is module.model.embed_tokens.weight
            done = {k: replace(c, versions=c.versions * 0) for k, c in r.finish(requests(12)).items()}
            check(done, {0: model})
            assert version == models.index(model)


def test_a_run_trains_on_tokens_of_the_versions_that_they_are_said_to_be_of(tmp_path: Path) -> None:
    fields = policy_gradient_fields(
        tmp_path, engine="vllm", standby=True, kv_cache="recompute", staleness=1, steps=3, slots=32,
        groups_per_step=4, samples=4, vllm={"kv_cache_bytes": 64 << 20},
    )  # fmt: skip
    record = create(tmp_path / "run")
    options = RunOptions(run_id=tmp_path.name, seed=7, wait_bound_s=250)
    assert inline(aipo(AIPOConfig(**fields)).check(), options, record, LaunchOptions(quiet=True)) == 0
    steps = [json.loads(line) for line in record.metrics.read_text().splitlines()]
    assert [s["step"] for s in steps] == [1, 2, 3]
    fresh = [s for s in steps if s.get("fresh_tokens")]
    assert fresh
    assert all(s["fresh_mismatch_max"] < 1e-4 for s in fresh)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("standby", [False, True])
def test_all_ranks_of_a_split_model_switch_together(standby: bool, tmp_path: Path) -> None:
    models = dict(enumerate(small_llama(tied=True, seed=n) for n in range(3)))
    split = VLLMOptions(tensor_parallel=2, kv_cache_bytes=64 << 20)
    with rig(config(saved(models[0], tmp_path), standby=standby, vllm=split)) as r:
        r.take(models[0])
        for version in (1, 2):
            r.engine.add(requests(200, seed=version))
            manifest = r.publish(models[version])
            steps = arrive(r, manifest)
            r.engine.take(manifest)
            during, after = r.finish(), r.finish(requests(12))
            for c in during.values():
                assert c.versions.tolist() == [version - 1] * steps + [version] * (200 - steps)
            check(during, models)
            check(after, models)


def test_check_refuses_a_twin_of_a_model_that_is_no_plain_decoder(tmp_path: Path) -> None:
    model = saved(small_llama(), tmp_path)
    assert list(config(model).problems(Alone())) == []
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"model_type": "llama"', '"model_type": "qwen3_moe"'))
    (problem,) = config(model).problems(Alone())
    assert "standby of a model of type qwen3_moe" in problem
