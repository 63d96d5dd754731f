"""Whole runs over the weight plane: every transport, several ranks, versions that arrive beside those in use.

A token that is labelled with version v must have the log-probability that the trainer gives it at version v:
that is what `fresh_mismatch` measures, and it shows every fault of the way from one to the other.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from arriero.components.losses import AIPO
from arriero.components.optimizer import AdamW
from arriero.components.publisher import Publisher, WeightPlane
from arriero.components.training import TrainState
from arriero.engine.errors import GraphError
from arriero.engine.runtime.context import Context
from arriero.engine.weights import WeightError, WeightReceiver, destroy, nixl_transport
from arriero.launchers.launch import inline
from arriero.launchers.options import LaunchOptions
from arriero.launchers.rundir import create
from arriero.pipelines.aipo import AIPOConfig, aipo
from arriero.schemas.messages import Batch
from arriero.schemas.run import RunOptions
from tests.batches import random_batch
from tests.inline_runs import peaked_model, policy_gradient_fields
from tests.tiny_models import tiny_llama

torch.set_num_threads(1)
MISSING = nixl_transport.unavailable()
Run = Callable[..., list[dict[str, float]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """The metrics of each step of a run that doesn't wait for anybody, with 2 generators."""

    def begin(**fields: Any) -> list[dict[str, float]]:
        fields = {
            "model": peaked_model(tmp_path / "peaked"),
            "steps": 4,
            "generators": 2,
            "optimizer": AdamW(lr=0.01),
            **fields,
        }
        spec = aipo(AIPOConfig(**policy_gradient_fields(tmp_path, **fields))).check()
        record = create(tmp_path / "run")
        options = RunOptions(run_id=tmp_path.name, seed=7, wait_bound_s=60)
        assert inline(spec, options, record, LaunchOptions(quiet=True)) == 0
        return [json.loads(line) for line in record.metrics.read_text().splitlines()]

    return begin


@pytest.mark.parametrize(
    "transport",
    ["shm", "gloo", pytest.param("nixl", marks=pytest.mark.skipif(bool(MISSING), reason=MISSING)), "store"],
)
def test_generators_answer_with_the_weights_of_their_version_over_every_transport(
    run: Run, tmp_path: Path, transport: str
) -> None:
    store = f"file://{tmp_path}/weights" if transport == "store" else ""
    steps = run(staleness=0, weights={"transport": transport, "store": store})
    assert [s["step"] for s in steps] == [1, 2, 3, 4]
    assert all(s["fresh_tokens"] == s["tokens"] for s in steps)  # staleness 0
    assert all(s["fresh_mismatch_max"] < 1e-4 for s in steps)


@pytest.mark.parametrize("staleness", [0, 2])
def test_weights_that_arrive_beside_those_in_use_are_used_only_after_the_switch(
    run: Run, staleness: int
) -> None:
    steps = run(standby=True, staleness=staleness, optimizer=AdamW(lr=0.05))
    assert [s["step"] for s in steps] == [1, 2, 3, 4]
    fresh = [s for s in steps if s.get("fresh_tokens")]
    assert fresh
    assert all(s["fresh_mismatch_max"] < 1e-4 for s in fresh)


def test_a_store_without_a_folder_is_refused_before_the_run(run: Run) -> None:
    with pytest.raises(GraphError, match=r"weights\.transport=store with weights\.store=''"):
        run(weights={"transport": "store"})


@pytest.fixture
def context(tmp_path: Path) -> Any:
    context = Context(
        run_id=f"test-{tmp_path.name}", run_dir=tmp_path, node="trainer", replica=0, rank=0, ranks=1,
        seed=5, deterministic=False, staleness=0, loop="weights",
    )  # fmt: skip
    yield context
    destroy(context.weights_url)


def trained(batch: Batch, optimizer: AdamW) -> tuple[TrainState, dict[str, float]]:
    state = TrainState(tiny_llama(scale=5.0), loss=AIPO(rho=2.0), optimizer=optimizer, steps=10)
    return state, state.step(batch)


def test_a_step_that_can_change_nothing_is_published_and_one_that_should_have_is_an_error(
    context: Context,
) -> None:
    batch = random_batch([9, 14, 5], prompt=3)
    state, metrics = trained(batch, AdamW(lr=1e-30))
    publish = Publisher(state, WeightPlane(), context)
    assert publish(0, {}).manifest is not None
    with pytest.raises(WeightError, match="parts of it are bit-identical to version 0"):
        publish(1, metrics)  # a learning rate so small that float32 shows none of it
    for nothing in ({**metrics, "lr": 0.0}, {**metrics, "grad_norm": 0.0}):
        assert publish(int(nothing["lr"] > 0) + 2, nothing).manifest is not None
    publish.close()


def test_a_generator_that_fails_is_named_by_the_trainer(
    context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    state, metrics = trained(random_batch([9, 14, 5], prompt=3), AdamW(lr=1e-3))
    publish = Publisher(state, WeightPlane(), context)
    manifest = publish(0, {}).manifest
    assert manifest is not None
    receiver = WeightReceiver("generator-1")
    with pytest.raises(WeightError, match="received 0 of"):
        receiver.receive(manifest, {"other": torch.zeros(3)})
    state.step(random_batch([9, 14, 5], prompt=3, seed=4))
    publish(1, metrics)
    assert "generator generator-1 has not taken its last weights: WeightError: received 0 of" in caplog.text
    receiver.close()
    publish.close()


def test_a_trainer_whose_versions_are_evaluated_stays_until_its_generators_have_left(
    context: Context,
) -> None:
    state, metrics = trained(random_batch([9, 14, 5], prompt=3), AdamW(lr=1e-3))
    bound_s = 0.1
    publish = Publisher(
        state,
        WeightPlane(transport="gloo", lease_timeout_s=bound_s),
        replace(context, evaluates_every=1, wait_bound_s=60.0),
    )
    first = publish(0, {}).manifest
    state.step(random_batch([9, 14, 5], prompt=3, seed=4))
    last = publish(1, metrics).manifest
    assert first is not None
    assert last is not None
    receiver = WeightReceiver("generator-0")
    into = receiver.tensors(first)
    receiver.receive(last, into)
    ending = threading.Thread(target=publish.close)
    ending.start()
    ending.join(10 * bound_s)
    receiver.receive(first, into)  # an evaluation that another generator had begun
    receiver.receive(last, into)
    assert ending.is_alive()
    receiver.close()
    ending.join(60)
    assert not ending.is_alive()
