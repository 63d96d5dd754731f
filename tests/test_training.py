"""A step: the same result however the batch is cut, and nothing moves when something is wrong."""

# pyright: reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch, transformers and safetensors annotate only a part of what is called here.

from __future__ import annotations

import random
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from arriero.components.losses import (
    AIPO,
    ClippedPolicyGradient,
    CrossEntropy,
    Loss,
    Reinforce,
)
from arriero.components.optimizer import AdamW
from arriero.components.packing import Layout, PackedTokens
from arriero.components.training import TrainState
from arriero.components.training_options import TrainingOptions
from arriero.schemas.messages import Batch, Sample
from tests.batches import random_batch, random_sample
from tests.tiny_models import tiny_llama
from tests.training_states import GENTLE, gradient_free, gradients, one_by_one, state_of, weights_after

torch.set_num_threads(1)


@settings(max_examples=15)
@given(
    st.lists(st.integers(2, 24), min_size=1, max_size=8),
    st.integers(1, 64),
    st.sampled_from(["padded", "packed", "shared_prefix"]),
)
def test_loss_and_gradients_ignore_micro_batches_order_and_padding(
    lengths: list[int], token_budget: int, layout: Layout
) -> None:
    whole, cut = state_of(), state_of(token_budget=token_budget, layout=layout)
    batch = random_batch(lengths, prompt=4)
    samples = [*batch.samples, random_sample(5, seed=50, trained=False)]
    shuffled = random.Random(len(lengths)).sample(samples, len(samples))
    expected = whole.step(batch)
    metrics = cut.step(Batch(samples=tuple(shuffled)))
    size = max(1.0, float(gradients(whole).abs().max()))
    assert (gradients(cut) - gradients(whole)).abs().max() < 1e-6 * size
    assert {k: metrics[k] for k in metrics if k != "reward"} == pytest.approx(
        {k: expected[k] for k in expected if k != "reward"}, abs=1e-5
    )


