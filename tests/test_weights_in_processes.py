"""The weight plane between the processes of a launched run: several ranks, with and without a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from arriero.launchers.rundir import RunDir
from tests.inline_runs import saved
from tests.tiny_models import tiny_llama

torch.set_num_threads(1)
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Launches a run of AIPO into `run` of the test's folder, with 2 generators and 5 steps."""
    prompts = [json.dumps({"prompt": f"{a}+{a * 7}="}) for a in range(10)]
    (tmp_path / "sums.jsonl").write_text("\n".join(prompts))

    def begin(hidden: int, layers: int, *options: str) -> subprocess.Popen[str]:
        model = saved(tiny_llama(seed=5, scale=12.0, hidden=hidden, layers=layers), tmp_path / "model")
        command = [
            sys.executable, "-m", "arriero", "run", "aipo", "--run-dir", str(tmp_path / "run"),
            "--model", model, "--data", str(tmp_path / "sums.jsonl"), "--reward", "contains",
            "--reward.text", "3", "--sampling.max-new-tokens", "5", "--steps", "5", "--groups-per-step", "4",
            "--samples", "4", "--slots", "16", "--generators", "2", "--optimizer.lr", "1e-3",
            "--optimizer.schedule", "constant", *options,
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)

    return begin


def ended(process: subprocess.Popen[str]) -> str:
    """What a run that ends well within four minutes says of its troubles."""
    try:
        _, errors = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return errors


def steps_of(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in RunDir(path).metrics.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_two_ranks_publish_together_to_generators_that_know_the_secret_of_the_run(
    start: Start, tmp_path: Path, transport: str
) -> None:
    ended(start(32, 2, "--ranks", "2", "--staleness", "0", "--weights.transport", transport))
    steps = steps_of(tmp_path / "run")
    assert [s["step"] for s in steps] == [1, 2, 3, 4, 5]
    assert all(s["fresh_tokens"] == s["tokens"] for s in steps)
    assert all(s["fresh_mismatch_max"] < 1e-4 for s in steps)
