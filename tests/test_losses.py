"""Every loss, value and gradient, against other implementations and by hand."""

# pyright: reportUnknownMemberType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from arriero.components.losses import (
    AIPO,
    Aggregation,
    ClippedPolicyGradient,
    CrossEntropy,
    Loss,
    Reinforce,
    sequence_weights,
)
from arriero.components.packing import PackedTokens
from tests.oracles import Oracle, oracle


def packed(behaviour: list[float] | None, advantages: list[float]) -> PackedTokens:
    ones_T = torch.ones(len(advantages), dtype=torch.float64)
    return PackedTokens(
        targets_T=ones_T.long(),
        advantages_T=torch.tensor(advantages, dtype=torch.float64),
        weights_T=ones_T,
        temperatures_T=ones_T,
        behaviour_T=None if behaviour is None else torch.tensor(behaviour, dtype=torch.float64),
        sequence_T=ones_T.long(),
    )


def loss_and_gradient(
    c: Oracle, loss: Loss, aggregation: Aggregation, horizon: float = 0, behaviour: str = "old_logp"
) -> tuple[float, np.ndarray, float]:
    """Loss, gradient with respect to log-probabilities [S, L], share of tokens clipped, in float64."""
    mask_SL = np.array(c.matrix("mask")) > 0
    advantages = np.array(c.inputs["advantages"], dtype=np.float64)
    advantages_SL = np.broadcast_to(
        advantages if advantages.ndim == 2 else advantages[:, None], mask_SL.shape
    )
    tokens = packed(np.array(c.matrix(behaviour))[mask_SL].tolist(), advantages_SL[mask_SL].tolist())
    logprobs_T = torch.tensor(np.array(c.matrix("logp"))[mask_SL], requires_grad=True)
    counts_S = mask_SL.sum(axis=1)
    weights_T = np.repeat(sequence_weights(counts_S, aggregation, horizon=horizon), counts_S)
    total = (loss(logprobs_T, tokens) * torch.from_numpy(weights_T)).sum()
    (gradient_T,) = torch.autograd.grad(total, logprobs_T)
    gradient_SL = np.zeros(mask_SL.shape)
    gradient_SL[mask_SL] = gradient_T.numpy()
    return total.item(), gradient_SL, float(loss.clipped(logprobs_T, tokens).double().mean())


def test_aipo_is_reinforce_with_a_one_sided_truncated_ratio() -> None:
    c = oracle("aipo_like_verl")
    loss, gradient, clipped = loss_and_gradient(c, AIPO(rho=1.5), "token_mean", behaviour="behavior_logp")
    assert loss == pytest.approx(c.number("loss"), abs=1e-9)
    np.testing.assert_allclose(gradient, c.matrix("grad_wrt_logp"), atol=1e-9)
    assert clipped == pytest.approx(2 / 7)


CLIPPED: dict[str, tuple[float, float, float | None, Aggregation, float]] = {
    "ppo_clip_verl_seq-mean-token-sum": (0.2, 0.2, 3.0, "sequence_sum", 0),
    "ppo_clip_verl_seq-mean-token-mean": (0.2, 0.2, 3.0, "sequence_mean", 0),
    "clip_higher_verl": (0.2, 0.28, 10.0, "token_mean", 0),
    "ppo_orlhf_token": (0.2, 0.2, None, "token_mean", 0),
    "trl_grpo": (0.2, 0.28, None, "sequence_mean", 0),
    "trl_bnpo": (0.2, 0.28, None, "token_mean", 0),
    "trl_dr_grpo": (0.2, 0.28, None, "fixed_length", 8),
    "trl_dapo": (0.2, 0.28, None, "token_mean", 0),
}


@pytest.mark.parametrize("case", CLIPPED)
def test_the_clipped_policy_gradient_gives_the_numbers_of_verl_openrlhf_and_trl(case: str) -> None:
    low, high, dual_clip, aggregation, horizon = CLIPPED[case]
    c = oracle(case)
    loss, gradient, clipped = loss_and_gradient(
        c, ClippedPolicyGradient(low=low, high=high, dual_clip=dual_clip), aggregation, horizon
    )
    assert loss == pytest.approx(c.number("loss"), abs=1e-7)
    np.testing.assert_allclose(gradient, c.matrix("grad_wrt_logp"), atol=1e-7)
    if isinstance(metrics := c.outputs.get("metrics"), dict):
        assert clipped == pytest.approx(metrics["actor/pg_clipfrac"], abs=1e-6)


