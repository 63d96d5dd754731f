"""Trainer and generators on the same devices, one side at a time: the turns, the memory, whole runs."""

# pyright: reportUnknownMemberType=false
# torch is annotated only in part.

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from arriero.components.losses import AIPO
from arriero.components.optimizer import AdamW
from arriero.components.parking import ParkedTraining, Parking, own_memory
from arriero.components.placement import DevicePlacement
from arriero.components.training import TrainState
from arriero.engine.errors import GraphError
from arriero.engine.turns import Turn
from arriero.launchers.appdef import visible_devices
from arriero.launchers.launch import inline
from arriero.launchers.options import LaunchOptions
from arriero.launchers.rundir import RunDir, create
from arriero.pipelines.aipo import AIPOConfig, aipo
from arriero.schemas.run import RunOptions
from tests.batches import random_batch
from tests.inline_runs import policy_gradient_fields
from tests.tiny_models import tiny_llama

torch.set_num_threads(1)
TURNS = DevicePlacement(devices="turns", turn_bound_s=60)


async def test_one_side_waits_until_all_of_the_other_have_given_their_turn(tmp_path: Path) -> None:
    path = tmp_path / "devices.lock"
    trainer = Turn(path, "trainer-0", alone=True, bound_s=20)
    generators = [Turn(path, f"generator-{n}", alone=False, bound_s=20) for n in range(3)]
    for generator in generators[:2]:
        await generator.take()
    asking = asyncio.create_task(trainer.take())
    await asyncio.sleep(0.1)
    late = asyncio.create_task(generators[2].take())  # it asks after the trainer, and has to wait behind it
    generators[0].give()
    await asyncio.sleep(0.1)
    assert (trainer.held, generators[2].held) == (False, False)
    generators[1].give()
    await asking
    await asyncio.sleep(0.1)
    assert (trainer.held, generators[2].held) == (True, False)
    trainer.give()
    await late
    for turn in (trainer, *generators):
        turn.close()


async def test_a_turn_that_is_not_given_is_an_error_that_says_who_waited_for_whom(tmp_path: Path) -> None:
    path = tmp_path / "devices.lock"
    holder = Turn(path, "generator-0", alone=False, bound_s=1)
    trainer = Turn(path, "trainer-0", alone=True, bound_s=0.1)
    await holder.take()
    with pytest.raises(TimeoutError, match=r"trainer-0 has waited 0 s .*devices\.lock: the others didn't"):
        await trainer.take()
    holder.give()
    await trainer.take()  # a turn that was given up leaves nothing behind
    for turn in (holder, trainer):
        turn.close()


def _hold(path: Path, ready: Any) -> None:
    async def forever() -> None:
        await Turn(path, "generator-0", alone=False, bound_s=5).take()
        ready.set()
        await asyncio.sleep(60)

    asyncio.run(forever())


async def test_the_turn_of_a_process_that_is_killed_is_free(tmp_path: Path) -> None:
    path, context = tmp_path / "devices.lock", multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_hold, args=(path, ready), daemon=True)
    process.start()
    assert await asyncio.to_thread(ready.wait, 60)
    trainer = Turn(path, "trainer-0", alone=True, bound_s=20)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    await trainer.take()
    trainer.close()


def test_parked_tensors_have_no_memory_and_come_back_as_they_were_with_their_views_and_ties() -> None:
    first = torch.arange(24.0).view(4, 6)
    view, tied, half = first[1:3], first, torch.ones(3, dtype=torch.bfloat16)
    parking = Parking()
    for keep in (True, False):
        parking.park({"first": first, "tied": tied, "half": half}, lost=() if keep else ("first", "half"))
        assert parking.parked
        assert [t.untyped_storage().nbytes() for t in (first, view, half)] == [0, 0, 0]
        parking.unpark(later=("half",))
        parking.wait()
        assert first.shape == (4, 6)
        if keep:
            assert torch.equal(view, torch.arange(24.0).view(4, 6)[1:3])
            assert half.tolist() == [1, 1, 1]


def test_parameters_in_a_mapped_file_get_memory_of_their_own(tmp_path: Path) -> None:
    torch.arange(100.0).numpy().tofile(tmp_path / "weights")
    mapped = torch.from_file(str(tmp_path / "weights"), size=100)
    parameter = torch.nn.Parameter(mapped)
    assert not parameter.untyped_storage().resizable()
    own_memory([parameter])
    parking = Parking()
    parking.park({"weights": parameter})
    parking.unpark()
    assert torch.equal(parameter.detach(), torch.arange(100.0))


