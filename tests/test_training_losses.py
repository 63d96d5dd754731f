"""What losses ask of a step: earlier log-probabilities, entropies, references, whole pairs."""

# pyright: reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch, transformers and safetensors annotate only a part of what is called here.

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from arriero.components.losses import (
    AIPO,
    DPO,
    VMPO,
    DecoupledPPO,
    ImportanceWeight,
    WithEntropy,
    WithKL,
)
from arriero.components.optimizer import AdamW
from arriero.components.packing import PackedTokens
from arriero.components.training import TrainState
from arriero.schemas.messages import Batch, Sample
from tests.batches import random_batch
from tests.tiny_models import tiny_llama
from tests.training_states import GENTLE, gradient_free, gradients, one_by_one, state_of

torch.set_num_threads(1)


class Recording:
    """Policy gradient; keeps what it was given."""

    needs_behaviour: ClassVar[bool] = False
    ratio_control: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset({"proximal", "entropy"})

    def __init__(self) -> None:
        self.given: list[tuple[Tensor, PackedTokens]] = []

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        self.given.append((logprobs_T.detach().clone(), tokens))
        return -tokens.advantages_T * logprobs_T

    def clipped(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        return tokens.sequence_T < 0


def test_proximal_logprobs_are_those_before_the_first_update_on_a_batch() -> None:
    batch = random_batch([9, 4, 7, 12], prompt=2)
    loss = Recording()
    state = TrainState(tiny_llama(scale=5.0), loss=loss, optimizer=GENTLE, steps=10, minibatches=2, epochs=2)
    metrics = state.step(batch)
    assert state.version == 1
    assert len(loss.given) == 4
    before = tiny_llama(scale=5.0)
    for part, (logprobs_T, tokens) in enumerate(loss.given):
        samples = batch.samples[2 * (part % 2) : 2 * (part % 2) + 2]
        by_length = sorted(samples, key=lambda s: -len(s.tokens))
        expected_T = torch.cat([one_by_one(before, s) for s in by_length])
        assert tokens.proximal_T is not None
        assert (tokens.proximal_T - expected_T).abs().max() < 1e-5
        moved = float((logprobs_T - tokens.proximal_T).abs().max())
        assert moved < 1e-5 if part == 0 else moved > 1e-4
        assert tokens.entropy_T is not None
        assert tokens.entropy_T.requires_grad
    assert metrics["tokens"] == 2 * sum(int(s.mask.sum()) for s in batch.samples)


def test_decoupled_ppo_clips_only_after_the_first_update() -> None:
    batch = random_batch([9, 14, 7, 12], prompt=2)
    hot = AdamW(lr=0.02)
    loss = DecoupledPPO(weight=ImportanceWeight(upper=1e6))
    once = TrainState(tiny_llama(scale=5.0), loss=loss, optimizer=hot, steps=9).step(batch)
    often = TrainState(tiny_llama(scale=5.0), loss=loss, optimizer=hot, steps=9, epochs=4).step(batch)
    assert once["clipped"] == 0
    assert often["clipped"] > 0


def test_an_entropy_bonus_keeps_the_policy_wider() -> None:
    batch = random_batch([9, 14, 7, 12], prompt=2)
    entropies: list[float] = []
    for loss in (AIPO(), WithEntropy(loss=AIPO(), beta=1.0)):
        state = state_of(loss=loss, optimizer=AdamW(lr=1e-2))
        for _ in range(6):
            state.step(batch)
        entropies.append(state.step(batch)["entropy"])
    assert entropies[1] > entropies[0] + 0.05


def test_a_penalty_needs_reference_logprobs_and_holds_the_policy_near_them() -> None:
    bare = random_batch([9, 14, 7, 12], prompt=2)
    with pytest.raises(ValueError, match=r"WithKL needs reference log-probabilities; the samples of \['g0'"):
        state_of(loss=WithKL(loss=AIPO(), beta=1.0)).step(bare)
    model = tiny_llama(scale=5.0)

    def read(sample: Sample) -> Sample:
        reference = np.full(len(sample.tokens), np.nan, dtype=np.float32)
        reference[sample.mask] = one_by_one(model, sample).numpy()
        return sample.model_copy(update={"reference": reference})

    batch = Batch(samples=tuple(read(s) for s in bare.samples))
    moved: list[float] = []
    for beta in (1e-6, 3.0):
        state = state_of(loss=WithKL(loss=AIPO(), beta=beta), optimizer=AdamW(lr=3e-3))
        for _ in range(8):
            state.step(batch)
        logprobs = torch.cat([one_by_one(state.model, s) for s in batch.samples])
        fixed = np.concatenate([s.reference[s.mask] for s in batch.samples if s.reference is not None])
        moved.append(float((logprobs - torch.from_numpy(fixed)).square().mean()))
    assert moved[1] < 0.5 * moved[0]


def test_a_learned_multiplier_holds_the_policy_near_who_sampled_and_is_checkpointed() -> None:
    model = tiny_llama(scale=5.0)

    def fresh(sample: Sample) -> Sample:
        logprobs = np.full(len(sample.tokens), np.nan, dtype=np.float32)
        logprobs[sample.mask] = one_by_one(model, sample).numpy()
        return sample.model_copy(update={"logprobs": logprobs, "advantages": np.abs(sample.advantages)})

    batch = Batch(samples=tuple(fresh(s) for s in random_batch([9, 14, 7, 12], prompt=2).samples))

    def state(eps_kl: float) -> TrainState:
        loss = VMPO(eps_kl=eps_kl, rate=1.0)
        return TrainState(tiny_llama(scale=5.0), loss=loss, optimizer=AdamW(lr=3e-3), steps=9, epochs=8)

    held, free = state(0.005), state(1e6)
    near, far = [[s.step(batch) for _ in range(2)] for s in (held, free)]
    assert near[0]["multiplier"] > 1 > far[0]["multiplier"]
    assert near[1]["kl"] < 0.5 * far[1]["kl"]
    kept = {name: t.clone() for name, t in held.checkpoint().items()}
    resumed = state(0.005)
    resumed.restore(kept)
    assert resumed.step(batch) == held.step(batch)
    with pytest.raises(ValueError, match=r"lacks 1 of .*loss.multiplier"):
        resumed.restore({name: t for name, t in kept.items() if name != "loss.multiplier"})


def test_pairs_are_never_parted() -> None:
    batch = random_batch([9, 14, 7, 12, 20, 3], prompt=2)
    samples = tuple(
        s.model_copy(
            update={
                "reference": s.logprobs,
                "advantages": np.full(len(s.tokens), 1 - 2 * (i % 2), np.float32),
            }
        )
        for i, s in enumerate(batch.samples)
    )
    pairs = Batch(samples=samples)
    whole, cut = state_of(loss=DPO()), state_of(loss=DPO(), token_budget=1)
    assert cut.step(pairs)["loss"] == pytest.approx(whole.step(pairs)["loss"], abs=1e-6)
    assert (gradients(cut) - gradients(whole)).abs().max() < 1e-6
    with pytest.raises(ValueError, match="5 samples don't divide into terms of 2"):
        cut.step(Batch(samples=samples[:5]))


class Infinite:
    """A loss with a fault."""

    needs_behaviour: ClassVar[bool] = False
    ratio_control: ClassVar[bool] = False

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        return logprobs_T * math.inf

    def clipped(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        return logprobs_T > 0


def test_a_loss_that_isnt_finite_names_the_step_and_moves_nothing() -> None:
    state = state_of(loss=Infinite())
    before = gradient_free(state)
    with pytest.raises(FloatingPointError, match="step 0: loss -inf"):
        state.step(random_batch([5]))
    assert torch.equal(gradient_free(state), before)
    assert state.version == 0


class Averaged(Infinite):
    """A loss that aggregates by itself."""

    def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
        return -logprobs_T.mean()


def test_a_loss_that_isnt_per_token_is_refused() -> None:
    with pytest.raises(TypeError, match="a loss is per token"):
        state_of(loss=Averaged()).step(random_batch([5]))
