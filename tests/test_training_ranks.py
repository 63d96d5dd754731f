"""Several ranks end at the weights of one."""

# pyright: reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch, transformers and safetensors annotate only a part of what is called here.

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from arriero.components.losses import (
    DecoupledPPO,
    ImportanceWeight,
)
from arriero.components.training import TrainState
from arriero.schemas.messages import Batch
from tests.batches import random_batch, random_sample
from tests.rank_runs import run_ranks
from tests.tiny_models import tiny_llama
from tests.training_states import GENTLE, state_of, weights_after

torch.set_num_threads(1)


def ranked_batches() -> tuple[Batch, ...]:
    """Uneven shares, a rank whose only sample is masked throughout, and a rank without any sample."""
    masked = Batch(samples=(random_sample(9, seed=1), random_sample(9, seed=2, trained=False)))
    return random_batch([20, 3, 9, 14, 6], prompt=2), masked, random_batch([7])


def ranked_states(group: dist.ProcessGroup | None) -> tuple[TrainState, TrainState]:
    """One update per batch; and four, with log-probabilities of before them and a ratio per sequence."""
    weight = ImportanceWeight(upper=3.0, level="sequence_geometric")
    several = TrainState(
        tiny_llama(scale=5.0),
        loss=DecoupledPPO(weight=weight),
        optimizer=GENTLE,
        steps=10,
        token_budget=24,
        minibatches=2,
        epochs=2,
        group=group,
    )
    return state_of(token_budget=24, group=group), several


def train_on_a_rank(rank: int, directory: Path) -> None:
    state, several = ranked_states(dist.group.WORLD)
    metrics = [s.step(batch) for s in (state, several) for batch in ranked_batches()]
    save_file(weights_after(state), directory / f"{rank}.safetensors")
    save_file(weights_after(several), directory / f"several-{rank}.safetensors")
    refused = ""
    try:
        state.step(random_batch([5], seed=rank))
    except RuntimeError as error:
        refused = str(error)
    (directory / f"{rank}.json").write_text(json.dumps([metrics, refused]))


def test_two_ranks_end_at_the_weights_of_one(tmp_path: Path) -> None:
    run_ranks(train_on_a_rank, tmp_path, ranks=2)
    alone = ranked_states(None)
    expected = [state.step(batch) for state in alone for batch in ranked_batches()]
    for rank in (0, 1):
        metrics, refused = json.loads((tmp_path / f"{rank}.json").read_text())
        for ours, theirs in zip(metrics, expected, strict=True):
            assert ours.keys() == theirs.keys()
            assert ours == pytest.approx(theirs, abs=1e-5)
        assert "different batches" in refused
    for state, name in zip(alone, ("", "several-"), strict=True):
        weights = weights_after(state)
        one, two = (load_file(tmp_path / f"{name}{rank}.safetensors") for rank in (0, 1))
        assert all(torch.equal(one[n], two[n]) for n in one)
        assert max(float((one[n] - weights[n]).abs().max()) for n in weights) < 1e-6