def test_verls_sequence_sum_over_a_fixed_horizon_is_fixed_length() -> None:
    c = oracle("ppo_clip_verl_seq-mean-token-sum")
    ours, _, _ = loss_and_gradient(c, ClippedPolicyGradient(dual_clip=3.0), "fixed_length", 4)
    assert ours == pytest.approx(c.number("loss") / 4)


def gradient_of(loss: Loss, logprobs: list[float], tokens: PackedTokens) -> tuple[list[float], list[float]]:
    logprobs_T = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    losses_T = loss(logprobs_T, tokens)
    (gradient_T,) = torch.autograd.grad(losses_T.sum(), logprobs_T)
    return [float(x) for x in losses_T.detach()], [float(x) for x in gradient_T]


def test_aipo_by_hand() -> None:
    tokens = packed([math.log(0.1), math.log(0.5)], [1.0, -2.0])
    losses, gradients = gradient_of(AIPO(rho=2.0), [math.log(0.4), math.log(0.25)], tokens)
    # Ratios 4 and 0.5: the first is truncated to 2, the second kept.
    assert losses == pytest.approx([-2 * math.log(0.4), 0.5 * 2 * math.log(0.25)])
    assert gradients == pytest.approx([-2.0, 1.0])


def test_clipping_by_hand() -> None:
    tokens = packed([0.0, 0.0, 0.0, 0.0], [1.0, 1.0, -1.0, -1.0])
    logprobs = [math.log(r) for r in (1.5, 0.5, 0.5, 5.0)]
    losses, gradients = gradient_of(ClippedPolicyGradient(dual_clip=3.0), logprobs, tokens)
    assert losses == pytest.approx([-1.2, -0.5, 0.8, 3.0])
    assert gradients == pytest.approx([0.0, -0.5, 0.0, 0.0])


def test_reinforce_and_cross_entropy_by_hand() -> None:
    tokens = packed(None, [2.0, -1.0])
    assert gradient_of(Reinforce(), [-1.0, -3.0], tokens) == ([2.0, -3.0], [-2.0, 1.0])
    assert gradient_of(CrossEntropy(), [-1.0, -3.0], tokens) == ([1.0, 3.0], [-1.0, -1.0])
    assert not CrossEntropy().clipped(torch.zeros(2), tokens).any()
    assert not Reinforce().clipped(torch.zeros(2), tokens).any()


@pytest.mark.parametrize("loss", [AIPO(), ClippedPolicyGradient(dual_clip=3.0)])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_beyond_all_numbers_has_a_finite_gradient(loss: Loss, advantage: float) -> None:
    losses, gradients = gradient_of(loss, [-1.0], packed([-2000.0], [advantage]))
    assert math.isfinite(losses[0])
    assert math.isfinite(gradients[0])


@pytest.mark.parametrize("loss", [AIPO(), ClippedPolicyGradient(), Reinforce(), CrossEntropy()])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_refused(loss: Loss, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="float32"):
        loss(torch.zeros(1, dtype=dtype), packed([0.0], [1.0]))


@pytest.mark.parametrize("loss", [AIPO(), ClippedPolicyGradient()])
def test_a_ratio_needs_the_log_probabilities_of_the_behaviour_policy(loss: Loss) -> None:
    assert loss.needs_behaviour
    assert loss.ratio_control
    with pytest.raises(ValueError, match="behaviour"):
        loss(torch.zeros(1), packed(None, [1.0]))


def test_a_function_is_no_loss() -> None:
    assert isinstance(AIPO(), Loss)
    assert not isinstance(math.exp, Loss)


def test_weights_by_hand() -> None:
    counts = np.array([1, 9, 0])
    assert sequence_weights(counts, "token_mean").tolist() == [0.1, 0.1, 0.0]
    assert sequence_weights(counts, "sequence_mean").tolist() == pytest.approx([1 / 2, 1 / 18, 0])
    assert sequence_weights(counts, "sequence_sum").tolist() == [0.5, 0.5, 0.0]
    assert sequence_weights(counts, "fixed_length", horizon=10).tolist() == [0.05, 0.05, 0.0]


def test_nothing_to_train_on_is_refused() -> None:
    with pytest.raises(ValueError, match="trained tokens = 0"):
        sequence_weights(np.array([0, 0]), "token_mean")


@pytest.mark.parametrize(("aggregation", "horizon"), [("token_mean", 8), ("fixed_length", 0)])
def test_a_horizon_belongs_to_fixed_length_alone(aggregation: Aggregation, horizon: float) -> None:
    with pytest.raises(ValueError, match="fixed_length"):
        sequence_weights(np.array([1]), aggregation, horizon=horizon)


def test_importing_losses_and_the_optimizer_does_not_import_torch() -> None:
    modules = "arriero.components.losses, arriero.components.optimizer"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
