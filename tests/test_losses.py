"""Losses and their weights by hand; `test_loss_oracles.py` has the numbers of other implementations."""

# pyright: reportUnknownMemberType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from arriero.components.losses import (
    AIPO,
    AWR,
    CISPO,
    DPO,
    DPPO,
    DRO,
    GMPO,
    GSPO,
    M2PO,
    SAPO,
    VMPO,
    Aggregation,
    ClippedPolicyGradient,
    CrossEntropy,
    DecoupledPPO,
    Divergence,
    ImportanceWeight,
    ImportanceWeighted,
    Loss,
    OffPolicyMask,
    OnPolicyDistillation,
    Reinforce,
    WithEntropy,
    WithKL,
    bradley_terry_loss,
    dpo_loss,
    forward_kl,
    ipo_loss,
    jensen_shannon,
    kto_loss,
    reverse_kl,
    sequence_weights,
)
from arriero.components.packing import PackedTokens


def packed(
    behaviour: list[float] | None,
    advantages: list[float],
    *,
    sequences: list[int] | None = None,
    reference: list[float] | None = None,
    proximal: list[float] | None = None,
) -> PackedTokens:
    """Tokens of one sequence, or of the `sequences` that they are said to belong to."""

    def vector(values: list[float] | None) -> torch.Tensor | None:
        return None if values is None else torch.tensor(values, dtype=torch.float64)

    ones_T = torch.ones(len(advantages), dtype=torch.float64)
    return PackedTokens(
        targets_T=ones_T.long(),
        advantages_T=torch.tensor(advantages, dtype=torch.float64),
        weights_T=ones_T,
        temperatures_T=ones_T,
        behaviour_T=vector(behaviour),
        sequence_T=ones_T.long() if sequences is None else torch.tensor(sequences),
        reference_T=vector(reference),
        proximal_T=vector(proximal),
    )


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


def test_a_sequence_ratio_is_the_mean_of_its_tokens_and_no_other_ones() -> None:
    tokens = packed([0.0, 0.0, 0.0], [1.0, 1.0, 1.0], sequences=[0, 0, 1])
    losses, gradients = gradient_of(GSPO(low=0.2, high=0.2), [0.1, -0.1, 0.5], tokens)
    # The first sequence has ratio 1, whose gradient its tokens share; the second one's is clipped.
    assert losses == pytest.approx([-1.0, -1.0, -1.2])
    assert gradients == pytest.approx([-1.0, -1.0, 0.0])


def test_gmpo_limits_tokens_before_their_mean() -> None:
    tokens = packed([0.0, 0.0, 0.0, 0.0], [1.0, 1.0, -2.0, -2.0], sequences=[0, 0, 1, 1])
    losses, gradients = gradient_of(GMPO(low=0.4, high=0.4), [3.0, 0.2, -3.0, 0.2], tokens)
    up, down = math.exp((0.4 + 0.2) / 2), math.exp((-0.4 + 0.2) / 2)
    assert losses == pytest.approx([-up, -up, 2 * down, 2 * down])
    assert gradients == pytest.approx([0.0, -up, 0.0, 2 * down])


def test_dppo_judges_by_probability_and_not_by_ratio() -> None:
    # Twice as likely, but of 1 %; and 1.4 times as likely, from 60 to 84 %.
    behaviour, logprobs = [math.log(0.01), math.log(0.6)], [math.log(0.02), math.log(0.84)]
    losses, gradients = gradient_of(DPPO(), logprobs, packed(behaviour, [1.0, 1.0]))
    assert losses == pytest.approx([-2 * math.log(0.02), 0.0])
    assert gradients == pytest.approx([-2.0, 0.0])


def test_m2po_leaves_out_the_largest_squares_of_a_sequence_until_their_mean_is_small() -> None:
    # Squares 0.01, 0.04, 0.16 and 0.09, of which the last moves back: their means are 0.01, 0.025, 0.07.
    tokens = packed([0.0] * 5, [1.0, 1.0, 1.0, -1.0, 1.0], sequences=[0, 0, 0, 0, 1])
    logprobs = [0.1, 0.2, 0.4, 0.3, 0.19]
    _, gradients = gradient_of(M2PO(second_moment=0.04), logprobs, tokens)
    assert gradients == pytest.approx([-math.exp(0.1), -math.exp(0.2), 0.0, math.exp(0.3), -math.exp(0.19)])
    _, gradients = gradient_of(M2PO(second_moment=0.009), logprobs, tokens)
    assert gradients == pytest.approx([0.0, 0.0, 0.0, math.exp(0.3), 0.0])


