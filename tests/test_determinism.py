"""A deterministic run at staleness 0 is a plain synchronous loop: same tokens, same weights, to the bit."""

# pyright: reportUnknownMemberType=false
# The tokenizers of transformers are annotated only in part.

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from arriero.components.advantages import group_advantage
from arriero.components.decoding import DecodeEngine
from arriero.components.group_decoding import request_seed
from arriero.components.losses import AIPO
from arriero.components.optimizer import AdamW
from arriero.components.prompts import PromptSource
from arriero.components.rewards import Function
from arriero.components.rollout_engine import Completion, Request
from arriero.components.sampling import Sampling
from arriero.components.stragglers import Stragglers
from arriero.components.training import TrainState, load_policy
from arriero.launchers.launch import inline
from arriero.launchers.options import LaunchOptions
from arriero.launchers.rundir import create
from arriero.pipelines.aipo import AIPOConfig, aipo
from arriero.schemas.messages import Batch, Prompt, Rollout, Sample
from arriero.schemas.run import RunOptions
from tests.tiny_models import tiny_llama, tiny_tokenizer

STEPS, GROUPS, SAMPLES, SEED = 4, 3, 4, 7
OPTIMIZER = AdamW(lr=1e-2, warmup_steps=1, schedule="cosine")
SAMPLING = Sampling(max_new_tokens=5, temperature=0.9)

Sampled = tuple[str, list[int], list[float]]  # prompt, tokens, log-probabilities

seen: list[Sampled] = []  # what the graph's reward was given


def share_of_threes(prompt: Prompt, rollout: Rollout) -> float:
    seen.append((prompt.id, rollout.tokens.tolist(), rollout.logprobs[rollout.mask].tolist()))
    return rollout.text.count("3") / 5 + rollout.text.count("7") / 10


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny"
    tiny_llama(vocab_size=32, hidden=32, layers=2, seed=1).save_pretrained(directory)
    tiny_tokenizer(32).save_pretrained(directory)
    return directory


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{a}+{a * 7}="}) + "\n" for a in range(10)))
    return path


def run_graph(
    model: Path,
    data: Path,
    run_dir: Path,
    *,
    staleness: int,
    generators: int,
    stragglers: Stragglers = Stragglers(),  # noqa: B008  # frozen
) -> dict[str, torch.Tensor]:
    config = AIPOConfig(
        stragglers=stragglers,
        model=str(model),
        data=PromptSource(path=str(data), seed=3),
        reward=Function(function=share_of_threes, isolate=False),  # `seen` is this process's
        sampling=SAMPLING,
        optimizer=OPTIMIZER,
        steps=STEPS,
        staleness=staleness,
        groups_per_step=GROUPS,
        samples=SAMPLES,
        generators=generators,
        rewards=2,
        slots=8,
    )
    spec = aipo(config).check()
    run = create(run_dir)
    options = RunOptions(
        run_id=f"{run_dir.name}-{os.getpid()}", seed=SEED, deterministic=True, wait_bound_s=60
    )
    assert inline(spec, options, run, LaunchOptions(quiet=True)) == 0
    return load_policy(run.model)[0].state_dict()


async def run_plainly(model: Path, data: Path) -> tuple[dict[str, torch.Tensor], list[Sampled]]:
    """The same algorithm as one loop over the same prompts: no graph, no edges, no processes."""
    learner = TrainState(*load_policy(model), loss=AIPO(), optimizer=OPTIMIZER, steps=STEPS)
    policy, tokenizer = load_policy(model)
    engine = DecodeEngine(
        policy, tokenizer, SAMPLING, slots=8, max_length=policy.config.max_position_embeddings
    )
    prompts = PromptSource(path=str(data), seed=3).run()
    rollouts: list[Sampled] = []
    for step in range(STEPS):
        engine.load(learner.model.state_dict(), step)
        samples: list[Sample] = []
        for group in range(GROUPS):
            prompt = await anext(prompts)
            ids: list[int] = tokenizer.encode(prompt.text)
            engine.add(
                [
                    Request(key=str(n), prompt_ids=ids, seed=request_seed(SEED, prompt.id, n))
                    for n in range(SAMPLES)
                ]
            )
            done: list[Completion] = []
            while not engine.idle:
                done += engine.step()
            done.sort(key=lambda c: int(c.key))
            rewards: list[float] = []
            for c in done:
                text = str(tokenizer.decode(c.token_ids, skip_special_tokens=True))
                rewards.append(text.count("3") / 5 + text.count("7") / 10)
                rollouts.append((prompt.id, [*ids, *c.token_ids.tolist()], c.logprobs.tolist()))
            for c, advantage in zip(done, group_advantage(rewards, baseline="leave_one_out"), strict=True):
                mask = np.arange(len(ids) + len(c.token_ids)) >= len(ids)
                logprobs = np.full(len(mask), np.nan, np.float32)
                logprobs[mask] = c.logprobs
                samples.append(
                    Sample(
                        group=str(group),
                        tokens=np.array([*ids, *c.token_ids], np.int32),
                        mask=mask,
                        advantages=np.where(mask, np.float32(advantage), np.float32(0)),
                        logprobs=logprobs,
                        temperature=SAMPLING.temperature,
                    )
                )
        learner.step(Batch(samples=tuple(samples)))
    return learner.model.state_dict(), rollouts


@pytest.mark.parametrize("generators", [1, 3])
async def test_synchronous_graph_equals_a_plain_loop_to_the_bit(
    model: Path, data: Path, tmp_path: Path, generators: int
) -> None:
    seen.clear()
    weights, rollouts = await run_plainly(model, data)
    graph = await asyncio.to_thread(
        run_graph, model, data, tmp_path / f"run{generators}", staleness=0, generators=generators
    )
    assert sorted(seen) == sorted(rollouts)
    assert graph.keys() == weights.keys()
    assert all(torch.equal(graph[name], weights[name]) for name in weights)
    assert not torch.equal(weights["lm_head.weight"], load_policy(model)[0].state_dict()["lm_head.weight"])


def test_two_deterministic_runs_with_one_step_of_delay_are_equal_to_the_bit(
    model: Path, data: Path, tmp_path: Path
) -> None:
    first = run_graph(model, data, tmp_path / "first", staleness=1, generators=2)
    again = run_graph(model, data, tmp_path / "again", staleness=1, generators=3)
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_responses_cut_into_segments_are_the_same_to_the_bit_on_one_replica_and_on_three(
    model: Path, data: Path, tmp_path: Path
) -> None:
    """And the same tokens as uncut ones; their log-probabilities differ by rounding only."""
    segments = Stragglers(segment_tokens=2)
    states: list[dict[str, torch.Tensor]] = []
    sampled: list[list[Sampled]] = []
    for name, generators, policy in (
        ("one", 1, segments),
        ("three", 3, segments),
        ("whole", 1, Stragglers()),
    ):
        seen.clear()
        run_dir = tmp_path / name
        states.append(run_graph(model, data, run_dir, staleness=0, generators=generators, stragglers=policy))
        sampled.append(sorted(seen))
    one, three, whole = sampled
    assert one == three
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    for (prompt, tokens, logprobs), (same, others, rounded) in zip(one, whole, strict=True):
        assert (prompt, tokens) == (same, others)
        assert np.allclose(logprobs, rounded, atol=1e-4)
