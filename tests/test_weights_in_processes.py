"""The weight plane between processes of a launched run: ranks, a network, a death in a sync."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from arriero.engine.errors import UserError
from arriero.engine.runtime.context import weights_url
from arriero.engine.weights import WeightError
from arriero.engine.weights.shm import Segment
from arriero.launchers.rundir import RunDir
from tests.engines import needs_vllm
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


def ended(process: subprocess.Popen[str], within_s: float = 240) -> str:
    """What a run that ends well in time says of its troubles."""
    try:
        _, errors = process.communicate(timeout=within_s)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return errors


def steps_of(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in RunDir(path).metrics.read_text().splitlines()]


def kill_a_reader(process: subprocess.Popen[str], path: Path) -> str:
    """SIGKILL for the first generator that is seen with a lease on a version beyond the first; its name."""
    until = time.monotonic() + 90
    segment: Segment | None = None
    while time.monotonic() < until and process.poll() is None:
        try:
            segment = segment or Segment.open(weights_url(RunDir(path).read_options().run_id, "weights"))
        except (WeightError, UserError):
            time.sleep(0.05)
            continue
        for slot in range(segment.num_slots):
            for lease in segment.readers(slot) if segment.state(slot).version >= 1 else ():
                os.kill(lease.pid, signal.SIGKILL)
                return lease.receiver
        time.sleep(1e-4)
    raise AssertionError("no generator read new weights")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_generator_that_is_killed_in_the_middle_of_a_sync_starts_again_and_the_others_go_on(
    start: Start, tmp_path: Path
) -> None:
    process = start(512, 4)  # 40 MB: a sync takes long enough to be hit
    try:
        killed = kill_a_reader(process, tmp_path / "run")
    except BaseException:
        process.kill()
        raise
    errors = ended(process)
    assert f"{killed} was killed by signal 9 (SIGKILL)" in errors
    summary = RunDir(tmp_path / "run").read_summary()
    assert (summary.state, summary.steps, summary.restarts) == ("finished", 5, {killed: 1})


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


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_split_ranks_send_two_generators_on_two_processes_each_the_parts_that_they_store(
    start: Start, tmp_path: Path
) -> None:
    process = start(
        64, 2, "--ranks", "2", "--training.shards", "2", "--staleness", "1", "--weights.transport", "gloo",
        "--engine", "vllm", "--kv-cache", "recompute", "--vllm.tensor-parallel", "2",
        "--vllm.kv-cache-bytes", str(32 << 20),
    )  # fmt: skip
    assert "has not taken its last weights" not in ended(process, 500)
    steps = steps_of(tmp_path / "run")
    assert [s["step"] for s in steps] == [1, 2, 3, 4, 5]
    fresh = [s for s in steps if s.get("fresh_tokens")]
    assert fresh
    assert all(s["fresh_mismatch_max"] < 1e-4 for s in fresh)
