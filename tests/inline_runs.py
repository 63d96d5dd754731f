"""Runs a pipeline in this process, on the in-memory broker, and gives what it recorded of its steps."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from arriero.components.optimizer import AdamW
from arriero.components.prompts import PromptSource
from arriero.components.rewards import Function
from arriero.components.sampling import Sampling
from arriero.engine.graph import Graph
from arriero.launchers.cli import main
from arriero.launchers.launch import inline
from arriero.launchers.options import LaunchOptions
from arriero.launchers.rundir import RunDir, create
from arriero.schemas.messages import Prompt, Rollout
from arriero.schemas.run import RunOptions
from tests.tiny_models import save_tiny_llama, tiny_llama, tiny_tokenizer


def share_of_threes(prompt: Prompt, rollout: Rollout) -> float:
    """How much of a response is the digit 3: a random model says it one time in 32."""
    return rollout.text.count("3") / 5


def tiny_model(directory: Path) -> str:
    """A random model whose distribution is near the uniform one."""
    return saved(tiny_llama(seed=1), directory)


def peaked_model(directory: Path) -> str:
    """A random model that prefers some tokens by far."""
    return saved(tiny_llama(seed=5, scale=12.0), directory)


def saved(model: Any, directory: Path, *, vocab_size: int = 32) -> str:
    """The directory with the model and its tokenizer in it."""
    parts: tuple[Any, Any] = (model, tiny_tokenizer(vocab_size))  # `save_pretrained` is partly untyped
    for part in parts:
        part.save_pretrained(directory)
    return str(directory)


def with_a_score(directory: Path, *, vocab_size: int = 32) -> str:
    """A directory of a model that scores, as the pipeline `reward_model` leaves it."""
    from arriero.components.scoring_model import load_scorer

    model, _ = load_scorer(save_tiny_llama(directory / "bare", vocab_size=vocab_size))
    return saved(model, directory, vocab_size=vocab_size)


def policy_gradient_fields(path: Path, **fields: Any) -> dict[str, Any]:
    """Fields of a `PolicyGradientConfig` for a task that is learned within a few steps."""
    data = path / "sums.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{a}+{a * 7}="}) + "\n" for a in range(10)))
    return {
        "model": tiny_model(path / "tiny"),
        "data": PromptSource(path=str(data), seed=3),
        "reward": Function(function=share_of_threes, isolate=False),
        "sampling": Sampling(max_new_tokens=5),
        "optimizer": AdamW(lr=1e-2),
        "steps": 12,
        "groups_per_step": 8,
        "samples": 8,
        "slots": 64,
    } | fields


def steps_of(graph: Graph, path: Path, *, seed: int = 7) -> list[dict[str, Any]]:
    """What was recorded of every step of a deterministic run in `path`."""
    spec = graph.check()
    run = create(path)
    options = RunOptions(run_id=f"{path.name}-{os.getpid()}", seed=seed, deterministic=True, wait_bound_s=60)
    assert inline(spec, options, run, LaunchOptions(quiet=True)) == 0
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def recorded_grpo(path: Path, *words: str) -> RunDir:
    """What `recorded` gives of GRPO."""
    return recorded("grpo", path, *words)


def recorded(pipeline: str, path: Path, *words: str) -> RunDir:
    """Three recorded steps on four groups of four responses, begun by the command; and their model."""
    path.mkdir(exist_ok=True)
    policy_gradient_fields(path)
    rewarded = ["--reward", "function", "--reward.function", "tests.inline_runs:share_of_threes"]
    return _recorded(pipeline, path, *rewarded, "--reward.isolate", "false", *words)


def recorded_episodes(path: Path, *words: str) -> RunDir:
    """Three recorded steps of ArCHer on four groups of four episodes, of up to three answers each."""
    path.mkdir(exist_ok=True)
    policy_gradient_fields(path)
    reward = "--environment.reward"
    played = ["--environment.kind", "question", "--environment.attempts", "3", f"{reward}.kind", "function"]
    played += [f"{reward}.function", "tests.inline_runs:share_of_threes", f"{reward}.isolate", "false"]
    return _recorded("archer", path, *played, *words)


def _recorded(pipeline: str, path: Path, *words: str) -> RunDir:
    command = ["run", pipeline, "--model", str(path / "tiny"), "--data", str(path / "sums.jsonl")]
    command += ["--sampling.max-new-tokens", "5", "--steps", "3"]
    command += ["--groups-per-step", "4", "--samples", "4", "--slots", "16", "--run-dir", str(path / "run")]
    assert main([*command, "--inline", "--quiet", "--wait-bound-s", "60", *words]) == 0
    return RunDir(path / "run")
