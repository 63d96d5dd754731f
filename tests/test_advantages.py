"""Advantages against other implementations and by hand."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arriero.components.advantages import (
    Baseline,
    Beyond,
    best_weights,
    gae,
    group_advantage,
    is_constant,
    on_tokens,
    overlong_penalty,
    remax_advantage,
    returns_to_go,
    utterance_td,
    utterances,
    vtrace,
    whitened,
    whitened_tokens,
)
from arriero.components.losses import vmpo_loss
from tests.oracles import oracle


@pytest.mark.parametrize(
    ("case", "output", "baseline", "std"),
    [
        ("grpo_verl_binary8", "grpo", "mean", True),
        ("grpo_verl_binary8", "dr_grpo", "mean", False),
        ("grpo_vec_verl_mixed", "grpo", "mean", True),
        ("rloo_verl_binary8", "rloo", "leave_one_out", False),
        ("grpo_nemo_looTrue", "adv", "leave_one_out", True),
    ],
)
def test_group_advantage_gives_the_numbers_of_other_implementations(
    case: str, output: str, baseline: Baseline, std: bool
) -> None:
    c = oracle(case)
    ours = [group_advantage(rewards, baseline=baseline, std=std) for rewards in c.groups().values()]
    np.testing.assert_allclose(np.concatenate(ours), c.vector(output), atol=2e-6)


def test_the_deviation_of_a_group_is_that_of_trl() -> None:
    c = oracle("nanstd_trl")
    for rewards, std in zip(c.matrix("rewards"), c.vector("std"), strict=True):
        ours = group_advantage(rewards, baseline="mean", std=True, eps=1e-4)
        np.testing.assert_allclose(ours, (np.array(rewards) - np.mean(rewards)) / (std + 1e-4), atol=1e-12)


def test_the_deviation_over_n_is_that_of_the_population() -> None:
    # Rewards 1, 0, 0, 1: 0.5 over n, and 0.57735 over n - 1.
    assert group_advantage([1, 0, 0, 1], baseline="mean", std=True, ddof=0, eps=0).tolist() == [1, -1, -1, 1]


@pytest.mark.parametrize("case", ["opo_verl_mixed", "opo_verl_binary8"])
def test_a_baseline_weighed_by_length_is_that_of_opo(case: str) -> None:
    c = oracle(case)
    lengths = list(c.groups("lengths").values())
    ours = [
        group_advantage(rewards, baseline="length_weighted", lengths=n)
        for rewards, n in zip(c.groups().values(), lengths, strict=True)
    ]
    np.testing.assert_allclose(np.concatenate(ours), c.vector("adv"), atol=1e-9)


def test_a_group_of_one_is_refused_where_verl_keeps_its_raw_reward() -> None:
    c = oracle("grpo_verl_singleton")
    assert c.vector("adv") == pytest.approx([1.0], abs=1e-5)
    with pytest.raises(ValueError, match="at least 2 rewards are needed"):
        group_advantage(c.vector("scores"), baseline="mean", std=True)
    assert group_advantage(c.vector("scores"), baseline="none").tolist() == [1.0]


@pytest.mark.parametrize(
    ("case", "ddof"), [("rfpp_baseline_verl_binary8", 1), ("rfpp_baseline_verl_mixed", 1), ("rfpp_nemo", 0)]
)
def test_whitening_group_advantages_is_reinforce_plus_plus_baseline(case: str, ddof: Literal[0, 1]) -> None:
    c = oracle(case)
    centred = [group_advantage(rewards, baseline="mean") for rewards in c.groups().values()]
    tokens = 3 if "tokens_per_response" in c.inputs else 2
    ours = whitened_tokens([np.full(tokens, a) for a in np.concatenate(centred)], ddof=ddof)
    np.testing.assert_allclose([a[-1] for a in ours], c.vector("adv"), atol=1e-6)


def test_masked_values_are_left_out_of_whitening() -> None:
    c = oracle("masked_whiten_verl")
    np.testing.assert_allclose(whitened(c.matrix("x")[0][:3]), c.matrix("out")[0][:3], atol=1e-7)


def test_remax_takes_the_reward_of_the_greedy_response_off_the_returns() -> None:
    c = oracle("remax_verl")
    rows = zip(
        c.matrix("rewards"), c.matrix("mask"), c.vector("baselines"), c.output("advantages"), strict=True
    )
    for rewards, mask, greedy, expected in rows:
        n = int(sum(mask))
        np.testing.assert_allclose(remax_advantage(rewards[:n], greedy), expected[:n], atol=1e-12)


def test_discounted_returns_are_those_of_openrlhf() -> None:
    c = oracle("rtg_orlhf")
    for rewards, mask, expected in zip(
        c.matrix("rewards"), c.matrix("mask"), c.output("returns"), strict=True
    ):
        n = int(sum(mask))
        np.testing.assert_allclose(returns_to_go(rewards[:n], gamma=0.9), expected[:n], atol=1e-12)


def test_vtrace_is_that_of_rlax() -> None:
    c = oracle("vtrace_rlax")
    values, after = np.array(c.vector("v_tm1")), c.vector("v_t")
    ours = vtrace(c.vector("r_t"), values, c.vector("rho"), gamma=c.number("discount"), bootstrap=after[-1])
    np.testing.assert_allclose(ours.targets - values, c.vector("errors"), atol=1e-9)
    np.testing.assert_allclose(ours.advantages, c.vector("pg_advantage"), atol=1e-9)


def test_vtrace_on_fresh_data_is_gae_with_lambda() -> None:
    rewards, values = [0.0, 1.0, -0.5], [0.2, 0.1, 0.4]
    ours = vtrace(rewards, values, [1.0, 1.0, 1.0], gamma=0.9, lam=0.8, bootstrap=0.3)
    expected = gae(rewards, values, gamma=0.9, lam=0.8, bootstrap=0.3)
    np.testing.assert_allclose(ours.targets - values, expected, atol=1e-12)


@pytest.mark.parametrize("case", ["gae_verl", "gae_orlhf", "gae_chunked_slime"])
def test_gae_gives_the_numbers_of_other_implementations(case: str) -> None:
    c = oracle(case)
    expected = c.matrix("raw_advantages" if case == "gae_verl" else "advantages")
    rewards, values = c.matrix("rewards"), c.matrix("values")
    masks = c.matrix("mask") if "mask" in c.inputs else np.ones((4, 4)).tolist()
    for mask, reward, value, want in zip(masks, rewards, values, expected, strict=True):
        n = int(sum(mask))
        ours = gae(reward[:n], value[:n], gamma=c.number("gamma"), lam=c.number("lam"))
        np.testing.assert_allclose(ours, want[:n], atol=1e-9)


def test_gae_without_the_tokens_of_a_tool_skips_them_as_verl_does() -> None:
    c = oracle("gae_verl_obs_gap")
    (mask,), (rewards,), (values,) = c.matrix("mask"), c.matrix("rewards"), c.matrix("values")
    ours = gae(rewards, values, gamma=0.9, lam=0.8, mask=mask)
    np.testing.assert_allclose(ours[[0, 3]], np.array(c.matrix("raw_advantages"))[0, [0, 3]], atol=1e-12)
    assert ours[1:3].tolist() == [0, 0]


def test_a_reward_within_an_observation_counts_for_the_token_before_it() -> None:
    ours = gae([5.0, 0.0, 2.0, 1.0], [0.0] * 4, gamma=0.5, lam=1.0, mask=[False, True, False, True])
    assert ours.tolist() == [0, 2.5, 0, 1]
    assert gae([1.0, 2.0], [0.0, 0.0], gamma=1, lam=1, mask=[False, False]).tolist() == [0, 0]
    with pytest.raises(ValueError, match="of one length"):
        gae([1.0, 2.0], [0.0, 0.0], gamma=1, lam=1, mask=[True])


def test_a_sequence_that_was_cut_off_goes_on_with_the_value_of_what_would_have_come() -> None:
    # One step: r + gamma * V(next) - V.
    assert gae([1.0], [0.5], gamma=0.9, lam=0.95, bootstrap=2.0)[0] == pytest.approx(1 + 0.9 * 2 - 0.5)
    # A whole of three steps cut after two, with the third as bootstrap, for lambda = 0.
    whole = gae([0.0, 1.0, 2.0], [0.1, 0.2, 0.3], gamma=0.9, lam=0.0)
    cut = gae([0.0, 1.0], [0.1, 0.2], gamma=0.9, lam=0.0, bootstrap=0.3)
    np.testing.assert_allclose(cut, whole[:2])


def test_a_turn_is_one_action_whatever_its_length() -> None:
    mask = [False, True, True, False, True, False, True]
    assert utterances(mask).tolist() == [-1, 0, 0, -1, 1, -1, 2]
    ours = utterance_td([0.0, 0.0, 1.0], [0.5, 0.25, 0.75], gamma=0.5)
    assert ours.targets.tolist() == [0.125, 0.375, 1.0]
    assert ours.advantages.tolist() == [-0.375, 0.125, 0.25]
    assert on_tokens(ours.advantages, mask).tolist() == [0, -0.375, -0.375, 0, 0.125, 0, 0.25]
    with pytest.raises(ValueError, match="2 values for 3 turns"):
        on_tokens([1.0, 2.0], mask)
    assert utterance_td([0.0], [1.0], gamma=0.5, bootstrap=4.0).targets.tolist() == [2.0]


def test_the_penalty_for_length_goes_on_falling_in_areal_and_is_held_in_dapo() -> None:
    c = oracle("overlong_areal")
    lengths, rewards = c.vector("lengths"), np.array(c.vector("rewards"))
    penalties = {
        beyond: overlong_penalty(lengths, max_length=120, buffer=20, beyond=beyond)
        for beyond in get_args(Beyond)
    }
    np.testing.assert_allclose(c.number("base_reward") + penalties["continued"], rewards, atol=1e-12)
    np.testing.assert_allclose(penalties["held"], [0, 0, -0.05, -0.5, -1, -1], atol=1e-12)


def test_a_buffer_of_nothing_is_a_step() -> None:
    assert overlong_penalty([9, 10, 11], max_length=10, buffer=0, factor=0.5).tolist() == [0, 0, -0.5]
    with pytest.raises(ValueError, match="no line to continue"):
        overlong_penalty([9], max_length=10, buffer=0, beyond="continued")
    with pytest.raises(ValueError, match="between 0 and max_length"):
        overlong_penalty([9], max_length=10, buffer=11)


def test_groups_without_a_signal_are_those_of_slime() -> None:
    c = oracle("dynamic_sampling_slime")
    assert [not is_constant(g) for g in c.matrix("groups")] == c.outputs["keep"]


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("std", [False, True])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0])
def test_a_constant_group_has_exactly_no_advantage(baseline: Baseline, std: bool, reward: float) -> None:
    assert (group_advantage([reward] * 7, baseline=baseline, std=std) == 0).all()


def test_a_lone_success_isnt_divided_by_the_zero_deviation_of_the_others() -> None:
    ours = group_advantage([1.0, 0.0, 0.0, 0.0], baseline="leave_one_out", std=True)
    np.testing.assert_allclose(ours, [1, -0.57735, -0.57735, -0.57735], atol=1e-5)


def test_without_a_baseline_the_reward_is_the_advantage() -> None:
    assert group_advantage([2.5], baseline="none").tolist() == [2.5]


@pytest.mark.parametrize(
    ("rewards", "baseline", "std"),
    [
        ([1.0], "mean", False),
        ([1.0], "leave_one_out", False),
        ([1.0], "none", True),
        ([1.0, 0.0], "leave_one_out", True),
        ([], "none", False),
    ],
)
def test_a_group_too_small_for_its_advantage_is_refused(
    rewards: list[float], baseline: Baseline, std: bool
) -> None:
    with pytest.raises(ValueError, match="rewards are needed"):
        group_advantage(rewards, baseline=baseline, std=std)


def test_the_statistics_of_a_group_are_over_all_its_rewards() -> None:
    # PipelineRL f90d0ef took them from the first rollout alone; the mean of 0 and 1 is 0.5.
    assert group_advantage([0, 1], baseline="mean").tolist() == [-0.5, 0.5]


def test_a_reward_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantage([1.0, float("nan")], baseline="mean")


@given(st.lists(st.floats(-10, 10), min_size=3, max_size=16), st.floats(-5, 5))
def test_advantages_sum_to_zero_and_ignore_a_shift_of_the_rewards(rewards: list[float], shift: float) -> None:
    ours = group_advantage(rewards, baseline="mean")
    assert abs(ours.sum()) < 1e-9
    np.testing.assert_allclose(group_advantage(np.array(rewards) + shift, baseline="mean"), ours, atol=1e-9)
    n = len(rewards)
    others = group_advantage(rewards, baseline="leave_one_out")
    np.testing.assert_allclose(others, ours * n / (n - 1), atol=1e-9)


def test_lengths_are_needed_and_checked_where_they_weigh() -> None:
    with pytest.raises(ValueError, match="needs the lengths"):
        group_advantage([1, 0], baseline="length_weighted")
    with pytest.raises(ValueError, match="2 positive numbers"):
        group_advantage([1, 0], baseline="length_weighted", lengths=[3, 0])


@pytest.mark.parametrize("eps", [0.01, 0.1, 0.9])
def test_the_best_samples_are_weighed_at_the_temperature_that_v_mpo_would_learn(eps: float) -> None:
    values = oracle("vmpo_rlax").vector("advantages")
    ours = best_weights(values, eps=eps)
    # The temperature is read off our weights: log-weights fall as A / t.
    advantages = torch.tensor(values, dtype=torch.float64)
    warmth = (values[2] - values[0]) / np.log(ours[2] / ours[0])
    temperature = torch.tensor(warmth, dtype=torch.float64, requires_grad=True)
    loss = vmpo_loss(
        torch.zeros(6, dtype=torch.float64), advantages, torch.zeros(6, dtype=torch.float64),
        temperature=temperature, multiplier=torch.ones(()), eps_temperature=eps, eps_kl=0.0,
    )  # fmt: skip
    np.testing.assert_allclose(ours, loss.weights_N, atol=1e-9)
    (slope,) = torch.autograd.grad(loss.temperature, temperature)
    assert abs(slope.item()) < 1e-9


def test_equal_advantages_have_equal_weights_and_a_large_distance_takes_the_best_alone() -> None:
    assert best_weights([3.0, 3.0, 3.0, 3.0], eps=0.1).tolist() == [0.5, 0.5, 0, 0]
    assert best_weights([1.0, 5.0, 2.0, 3.0], eps=9.0).tolist() == [0, 1, 0, 0]
    assert best_weights([-1.0], eps=0.1).tolist() == [1]
    with pytest.raises(ValueError, match="advantages must be finite"):
        best_weights([1.0, float("nan")], eps=0.1)
