"""Every loss beside the numbers of other implementations, value and gradient.

Where implementations differ, an option is named after what it does, and the number of each is tested.
"""

# pyright: reportUnknownMemberType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from arriero.components.losses import (
    AIPO,
    CISPO,
    DPPO,
    DRO,
    GSPO,
    SAPO,
    Aggregation,
    ClippedPolicyGradient,
    DecoupledPPO,
    ImportanceWeight,
    Loss,
    OffPolicyMask,
    Reinforce,
    kl_estimate,
    kl_penalty,
    of_mean_one,
    sequence_weights,
    value_loss,
    vmpo_loss,
)
from arriero.components.losses.penalty import Estimator
from arriero.components.packing import PackedTokens
from tests.oracles import Oracle, every_oracle, oracle


def of_case(c: Oracle, name: str, mask_SL: npt.NDArray[np.bool_]) -> Tensor:
    """The values [T] of the trained tokens; one number per sequence is one per token."""
    value = np.array(c.inputs[name], dtype=np.float64)
    value_SL = np.broadcast_to(value if value.ndim == 2 else value[:, None], mask_SL.shape)
    return torch.from_numpy(value_SL[mask_SL])


def packed(
    c: Oracle, mask_SL: npt.NDArray[np.bool_], *, behaviour: str = "old_logp", proximal: str = ""
) -> PackedTokens:
    counts_S = mask_SL.sum(axis=1)
    sequence_T = torch.from_numpy(np.repeat(np.arange(len(counts_S)), counts_S))
    ones_T = torch.ones(len(sequence_T), dtype=torch.float64)
    return PackedTokens(
        targets_T=sequence_T,
        advantages_T=of_case(c, "advantages", mask_SL) if "advantages" in c.inputs else ones_T,
        weights_T=ones_T,
        temperatures_T=ones_T,
        behaviour_T=of_case(c, behaviour, mask_SL) if behaviour else None,
        sequence_T=sequence_T,
        proximal_T=of_case(c, proximal, mask_SL) if proximal else None,
    )


def seq_mask_tis() -> ImportanceWeight:
    return ImportanceWeight(lower=0.5, upper=2.0, judged="sequence_geometric", outside="zero")


PROXIMAL = {"behaviour": "behaviour_logp", "proximal": "proximal_logp"}
ROLLOUT = {"behaviour": "rollout_logp", "proximal": "old_logp"}
ONE = ImportanceWeight(lower=0.999999, upper=1.000001)

