"""A whole launched run, two processes of one trainer over gloo: split over them, and with adapters."""

# pyright: reportUnknownVariableType=false
# safetensors annotates only a part of what is called here.

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from arriero.launchers.rundir import RunDir
from tests.inline_runs import saved
from tests.tiny_models import tiny_llama

torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--training.shards", "2"), id="split"),
        pytest.param(("--training.lora.rank", "4"), id="adapters"),
        pytest.param(("--training.shards", "2", "--training.lora.rank", "4"), id="split, with adapters"),
    ],
)
def test_two_ranks_train_and_publish_what_generators_sample_with(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    prompts = [json.dumps({"prompt": f"{a}+{a * 7}="}) for a in range(10)]
    (tmp_path / "sums.jsonl").write_text("\n".join(prompts))
    model = saved(tiny_llama(seed=5, scale=12.0), tmp_path / "model")
    command = [
        sys.executable, "-m", "arriero", "run", "aipo", "--run-dir", str(tmp_path / "run"),
        "--model", model, "--data", str(tmp_path / "sums.jsonl"), "--reward", "contains",
        "--reward.text", "3", "--sampling.max-new-tokens", "5", "--steps", "4", "--groups-per-step", "4",
        "--samples", "4", "--slots", "16", "--optimizer.lr", "1e-2", "--ranks", "2", "--staleness", "0",
        *options,
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "run")
    steps = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [s["step"] for s in steps] == [1, 2, 3, 4]
    # Generators sample with what both ranks made: their log-probabilities are the trainer's, to rounding.
    assert all(s["fresh_tokens"] == s["tokens"] for s in steps)
    assert all(s["fresh_mismatch_max"] < 1e-4 for s in steps)
    before, after = (load_file(folder / "model.safetensors") for folder in (Path(model), run.path / "model"))
    assert {n: t.shape for n, t in before.items()} == {n: t.shape for n, t in after.items()}
    name = "model.layers.0.self_attn.q_proj.weight"
    assert (before[name] - after[name]).abs().max() > 1e-6