def test_the_mean_over_tokens_is_over_the_whole_batch() -> None:
    class FirstTokenOnly:
        """One for the sequence of one trained token, zero for the other."""

        needs_behaviour: ClassVar[bool] = False
        ratio_control: ClassVar[bool] = False

        def __call__(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
            return (tokens.sequence_T == 0).float() + 0 * logprobs_T

        def clipped(self, logprobs_T: Tensor, tokens: PackedTokens) -> Tensor:
            return tokens.sequence_T < 0

    batch = random_batch([2, 10])
    for token_budget in (1, 100):
        assert state_of(loss=FirstTokenOnly(), token_budget=token_budget).step(batch)[
            "loss"
        ] == pytest.approx(0.1)


@pytest.mark.parametrize("loss", [AIPO(rho=1.2), ClippedPolicyGradient(), Reinforce(), CrossEntropy()])
def test_the_step_is_the_one_of_a_plain_loop(loss: Loss) -> None:
    batch = random_batch([9, 4, 17], prompt=2)
    state, plain = (
        state_of(loss=loss, optimizer=AdamW(lr=1e-3, eps=1e-6, weight_decay=0.1)),
        tiny_llama(scale=5.0),
    )
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    total = torch.zeros(())
    for s in batch.samples:
        tokens_L = torch.tensor(s.tokens.tolist())
        logits_LV = plain(input_ids=tokens_L[None]).logits[0]
        logp_L = logits_LV[:-1].log_softmax(-1).gather(1, tokens_L[1:, None])[:, 0]
        trained = torch.tensor(s.mask[1:].tolist())
        assert s.logprobs is not None
        a, mu, logp = float(s.advantages[0]), torch.from_numpy(s.logprobs[s.mask]), logp_L[trained]
        ratio = (logp - mu).exp()
        match loss:
            case AIPO():
                per_token = -a * ratio.detach().clamp(max=1.2) * logp
            case ClippedPolicyGradient():
                per_token = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
            case Reinforce():
                per_token = -a * logp
            case _:
                per_token = -logp
        total = total + per_token.sum()
    total = total / sum(int(s.mask.sum()) for s in batch.samples)
    torch.autograd.backward(total)
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    adamw.step()
    metrics = state.step(batch)
    assert metrics["loss"] == pytest.approx(total.item(), abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    expected = dict(plain.named_parameters())
    for name, tensor in state.state_dict_for_weights().items():
        assert (tensor - expected[name]).abs().max() < 1e-5


def test_at_its_temperature_the_policy_that_sampled_has_ratio_one() -> None:
    model = tiny_llama(scale=8.0)
    bare = [random_sample(n, prompt=3, seed=n, temperature=0.6) for n in (9, 14, 5)]

    def sampled(sample: Sample, temperature: float) -> Sample:
        logprobs = np.full(len(sample.tokens), np.nan, dtype=np.float32)
        logprobs[sample.mask] = one_by_one(model, sample).numpy()
        return sample.model_copy(update={"logprobs": logprobs, "temperature": temperature})

    right = state_of(tiny_llama(scale=8.0)).step(Batch(samples=tuple(sampled(s, 0.6) for s in bare)))
    assert right["mismatch_max"] < 1e-5
    assert right["ratio"] == pytest.approx(1, abs=1e-5)
    assert right["effective_samples"] == pytest.approx(1, abs=1e-5)
    assert right["kl"] == pytest.approx(0, abs=1e-8)
    wrong = state_of(tiny_llama(scale=8.0)).step(Batch(samples=tuple(sampled(s, 1.0) for s in bare)))
    assert wrong["mismatch_max"] > 0.1


def test_two_runs_end_at_the_same_bits() -> None:
    batches = [random_batch([8, 20, 5, 13], prompt=2, seed=s) for s in (0, 10)]
    first, second = (weights_after(state_of(token_budget=32), *batches) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_restored_checkpoint_goes_on_at_the_same_bits() -> None:
    batches = [random_batch([8, 20], seed=s) for s in range(4)]
    straight = weights_after(state_of(), *batches)
    state = state_of()
    weights_after(state, *batches[:2])
    kept = {name: t.clone() for name, t in state.checkpoint().items()}
    resumed = state_of(tiny_llama(seed=9))
    resumed.restore(kept)
    assert resumed.version == 2
    ended = weights_after(resumed, *batches[2:])
    assert all(torch.equal(straight[name], ended[name]) for name in straight)
    with pytest.raises(ValueError, match=r"the checkpoint lacks 1 of .*exp_avg.lm_head.weight"):
        state.restore({name: t for name, t in kept.items() if name != "exp_avg.lm_head.weight"})


def test_an_untrained_policy_can_be_checkpointed_too() -> None:
    fresh = state_of(tiny_llama(seed=1))
    other = state_of(tiny_llama(seed=2))
    other.restore({name: t.clone() for name, t in fresh.checkpoint().items()})
    assert torch.equal(gradient_free(other), gradient_free(fresh))


def test_a_batch_that_cant_be_trained_on_is_refused() -> None:
    state = state_of()
    with pytest.raises(ValueError, match="trained tokens = 0"):
        state.step(Batch(samples=(random_sample(5, trained=False),)))
    with pytest.raises(ValueError, match=r"AIPO needs log-probabilities; the samples of \['g4'\] have none"):
        state.step(Batch(samples=(random_sample(5), random_sample(5, seed=4, supervised=True))))
    with pytest.raises(ValueError, match="the context is 512"):
        state.step(random_batch([514]))


def test_half_precision_parameters_are_refused() -> None:
    model = tiny_llama()
    torch.nn.Module.to(model, torch.bfloat16)
    with pytest.raises(TypeError, match="bfloat16"):
        state_of(model)


def test_computing_in_bfloat16_leaves_losses_and_weights_in_float32() -> None:
    batch = random_batch([9, 14, 5], prompt=3)
    model = tiny_llama(scale=5.0)
    half = TrainingOptions(precision="bfloat16")
    rough = TrainState(model, loss=AIPO(rho=1.2), optimizer=GENTLE, steps=10, options=half)
    exact, close = state_of().step(batch), rough.step(batch)
    assert close["loss"] != exact["loss"]
    assert close["loss"] == pytest.approx(exact["loss"], rel=0.05)
    assert {t.dtype for t in rough.state_dict_for_weights().values()} == {torch.float32}


def test_supervised_training_lowers_the_loss_and_reports_no_ratio() -> None:
    batch = Batch(samples=tuple(random_sample(12, seed=s, supervised=True) for s in range(4)))
    state = state_of(loss=CrossEntropy(), optimizer=AdamW(lr=1e-2))
    metrics = [state.step(batch) for _ in range(8)]
    assert metrics[-1]["loss"] < 0.7 * metrics[0]["loss"]
    assert metrics[0].keys() == {"loss", "tokens", "entropy", "grad_norm", "lr"}
    assert metrics[0]["tokens"] == 44
    assert state.version == 8


def test_the_learning_rate_rises_and_falls() -> None:
    rising = AdamW(lr=1.0, warmup_steps=4, schedule="cosine", floor=0.1)
    rates = [rising.learning_rate(step, steps=12) for step in (0, 3, 4, 8, 12, 99)]
    assert rates == pytest.approx([0.25, 1.0, 1.0, 0.55, 0.1, 0.1])
    straight = AdamW(lr=1.0, warmup_steps=4, schedule="linear", floor=0.1)
    rates = [straight.learning_rate(step, steps=12) for step in (3, 4, 6, 8, 12, 99)]
    assert rates == pytest.approx([1.0, 1.0, 0.775, 0.55, 0.1, 0.1])
    assert AdamW(lr=0.5).learning_rate(7, steps=3) == 0.5