CASES: dict[str, tuple[Loss, Aggregation, float, dict[str, str]]] = {
    "aipo_like_verl": (AIPO(rho=1.5), "token_mean", 0, {"behaviour": "behavior_logp"}),
    "ppo_clip_verl_seq-mean-token-sum": (ClippedPolicyGradient(dual_clip=3.0), "sequence_sum", 0, {}),
    "ppo_clip_verl_seq-mean-token-mean": (ClippedPolicyGradient(dual_clip=3.0), "sequence_mean", 0, {}),
    "clip_higher_verl": (ClippedPolicyGradient(high=0.28, dual_clip=10.0), "token_mean", 0, {}),
    "ppo_orlhf_token": (ClippedPolicyGradient(), "token_mean", 0, {}),
    "trl_grpo": (ClippedPolicyGradient(high=0.28), "sequence_mean", 0, {}),
    "trl_bnpo": (ClippedPolicyGradient(high=0.28), "token_mean", 0, {}),
    "trl_dr_grpo": (ClippedPolicyGradient(high=0.28), "fixed_length", 8, {}),
    "trl_dapo": (ClippedPolicyGradient(high=0.28), "token_mean", 0, {}),
    "gspo_verl": (GSPO(gradient="per_token"), "sequence_mean", 0, {}),
    "gspo_verl_wide": (GSPO(low=0.2, high=0.3, gradient="per_token"), "sequence_mean", 0, {}),
    "gspo_orlhf": (GSPO(low=0.2, high=0.3), "sequence_mean", 0, {}),
    "trl_gspo": (GSPO(low=0.2, high=0.28), "sequence_mean", 0, {}),
    "gspo_areal": (GSPO(low=0.2, high=0.3, advantage="sequence_mean"), "token_mean", 0, {}),
    "cispo_verl": (CISPO(high=0.2), "token_mean", 0, {}),
    "sapo_verl": (SAPO(), "sequence_mean", 0, {}),
    "dro_verl": (DRO(beta=0.5), "token_mean", 0, {}),
    "dppo_tv_verl": (DPPO(low=0.1, high=0.1), "token_mean", 0, {}),
    "orlhf_tis": (DecoupledPPO(weight=ImportanceWeight(lower=0.5)), "token_mean", 0, ROLLOUT),
    "orlhf_icepop": (
        DecoupledPPO(weight=ImportanceWeight(lower=0.5, outside="zero")),
        "token_mean",
        0,
        ROLLOUT,
    ),
    "orlhf_seq-mask-tis": (DecoupledPPO(weight=seq_mask_tis()), "token_mean", 0, ROLLOUT),
    "ppo_areal_noRS": (DecoupledPPO(weight=ONE), "token_mean", 0, PROXIMAL),
    "decoupled_ppo_areal_clamp_token": (
        DecoupledPPO(weight=ImportanceWeight(upper=1.3)),
        "token_mean",
        0,
        PROXIMAL,
    ),
    "decoupled_ppo_areal_mask_sequence": (
        DecoupledPPO(
            weight=ImportanceWeight(lower=0.5, upper=1.3, level="sequence_geometric", outside="zero")
        ),
        "token_mean",
        0,
        PROXIMAL,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_loss_and_its_gradient_are_those_of_other_implementations(case: str) -> None:
    loss, aggregation, horizon, names = CASES[case]
    c = oracle(case)
    mask_SL = np.array(c.matrix("mask")) > 0
    tokens = packed(c, mask_SL, **names)
    logprobs_T = of_case(c, "logp", mask_SL).requires_grad_()
    counts_S = mask_SL.sum(axis=1)
    weights_T = torch.from_numpy(
        np.repeat(sequence_weights(counts_S, aggregation, horizon=horizon), counts_S)
    )
    total = (loss(logprobs_T, tokens) * weights_T).sum()
    (gradient_T,) = torch.autograd.grad(total, logprobs_T)
    gradient_SL = np.zeros(mask_SL.shape)
    gradient_SL[mask_SL] = gradient_T.numpy()
    assert total.item() == pytest.approx(c.number("loss"), abs=1e-6)
    np.testing.assert_allclose(gradient_SL, c.matrix("grad_wrt_logp"), atol=1e-6)
    metrics = c.outputs.get("metrics")
    if isinstance(metrics, dict) and "actor/pg_clipfrac" in metrics and case not in CLIPS_ELSEWHERE:
        clipped = loss.clipped(logprobs_T, tokens).double().mean().item()
        assert clipped == pytest.approx(metrics["actor/pg_clipfrac"], abs=1e-6)


# verl counts the tokens for which PPO's clip would act, though CISPO clips every ratio outside the bounds.
CLIPS_ELSEWHERE = {"cispo_verl"}

WEIGHTS: dict[str, ImportanceWeight] = {
    "tis_verl_token_2.0": ImportanceWeight(),
    "tis_verl_sequence_2.0": ImportanceWeight(level="sequence_product"),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_truncated_weights_are_those_of_verl(case: str) -> None:
    c = oracle(case)
    mask_SL = np.array(c.matrix("mask")) > 0
    weight_T = WEIGHTS[case](
        of_case(c, "log_ratio_train_over_rollout", mask_SL), packed(c, mask_SL, behaviour="")
    )
    np.testing.assert_allclose(weight_T, np.array(c.matrix("weights"))[mask_SL], atol=1e-6)


REJECTED: dict[str, ImportanceWeight] = {
    "rs_verl_token_k1": ImportanceWeight(lower=0.5, upper=2.0, outside="zero"),
    "rs_verl_seq_sum_k1": ImportanceWeight(lower=0.5, upper=2.0, level="sequence_product", outside="zero"),
    # The largest log-ratio^2 / 2 of a sequence is at most 0.5: every ratio lies within [1/e, e].
    "rs_verl_seq_max_k2": ImportanceWeight(
        lower=1 / math.e, upper=math.e, judged="every_token", outside="zero"
    ),
}


@pytest.mark.parametrize("case", REJECTED)
def test_rejected_tokens_and_sequences_are_those_of_verl(case: str) -> None:
    c = oracle(case)
    mask_SL = np.array(c.matrix("mask")) > 0
    tokens = packed(c, mask_SL, behaviour="")
    log_ratio_T = of_case(c, "log_ratio", mask_SL)
    kept_T = REJECTED[case](log_ratio_T, tokens) > 0
    assert kept_T.tolist() == (np.array(c.output("mask"))[mask_SL] > 0).tolist()


def test_cispo_per_token_is_that_of_slime() -> None:
    c = oracle("cispo_slime")
    mask_SL = np.ones((2, 4), dtype=np.bool_)
    tokens = packed(c, mask_SL)
    losses_T = CISPO(high=0.2)(of_case(c, "logp", mask_SL), tokens)
    np.testing.assert_allclose(losses_T, np.array(c.matrix("per_token_loss"))[mask_SL], atol=1e-9)
    clipped_T = CISPO(high=0.2).clipped(of_case(c, "logp", mask_SL), tokens)
    assert clipped_T.tolist() == (np.array(c.matrix("clipfrac"))[mask_SL] > 0).tolist()


@pytest.mark.parametrize("case", ["kl_orlhf", "kl_slime"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_estimates_of_the_divergence_are_those_of_openrlhf_and_slime(case: str, estimator: Estimator) -> None:
    c = oracle(case)
    logprobs_T, reference_T = (torch.tensor(c.vector(n), dtype=torch.float64) for n in ("logp", "ref_logp"))
    ours_T = kl_estimate(logprobs_T, reference_T, estimator)
    if case == "kl_orlhf":  # clamps every estimate to 10
        ours_T = ours_T.clamp(-10, 10)
    np.testing.assert_allclose(ours_T, c.vector(estimator), atol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradients_of_the_estimates_and_of_the_penalty_are_those_of_verl(estimator: Estimator) -> None:
    c = oracle("kl_estimator_grads_verl")
    reference_T = torch.tensor(c.vector("ref_logp"), dtype=torch.float64)
    logprobs_T = torch.tensor(c.vector("logp"), dtype=torch.float64, requires_grad=True)
    (plain_T,) = torch.autograd.grad(kl_estimate(logprobs_T, reference_T, estimator).sum(), logprobs_T)
    expected = c.vector(estimator)
    if estimator == "k3":  # verl clamps the last one, so its gradient is 0 there; ours is 1 - ref/pi
        expected = [*expected[:3], 1 - math.exp(4)]
    np.testing.assert_allclose(plain_T, expected, atol=1e-6)
    (right_T,) = torch.autograd.grad(kl_penalty(logprobs_T, reference_T, estimator).sum(), logprobs_T)
    np.testing.assert_allclose(right_T, c.vector("k1+"), atol=1e-6)


def test_the_clipped_value_loss_is_that_of_openrlhf() -> None:
    c = oracle("value_orlhf")
    values, old, returns = (
        torch.tensor(c.matrix(n), dtype=torch.float64) for n in ("values", "old_values", "returns")
    )
    ours = value_loss(values, returns, old_values_T=old, clip=0.2).mean()
    assert ours.item() == pytest.approx(c.number("loss"), abs=1e-9)


def test_vmpo_is_that_of_rlax() -> None:
    c = oracle("vmpo_rlax")
    logprobs_N, advantages_N, kl_N = (
        torch.tensor(c.vector(n), dtype=torch.float64, requires_grad=n == "sample_log_probs")
        for n in ("sample_log_probs", "advantages", "kl")
    )
    temperature = torch.tensor(c.number("temperature"), dtype=torch.float64, requires_grad=True)
    ours = vmpo_loss(
        logprobs_N,
        advantages_N,
        kl_N,
        temperature=temperature,
        multiplier=torch.tensor(c.number("alpha"), dtype=torch.float64),
        eps_temperature=c.number("eps_temperature"),
        eps_kl=c.number("eps_alpha"),
        top_fraction=c.number("top_k_fraction"),
    )
    np.testing.assert_allclose(ours.weights_N, c.vector("weights"), atol=1e-9)
    # Their loss of an example is meant to be averaged over the six.
    np.testing.assert_allclose(6 * ours.policy_N.detach(), c.vector("policy_loss"), atol=1e-8)
    np.testing.assert_allclose(ours.kl_N, c.vector("kl_loss"), atol=1e-9)
    np.testing.assert_allclose(ours.multiplier_N, c.vector("alpha_loss"), atol=1e-9)
    assert ours.temperature.item() == pytest.approx(c.number("temperature_loss"), abs=1e-9)
    total = ours.policy_N.sum() + ours.temperature
    policy_N, warmth = torch.autograd.grad(total, [logprobs_N, temperature])
    np.testing.assert_allclose(policy_N, c.vector("grad_mean_loss_wrt_logp"), atol=1e-9)
    assert warmth.item() == pytest.approx(c.number("grad_mean_loss_wrt_temperature"), abs=1e-9)


def test_weights_of_mean_one_are_those_of_verl() -> None:
    c = oracle("tis_verl_token_batchnorm")
    mask_SL = np.array(c.matrix("mask")) > 0
    log_ratio_T = of_case(c, "log_ratio_train_over_rollout", mask_SL)
    weight_T = of_mean_one(ImportanceWeight()(log_ratio_T, packed(c, mask_SL, behaviour="")))
    np.testing.assert_allclose(weight_T, np.array(c.matrix("weights"))[mask_SL], atol=1e-6)


def test_masked_sequences_are_those_of_slime() -> None:
    c = oracle("opsm_slime")
    mask_SL = np.array(c.matrix("mask")) > 0
    loss = OffPolicyMask(loss=Reinforce(), delta=0.05)
    assert not loss.masked(of_case(c, "logp", mask_SL), packed(c, mask_SL)).any()
    # The other way round the sequences are 0.0375 and 0.3 nats from who sampled them; one token of the second
    # has a negative advantage.
    masked_T = loss.masked(of_case(c, "old_logp", mask_SL), packed(c, mask_SL, behaviour="logp"))
    assert masked_T.tolist() == [False] * 5 + [True, False]


def test_every_case_is_tested() -> None:
    tested = "".join(
        Path(__file__).with_name(f"test_{n}.py").read_text() for n in ("loss_oracles", "advantages")
    )
    assert {c.id for c in every_oracle() if f'"{c.id}"' not in tested} == set()
