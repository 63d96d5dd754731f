"""Advantages against other implementations and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arriero.components.advantages import Baseline, gae, group_advantage, whitened
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


@pytest.mark.parametrize("case", ["rfpp_baseline_verl_binary8", "rfpp_baseline_verl_mixed"])
def test_whitening_group_advantages_is_reinforce_plus_plus_baseline(case: str) -> None:
    c = oracle(case)
    centred = [group_advantage(rewards, baseline="mean") for rewards in c.groups().values()]
    tokens = np.repeat(np.concatenate(centred), int(c.number("tokens_per_response")))
    np.testing.assert_allclose(whitened(tokens)[::3], c.vector("adv"), atol=1e-6)


@pytest.mark.parametrize("case", ["gae_verl", "gae_orlhf"])
def test_gae_gives_the_numbers_of_other_implementations(case: str) -> None:
    c = oracle(case)
    expected = c.matrix("raw_advantages" if case == "gae_verl" else "advantages")
    masks, rewards, values = c.matrix("mask"), c.matrix("rewards"), c.matrix("values")
    for mask, reward, value, want in zip(masks, rewards, values, expected, strict=True):
        n = int(sum(mask))
        ours = gae(reward[:n], value[:n], gamma=c.number("gamma"), lam=c.number("lam"))
        np.testing.assert_allclose(ours, want[:n], atol=1e-9)


def test_gae_without_the_tokens_of_a_tool_skips_them_as_verl_does() -> None:
    c = oracle("gae_verl_obs_gap")
    ours = gae([0.0, 1.0], [0.5, 0.25], gamma=0.9, lam=0.8)
    np.testing.assert_allclose(ours, np.array(c.matrix("raw_advantages"))[0, [0, 3]], atol=1e-12)


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
