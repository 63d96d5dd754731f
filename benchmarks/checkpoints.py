"""What a checkpoint costs the trainer, at the size of the demo: its copy, and the writing beside the steps.

    python -m benchmarks.checkpoints [--steps 60] [--hidden 64]

Steps on batches as those of the demo (32 groups of 8 responses), by turns without a checkpoint, and with one
begun after the step. `stall` is the time in which the trainer waits for its own copy, `beside` the time by
which the step that runs while the files are written is longer; both as a share of a step without.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from arriero.components.checkpoints import Checkpointer, Checkpoints
from arriero.components.losses import AIPO
from arriero.components.optimizer import AdamW
from arriero.components.policy import load_policy
from arriero.components.training import TrainState
from arriero.launchers.demo_model import write_tiny_llama
from arriero.schemas.messages import Batch, Sample
from tests.places import place

GROUPS, SAMPLES, PROMPT, RESPONSE = 32, 8, 5, 5


def batch(seed: int) -> Batch:
    """Random tokens in the shape of the demo's words."""
    rng = np.random.default_rng(seed)
    mask = np.arange(PROMPT + RESPONSE) >= PROMPT
    return Batch(
        samples=tuple(
            Sample(
                group=str(k // SAMPLES),
                tokens=rng.integers(3, 28, len(mask)).astype(np.int32),
                mask=mask,
                advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
                logprobs=np.where(mask, -rng.exponential(3, len(mask)), np.nan).astype(np.float32),
            )
            for k in range(GROUPS * SAMPLES)
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_tiny_llama(model, characters="abcdefghijklmnopqrstuvwxyz=")
        state = TrainState(*load_policy(model), loss=AIPO(), optimizer=AdamW(lr=1e-4), steps=10**6)
        context = replace(place(run_dir=Path(folder)), run_id="benchmark")
        checkpoint = Checkpointer(state, Checkpoints(every=1, keep=2), context)
        plain, stalls, beside = [list[float]() for _ in range(3)]
        for k in range(3 * args.steps):
            now = batch(k)
            begun = time.perf_counter()
            state.step(now)
            took = time.perf_counter() - begun
            if k % 3 == 0:  # nothing is being written any more; a checkpoint follows
                plain.append(took)
                begun = time.perf_counter()
                checkpoint()
                stalls.append(time.perf_counter() - begun)
            elif k % 3 == 1:
                beside.append(took)
        checkpoint.close(last=False)
    step, stall = statistics.median(plain[1:]), statistics.median(stalls[1:])
    print(f"step {step * 1e3:.1f} ms")
    print(f"stall {stall * 1e3:.2f} ms = {stall / step:.1%} of a step; worst {max(stalls[1:]) / step:.1%}")
    print(f"the step beside the writing takes {statistics.median(beside[1:]) / step - 1:+.1%}")


if __name__ == "__main__":
    main()