@pytest.mark.parametrize("tied", [False, True])
def test_a_trainer_that_leaves_its_devices_between_steps_ends_with_the_same_weights_bit_for_bit(
    tied: bool,
) -> None:
    def train(parked: Callable[[TrainState], ParkedTraining] | None) -> dict[str, torch.Tensor]:
        state = TrainState(
            tiny_llama(scale=5.0, tied=tied), loss=AIPO(rho=2.0), optimizer=AdamW(lr=1e-2), steps=4
        )
        parking = parked(state) if parked else None
        for seed in range(4):
            if parking is not None:
                parking.park()
                storages = [p.untyped_storage().nbytes() for p in state.model.parameters()]
                assert not any(storages)
                assert all(p.grad is None for p in state.model.parameters())
                parking.unpark()
            state.step(random_batch([9, 14, 5], prompt=3, seed=seed))
        return state.checkpoint()

    plain, left = train(None), train(ParkedTraining)
    assert plain.keys() == left.keys()
    assert all(torch.equal(plain[name], left[name]) for name in plain)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., list[dict[str, float]]]:
    """The metrics of each step of a deterministic run; `name` is its directory."""

    def begin(name: str, **fields: Any) -> list[dict[str, float]]:
        config = AIPOConfig(**policy_gradient_fields(tmp_path, steps=3, staleness=0, **fields))
        record = create(tmp_path / name)
        options = RunOptions(run_id=f"{tmp_path.name}-{name}", seed=7, deterministic=True, wait_bound_s=60)
        assert inline(aipo(config).check(), options, record, LaunchOptions(quiet=True)) == 0
        return [json.loads(line) for line in record.metrics.read_text().splitlines()]

    return begin


def test_a_run_in_turns_is_the_run_apart_token_for_token(
    run: Callable[..., list[dict[str, float]]],
) -> None:
    timeless = ("loss", "reward", "grad_norm", "tokens", "fresh_mismatch_max")
    apart = run("apart")
    for level in (1, 2):
        placement = DevicePlacement(devices="turns", sleep_level=level, turn_bound_s=60)
        turns = run(f"level{level}", placement=placement)
        assert [[s[k] for k in timeless] for s in turns] == [[s[k] for k in timeless] for s in apart]


def test_turns_with_stale_weights_are_refused_with_the_remedy(tmp_path: Path) -> None:
    for fields, words in (
        ({"staleness": 1}, "placement.devices=turns with staleness=1: .* set staleness=0, or placement"),
        ({"standby": True}, "placement.devices=turns with standby"),
    ):
        config = AIPOConfig(**policy_gradient_fields(tmp_path, placement=TURNS, **fields))
        with pytest.raises(GraphError, match=words):
            aipo(config).check()
    config = AIPOConfig(**policy_gradient_fields(tmp_path, placement=DevicePlacement(sleep_level=2)))
    with pytest.raises(GraphError, match=r"placement\.devices=apart doesn't read"):
        aipo(config).check()


def test_sides_that_take_turns_are_given_the_same_gpus(tmp_path: Path) -> None:
    def devices(**fields: Any) -> dict[str, str]:
        config = AIPOConfig(**policy_gradient_fields(tmp_path, ranks=2, generators=2, staleness=0, **fields))
        given = visible_devices(aipo(config).check(), ["0", "1", "2", "3"])
        return {role: gpus for role, gpus in given.items() if gpus}

    assert devices() == {"generator-0": "0", "generator-1": "1", "trainer-0": "2,3"}
    assert devices(placement=TURNS) == {"generator-0": "0", "generator-1": "1", "trainer-0": "0,1"}


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_two_split_ranks_and_two_generators_take_turns_as_processes(tmp_path: Path) -> None:
    policy_gradient_fields(tmp_path)
    command = [
        sys.executable, "-m", "arriero", "run", "aipo", "--run-dir", str(tmp_path / "run"),
        "--model", str(tmp_path / "tiny"), "--data", str(tmp_path / "sums.jsonl"), "--reward", "contains",
        "--reward.text", "3", "--sampling.max-new-tokens", "5", "--steps", "3", "--groups-per-step", "4",
        "--samples", "4", "--slots", "16", "--ranks", "2", "--training.shards", "2", "--generators", "2",
        "--staleness", "0", "--placement.devices", "turns", "--placement.sleep-level", "2",
        "--weights.transport", "gloo",
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    lines = RunDir(tmp_path / "run").metrics.read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert [s["step"] for s in steps] == [1, 2, 3]
    assert all(s["fresh_mismatch_max"] < 1e-4 for s in steps)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_has_its_memory_back_while_a_trainer_is_parked() -> None:
    model = tiny_llama(hidden=512, layers=4)
    torch.nn.Module.to(model, "cuda")
    state = TrainState(model, loss=AIPO(rho=2.0), optimizer=AdamW(lr=1e-2), steps=4)
    state.step(random_batch([9, 14, 5], prompt=3))
    parked = ParkedTraining(state)
    before = torch.cuda.memory_allocated()
    parked.park()
    assert torch.cuda.memory_allocated() < before / 10
    parked.unpark()
    state.step(random_batch([9, 14, 5], prompt=3, seed=1))
