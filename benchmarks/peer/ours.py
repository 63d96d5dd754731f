"""The same work with arriero's `grpo` pipeline, as processes of this machine.

    python -m benchmarks.peer.ours WORK.json RUN_DIRECTORY STALENESS GENERATOR_THREADS TRAINER_THREADS

`metrics.jsonl` of the run directory has the lines that the others write themselves.
"""

from __future__ import annotations

import json
import secrets
import sys
from pathlib import Path

from arriero.components.optimizer import AdamW
from arriero.components.prompts import PromptSource
from arriero.components.rewards import Function
from arriero.components.sampling import Sampling
from arriero.launchers.launch import launch
from arriero.launchers.options import LaunchOptions
from arriero.launchers.rundir import create, write_json
from arriero.pipelines.grpo import GRPOConfig, grpo
from arriero.schemas.graph import GraphSpec
from arriero.schemas.run import RunOptions
from benchmarks.peer.work import GROUPS, SAMPLES, Work, graded, graded_slowly


def spec(work: Work, staleness: int) -> GraphSpec:
    limits = work.limits
    reward = Function(function=graded_slowly, at_once=256) if limits.judge_s else Function(function=graded)
    config = GRPOConfig(
        model=work.model, data=PromptSource(path=work.data, seed=work.seed), reward=reward,
        sampling=Sampling(max_new_tokens=limits.max_new_tokens), optimizer=AdamW(lr=work.lr),
        steps=work.steps, staleness=staleness, groups_per_step=GROUPS, samples=SAMPLES,
        slots=GROUPS * SAMPLES * (staleness + 1),
    )  # fmt: skip
    return grpo(config).check()


def main(path: str, run_dir: str, staleness: str, generator: str, trainer: str) -> int:
    work = Work(**json.loads(Path(path).read_text()))
    graph, run = spec(work, int(staleness)), create(Path(run_dir))
    threads = {"generator": int(generator), "trainer": int(trainer)}
    options = RunOptions(run_id=f"peers-{secrets.token_hex(4)}", seed=work.seed, threads=threads)
    write_json(run.graph, graph)
    write_json(run.options, options)
    return launch(graph, options, run, LaunchOptions(quiet=True, python_path=(str(Path.cwd()),)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:6]))
