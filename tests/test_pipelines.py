"""Every policy-gradient pipeline: built, checked, serialised, and learning a task in a few steps."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from arriero import pipelines
from arriero.components.chat import ChatFormat
from arriero.components.laws import check_laws, graph_losses
from arriero.components.optimizer import AdamW
from arriero.components.recipe import SampledConfig
from arriero.components.rewards import Contains
from arriero.components.sampling import Sampling
from arriero.engine.errors import GraphError, UserError
from arriero.engine.graph import Graph
from arriero.launchers.options import Arguments, resolve_command
from arriero.pipelines.aipo import AIPOConfig, aipo
from arriero.pipelines.cispo import CISPOConfig, cispo
from arriero.pipelines.dapo import DAPOConfig, dapo
from arriero.pipelines.decoupled_ppo import DecoupledPPOConfig, decoupled_ppo
from arriero.pipelines.distill import DistillConfig, distill
from arriero.pipelines.dr_grpo import DrGRPOConfig, dr_grpo
from arriero.pipelines.grpo import GRPOConfig, grpo
from arriero.pipelines.gspo import GSPOConfig, gspo
from arriero.pipelines.ppo import PPOConfig, ppo
from arriero.pipelines.reinforce_pp import ReinforcePPConfig, reinforce_pp
from arriero.pipelines.remax import ReMaxConfig, remax
from arriero.pipelines.rloo import RLOOConfig, rloo
from arriero.pipelines.vmpo import VMPOConfig, vmpo
from arriero.pipelines.vtrace import VTraceConfig, vtrace
from tests.inline_runs import peaked_model, policy_gradient_fields, steps_of, with_a_score

torch.set_num_threads(1)

Pipeline = tuple[Callable[[Any], Graph], type[SampledConfig], dict[str, Any]]

PIPELINES: dict[str, Pipeline] = {
    "aipo": (aipo, AIPOConfig, {}),
    "cispo": (cispo, CISPOConfig, {}),
    "dapo": (dapo, DAPOConfig, {"overlong_buffer": 2}),
    "decoupled_ppo": (decoupled_ppo, DecoupledPPOConfig, {}),
    "dr_grpo": (dr_grpo, DrGRPOConfig, {}),
    "grpo": (grpo, GRPOConfig, {}),
    "gspo": (gspo, GSPOConfig, {}),
    "reinforce_pp": (reinforce_pp, ReinforcePPConfig, {}),
    "remax": (remax, ReMaxConfig, {"slots": 72, "steps": 24}),
    "rloo": (rloo, RLOOConfig, {}),
    "vmpo": (vmpo, VMPOConfig, {}),
    "vtrace": (vtrace, VTraceConfig, {"critic_optimizer": AdamW(lr=1e-2), "steps": 16}),
    "distill": (distill, DistillConfig, {}),
    "ppo": (ppo, PPOConfig, {}),
}
REWARDED = [name for name, (_, kind, _) in PIPELINES.items() if name != "distill" and kind is not PPOConfig]


def config(name: str, path: Path, **fields: Any) -> Any:
    _, kind, own = PIPELINES[name]
    given = policy_gradient_fields(path, **(own | fields))
    if name == "distill":
        given["teacher"] = peaked_model(path / "teacher")
    if name == "ppo":
        given["reward_model"] = with_a_score(path / "judge")
        del given["reward"]
    return kind(**given)


def graph(name: str, path: Path, **fields: Any) -> Graph:
    return PIPELINES[name][0](config(name, path, **fields))


@pytest.mark.parametrize("name", REWARDED)
def test_a_pipeline_learns_what_a_random_model_does_by_chance(name: str, tmp_path: Path) -> None:
    steps = steps_of(graph(name, tmp_path), tmp_path / "run")
    # Chance is 1/32. DAPO's reward has the penalty on it: up to -1 for the five tokens that are allowed.
    penalty = -1.0 if name == "dapo" else 0.0
    assert len(steps) == config(name, tmp_path).steps
    assert penalty - 0.01 < steps[0]["reward"] < penalty + 0.15
    assert steps[-1]["reward"] > penalty + 0.5
    assert steps[-1]["entropy"] < steps[0]["entropy"]
    assert max(s["staleness_max"] for s in steps) <= config(name, tmp_path).staleness


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_is_checked_and_comes_back_from_its_serialised_form(name: str, tmp_path: Path) -> None:
    spec = graph(name, tmp_path).check()
    again = Graph.from_spec(type(spec).model_validate_json(spec.model_dump_json()))
    assert again.check().digest == spec.digest
    assert [str(v) for loss in graph_losses(again).values() for v in check_laws(loss)] == []


def test_a_pipeline_is_a_page() -> None:
    lengths = {f.name: len(f.read_text().splitlines()) for f in Path(pipelines.__file__).parent.glob("*.py")}
    assert len(lengths) > len(PIPELINES)
    assert {name: n for name, n in lengths.items() if n >= 60} == {}


@pytest.mark.parametrize(
    ("name", "given"), [("grpo", "clip-low"), ("ppo", "clip"), ("gspo", "clip-low"), ("grpo", "dual-clip")]
)
def test_a_clip_that_isnt_one_is_refused_by_its_key(name: str, given: str) -> None:
    wrong = "0.5" if given == "dual-clip" else "1.5"
    with pytest.raises(UserError, match=rf"{given.replace('-', '_')} = {wrong} \(command line\) should be"):
        resolve_command(PIPELINES[name][1], Arguments, [f"--{given}", wrong])


OTHER: dict[str, Any] = {
    "model": "elsewhere",
    "teacher": "elsewhere",
    "reward_model": "elsewhere",
    "critic_optimizer": AdamW(lr=0.5),
    "gamma": 0.5,
    "lam": 0.5,
    "reward": Contains(text="3"),
    "sampling": Sampling(max_new_tokens=9),
    "chat": ChatFormat(template="model"),
    "optimizer": AdamW(lr=0.5),
    "aggregation": "token_mean",
    "dual_clip": 3.0,
    "rho": 3.0,
    "beta": 0.3,
    "standby": True,
}
# What is refused without another option.
WITH: dict[tuple[str, str], dict[str, Any]] = {("distill", "beta"): {"divergence": "jsd"}}


@pytest.mark.parametrize("name", PIPELINES)
def test_every_option_of_a_pipeline_changes_its_graph(name: str, tmp_path: Path) -> None:
    build = PIPELINES[name][0]
    hints = typing.get_type_hints(PIPELINES[name][1])
    for field in dataclasses.fields(PIPELINES[name][1]):
        if field.name == "data":
            continue
        before = config(name, tmp_path, **WITH.get((name, field.name), {}))
        value = OTHER.get(field.name, another(getattr(before, field.name), hints[field.name]))
        after = dataclasses.replace(before, **{field.name: value})
        assert build(after).spec().digest != build(before).spec().digest, field.name


def another(value: object, hint: object) -> object:
    """A different value of the same type."""
    if typing.get_origin(hint) is Literal:
        return next(v for v in typing.get_args(hint) if v != value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = typing.get_type_hints(type(value), include_extras=False)
        for field in dataclasses.fields(value):
            inside = another(getattr(value, field.name), hints[field.name])
            with contextlib.suppress(ValueError):
                if (changed := dataclasses.replace(value, **{field.name: inside})) != value:
                    return changed
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else value * 1.5 if isinstance(value, float) else value


def test_a_loss_that_corrects_nothing_is_refused_on_stale_data(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="staleness 1 with Reinforce, which controls no ratio"):
        graph("rloo", tmp_path, staleness=1).check()


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_one_sample_per_prompt_has_no_group_baseline(name: str, tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="samples=1"):
        graph(name, tmp_path, samples=1).check()


def test_reinforce_plus_plus_without_a_group_takes_one_sample_per_prompt(tmp_path: Path) -> None:
    graph("reinforce_pp", tmp_path, samples=1, baseline="none").check()


def test_dapo_refuses_a_buffer_longer_than_a_response(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"overlong_buffer=6 is more than sampling\.max_new_tokens=5"):
        graph("dapo", tmp_path, overlong_buffer=6)


def test_dapo_fills_its_batches_with_groups_that_have_a_signal(tmp_path: Path) -> None:
    steps = steps_of(graph("dapo", tmp_path, steps=2, samples=3, optimizer=AdamW(lr=1e-6)), tmp_path / "run")
    # Fifteen tokens a group at 1 in 32: most groups have no 3 at all, and still every step has its 8 groups.
    assert [s["tokens"] > 8 * 3 * 2 for s in steps] == [True, True]
    dropped = (tmp_path / "run" / "ledger.jsonl").read_text().count("all rewards are 0.0")
    assert dropped > 8


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("name", ["remax", "vmpo", "vtrace"])
def test_a_baseline_and_a_bound_of_their_own_hold_in_processes_too(name: str, tmp_path: Path) -> None:
    policy_gradient_fields(tmp_path)
    command = [
        sys.executable, "-m", "arriero", "run", name, "--run-dir", str(tmp_path / "run"),
        "--model", str(tmp_path / "tiny"), "--data", str(tmp_path / "sums.jsonl"), "--reward", "contains",
        "--reward.text", "3", "--sampling.max-new-tokens", "5", "--steps", "8", "--groups-per-step", "8",
        "--samples", "8", "--slots", "72", "--optimizer.lr", "1e-2",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [s["step"] for s in steps] == list(range(1, 9))
    if name == "vmpo":  # four updates a batch: the multiplier has found the one that keeps them within 0.01
        assert 0.003 < sum(s["kl"] for s in steps[-4:]) / 4 < 0.02
        assert steps[-1]["multiplier"] != steps[0]["multiplier"]
    elif name == "vtrace":
        assert [s["staleness_max"] for s in steps] == [0, *[1] * 7]
    else:  # the greedy response is sampled and scored, and not trained on: at most 64 of five tokens
        assert all(s["tokens"] <= 8 * 8 * 5 for s in steps)
        assert {s["kl"] < 1e-6 for s in steps} == {True}
