"""Critics and reward models on several ranks, whole or split: the numbers of one."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportPrivateUsage=false
# torch and safetensors annotate only a part of what is called here; what a run trains is private to it.

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from arriero.components.checkpoint_files import read_checkpoint, write_checkpoint
from arriero.components.critic import Critic
from arriero.components.learner import Kept
from arriero.components.optimizer import AdamW
from arriero.components.reward_model import RewardTrainer, _step
from arriero.components.scoring_model import ScoringState
from arriero.components.sharding import whole
from arriero.components.soft_critic import DoubleCritic
from arriero.components.training_options import TrainingOptions
from arriero.components.utterance_critic import UtteranceCritic
from arriero.schemas.messages import Batch, Sample
from tests.batches import random_batch, random_sample
from tests.inline_runs import tiny_model
from tests.rank_runs import run_ranks

torch.set_num_threads(1)

# An eps this large keeps Adam from turning the sign of a rounding error into a whole step.
GENTLE = AdamW(lr=1e-2, eps=1e-3)
OPTIONS = {
    "whole": TrainingOptions(),
    "split": TrainingOptions(shards=2),
    "forgetful": TrainingOptions(shards=2, recompute=True, packing="padded"),
}


def batches() -> list[Batch]:
    """Uneven shares; a sample that isn't trained on; and fewer samples than ranks."""
    masked = Batch(samples=(random_sample(9, seed=1), random_sample(9, seed=2, trained=False)))
    made = [random_batch([20, 3, 9, 14, 6, 8], prompt=2), masked, random_batch([7])]
    rewarded = [b.samples[0].model_copy(update={"reward": 1.0}) for b in made]
    return [
        b.model_copy(update={"samples": (first, *b.samples[1:]), "id": f"b{n}"})
        for n, (b, first) in enumerate(zip(made, rewarded, strict=True))
    ]


def pairs() -> list[Batch]:
    def side(sample: Sample, sign: float) -> Sample:
        return sample.model_copy(update={"advantages": np.where(sample.mask, sign, 0).astype(np.float32)})

    return [
        Batch(samples=tuple(side(random_sample(5 + i, seed=10 * n + i), 1 - 2 * (i % 2)) for i in range(6)))
        for n in range(3)
    ]


def learned(model: str, options: TrainingOptions, ranks: int) -> tuple[list[Kept], list[float]]:
    """Each kind of learner after three steps, and numbers of it that every rank has."""
    critic = Critic(model=model, steps=9, optimizer=GENTLE, token_budget=24, epochs=2, training=options)
    turns = UtteranceCritic(
        model=model, steps=9, optimizer=GENTLE, token_budget=24, updates=2, training=options
    )
    trainer = RewardTrainer(model=model, steps=9, optimizer=GENTLE, token_budget=24, training=options)
    values, both, scores = critic._load(ranks), turns._load(ranks, 3), trainer._load(ranks)
    numbers: list[float] = []
    for batch, compared in zip(batches(), pairs(), strict=True):
        critic._learn(values, batch)
        turns._learn(both, batch, batch)
        numbers += _step(scores, compared).values()
        numbers += np.concatenate(values.values(batch.samples)).tolist()
        numbers += [float(s.advantages.sum()) for s in turns._judged(both, batch.samples)]
    return [values, both, scores], numbers


def tensors(states: Sequence[Kept]) -> dict[str, Tensor]:
    """All that they keep; all ranks call it together."""
    return {
        f"{n}.{name}": whole(t.detach()).clone()
        for n, state in enumerate(states)
        for name, t in state.checkpoint().items()
    }


def learn_on_a_rank(rank: int, directory: Path) -> None:
    for name, options in OPTIONS.items():
        states, numbers = learned(str(directory / "model"), options, 2)
        found = tensors(states)
        if not rank:
            save_file(found, directory / f"{name}.safetensors")
        (directory / f"{name}-{rank}.json").write_text(json.dumps(numbers))
        if name == "split":
            for n, state in enumerate(states):
                write_checkpoint(state, directory / f"checkpoint-{n}")


def test_what_scores_ends_at_the_same_on_two_ranks_and_is_kept(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    run_ranks(learn_on_a_rank, tmp_path, ranks=2)
    states, numbers = learned(model, TrainingOptions(), 1)
    expected = tensors(states)
    assert np.std(numbers) > 0.01
    for name in OPTIONS:
        found = load_file(tmp_path / f"{name}.safetensors")
        assert found.keys() == expected.keys()
        assert max(float((found[n].double() - expected[n].double()).abs().max()) for n in expected) < 1e-6
        for rank in (0, 1):
            told = json.loads((tmp_path / f"{name}-{rank}.json").read_text())
            assert told == pytest.approx(numbers, abs=1e-5)
    split = load_file(tmp_path / "split.safetensors")
    for n, (state, begun) in enumerate(zip(states, learned(model, TrainingOptions(), 1)[0], strict=True)):
        assert isinstance(state, ScoringState | DoubleCritic)
        read_checkpoint(begun, tmp_path / f"checkpoint-{n}")
        again = {f"{n}.{name}": t for name, t in begun.checkpoint().items()}
        assert begun.version == 3
        assert all(torch.equal(again[name], split[name]) for name in again)
