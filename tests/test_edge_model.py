"""The model of the edge protocol: what holds in every state, and which rule each property hangs on."""

from __future__ import annotations

import pytest

from tests.edge_model import Broken, Protocol, explore


@pytest.mark.parametrize("staleness", [0, 1])
def test_with_a_crash_at_any_moment_nothing_is_lost_trained_twice_too_old_or_stuck(staleness: int) -> None:
    found = explore(Protocol(staleness=staleness, prompts=2))
    assert found.states > 1000
    assert found.ends > 0
    assert found.stalest == staleness  # the bound is reached, and never passed


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("larger", [Protocol(prompts=2, crashes=2), Protocol(prompts=3)])
def test_the_same_with_two_crashes_and_with_three_prompts(larger: Protocol) -> None:
    assert explore(larger).stalest == 1


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (Protocol(prompts=2, acknowledges_first=True), "deadlock|no end can be reached"),
        (Protocol(prompts=2, forgets_ids=True), "trained twice|trained and dropped"),
        (Protocol(prompts=2, sends_again=False), "deadlock|no end can be reached"),
        (Protocol(gate=False, guard=False, crashes=0), "versions old is trained"),
    ],
)
def test_without_one_of_its_rules_the_search_finds_what_goes_wrong(broken: Protocol, told: str) -> None:
    with pytest.raises(Broken, match=told):
        explore(broken)