def test_what_m2po_leaves_out_of_a_sequence_doesnt_depend_on_others_in_float32() -> None:
    # Squares 0.0402 and 0.0361, mean 0.03815: within the bound, however far away the first sequence is.
    tokens = packed([0.0] * 4, [1.0] * 4, sequences=[0, 0, 1, 1])
    single = replace(
        tokens, **{name: getattr(tokens, name).float() for name in ("advantages_T", "behaviour_T")}
    )
    logprobs_T = torch.tensor([1000.0, 1000.0, 0.2005, 0.19])
    assert M2PO(second_moment=0.0385).clipped(logprobs_T, single).tolist() == [True, True, False, False]


def test_vmpo_weighs_the_divergence_by_its_multiplier() -> None:
    tokens = replace(packed([math.log(0.5), math.log(0.5)], [0.0, 2.0]), multiplier=3.0)
    losses, gradients = gradient_of(VMPO(), [math.log(0.25), math.log(0.5)], tokens)
    # KL 0.5 - 1 + log 2 of the first token, whose ratio is 1/2; the second one is where it was.
    assert losses == pytest.approx([3 * (math.log(2) - 0.5), -2 * math.log(0.5)])
    assert gradients == pytest.approx([3 * (0.5 - 1), -2.0])
    with pytest.raises(ValueError, match="needs a multiplier"):
        VMPO()(torch.zeros(1), packed([0.0], [1.0]))


def test_the_multiplier_of_vmpo_rises_beyond_the_bound_and_falls_within() -> None:
    loss = VMPO(eps_kl=0.02, rate=0.1)
    assert loss.relearned(2.0, 0.02) == 2.0
    assert loss.relearned(2.0, 0.06) == pytest.approx(2 * math.exp(0.2))
    assert loss.relearned(2.0, 0.0) == pytest.approx(2 * math.exp(-0.1))
    assert loss.relearned(2.0, 1e9) == pytest.approx(2 * math.e)
    assert loss.relearned(1e-8, 0.0) == 1e-8


def test_decoupled_ppo_with_the_behaviour_as_proximal_policy_is_ppo() -> None:
    behaviour, logprobs = [-1.0, -2.0, -0.5], [-0.8, -2.6, -0.4]
    tokens = packed(behaviour, [1.0, 1.0, -1.0], proximal=behaviour)
    assert gradient_of(DecoupledPPO(), logprobs, tokens) == gradient_of(
        ClippedPolicyGradient(), logprobs, tokens
    )


def test_importance_weighting_with_one_bound_is_aipo() -> None:
    tokens = packed([-1.0, -2.0, -1.0], [1.0, -0.5, 2.0])
    weight = ImportanceWeight(upper=1.5)
    ours = gradient_of(ImportanceWeighted(weight=weight), [-0.2, -2.5, -1.0], tokens)
    assert ours == gradient_of(AIPO(rho=1.5), [-0.2, -2.5, -1.0], tokens)


def test_an_importance_weight_whose_settings_contradict_is_refused() -> None:
    with pytest.raises(ValueError, match="must be less than"):
        ImportanceWeight(lower=2.0, upper=1.0)
    with pytest.raises(ValueError, match="decides what is zeroed"):
        ImportanceWeight(judged="every_token")


def test_awr_imitates_in_proportion_to_the_exponential_of_the_advantage() -> None:
    losses, gradients = gradient_of(AWR(beta=0.5), [-1.0, -1.0, -1.0], packed(None, [0.0, 1.0, 1e9]))
    assert losses == pytest.approx([1.0, math.exp(2), 20.0])
    assert gradients == pytest.approx([-1.0, -math.exp(2), -20.0])


def test_the_gradient_of_a_penalty_has_its_score_function_term() -> None:
    # NeMo-RL PR#2506: beta * w * (k3 + 1 - exp(lr)) / n with lr = log(ref/pi), by hand.
    tokens = packed([-1.5, -0.4], [0.0, 0.0], reference=[-0.9, -1.1])
    for rho, expected in ((None, [-0.045, 0.060]), (100.0, [-0.0607436, 0.0444491])):
        loss = WithKL(loss=ClippedPolicyGradient(), beta=0.3, rho=rho)
        _, gradients = gradient_of(loss, [-1.2, -0.7], tokens)
        assert [g / 2 for g in gradients] == pytest.approx(expected, abs=1e-6)


def test_an_entropy_bonus_is_taken_off_the_loss() -> None:
    entropy_T = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    tokens = replace(packed(None, [1.0, 1.0]), entropy_T=entropy_T)
    losses_T = WithEntropy(loss=Reinforce(), beta=0.1)(torch.full((2,), -1.0, dtype=torch.float64), tokens)
    assert losses_T.tolist() == pytest.approx([0.95, 0.8])
    assert torch.autograd.grad(losses_T.sum(), entropy_T)[0].tolist() == pytest.approx([-0.1, -0.1])


def test_preference_losses_by_hand() -> None:
    margin_P = torch.tensor([0.0, 2.0, -2.0], dtype=torch.float64)
    assert dpo_loss(margin_P, beta=0.5).tolist() == pytest.approx(
        [math.log(2), math.log1p(math.exp(-1)), math.log1p(math.exp(1))]
    )
    noisy = dpo_loss(margin_P, beta=0.5, label_smoothing=0.1)[1]
    assert noisy.item() == pytest.approx(0.9 * math.log1p(math.exp(-1)) + 0.1 * math.log1p(math.exp(1)))
    assert ipo_loss(margin_P, beta=0.25).tolist() == pytest.approx([4.0, 0.0, 16.0])
    liked = torch.tensor([True, True, False])
    kto = kto_loss(margin_P, liked, kl=1.0, beta=1.0, disliked=2.0)
    sigmoid_of_minus_one = 1 / (1 + math.e)
    assert kto.tolist() == pytest.approx(
        [1 - sigmoid_of_minus_one, sigmoid_of_minus_one, 2 * (1 - 1 / (1 + math.exp(-3)))]
    )
    chosen, rejected = torch.tensor([1.0, 1000.0]), torch.tensor([0.0, -1000.0])
    assert bradley_terry_loss(chosen, rejected).tolist() == pytest.approx([math.log1p(math.exp(-1)), 0.0])


def test_the_loss_of_a_pair_is_on_all_its_tokens() -> None:
    tokens = packed(None, [1.0, 1.0, -1.0, -1.0], sequences=[0, 0, 1, 2], reference=[-1.0, -1.0, -1.0, -3.0])
    tokens = replace(tokens, advantages_T=torch.tensor([1.0, 1.0, -1.0, 1.0], dtype=torch.float64))
    losses, gradients = gradient_of(DPO(beta=1.0), [-0.5, -1.0, -2.0, -3.0], tokens)
    # Margin (0.5 + 0) - (-1) = 1.5, and half a pair with margin 0.
    pair = math.log1p(math.exp(-1.5))
    assert losses == pytest.approx([pair, pair, pair, math.log(2)])
    slope = 3 / (1 + math.exp(1.5))  # the sum over the three tokens that carry it
    assert gradients == pytest.approx([-slope, -slope, slope, -0.5])
    losses, _ = gradient_of(DPO(beta=1.0, kind="square"), [-0.5, -1.0, -2.0, -3.0], tokens)
    assert losses[0] == pytest.approx((0.25 + 1 - 0.5) ** 2)  # means per token
    with pytest.raises(ValueError, match="label_smoothing"):
        DPO(kind="square", label_smoothing=0.1)


def test_divergences_of_a_teacher_by_hand() -> None:
    student, teacher = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    forward = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    backward = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert forward_kl(student, teacher).item() == pytest.approx(forward, abs=1e-6)
    assert reverse_kl(student, teacher).item() == pytest.approx(backward, abs=1e-6)
    certain, other = torch.tensor([[0.0, -math.inf]]), torch.tensor([[-math.inf, 0.0]])
    assert jensen_shannon(certain, other).item() == pytest.approx(math.log(2), abs=1e-6)
    assert forward_kl(certain, certain).item() == 0
    with pytest.raises(ValueError, match="between 0 and 1"):
        jensen_shannon(student, teacher, beta=1.0)


def test_on_policy_distillation_pulls_towards_the_teacher() -> None:
    tokens = packed([-1.0, -1.0], [9.0, 9.0], reference=[-0.5, -2.0])
    losses, gradients = gradient_of(OnPolicyDistillation(), [-1.0, -1.0], tokens)
    assert losses == pytest.approx([-0.5, 1.0])
    assert gradients == pytest.approx([-0.5, 1.0])


@pytest.mark.parametrize(
    "loss",
    [AIPO(), CISPO(), ClippedPolicyGradient(dual_clip=3.0), GSPO(), GMPO(), DPPO(), M2PO(), SAPO(), DRO()],
)
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


@pytest.mark.parametrize(("inner", "kept"), [(VMPO(), "multiplier"), (Divergence(), "divergence")])
def test_a_loss_for_which_the_trainer_keeps_something_stands_alone(inner: Loss, kept: str) -> None:
    said = f"can't stand around {type(inner).__name__}, for which the trainer keeps a {kept}"
    for around in (WithKL, WithEntropy):
        with pytest.raises(ValueError, match=said):
            around(loss=inner, beta=0.1)
    with pytest.raises(ValueError, match="OffPolicyMask can't stand around"):
        OffPolicyMask(loss=inner)
