"""Which inputs an output was made from, and the names that follow from it."""

from __future__ import annotations

import pytest

from arriero.engine.runtime.provenance import child_id, origins_of, parents_of
from arriero.schemas.messages import Batch, Prompt, Record, RolloutGroup, Weights
from tests.toys import rollout


def group(prompt: Prompt) -> RolloutGroup:
    return RolloutGroup(prompt=prompt, rollouts=(rollout(0),))


def test_an_output_comes_from_the_input_it_embeds() -> None:
    prompt = Prompt(id="p1", text="?")
    assert parents_of(group(prompt), {"p0", "p1"}, "generator") == ("p1",)


def test_an_output_comes_from_the_inputs_it_names() -> None:
    assert parents_of(Batch(parents=("a", "c"), samples=()), {"a", "b", "c"}, "collect") == ("a", "c")


def test_an_output_that_says_nothing_comes_from_the_only_input_held() -> None:
    assert parents_of(Weights(version=1), {"batch"}, "trainer") == ("batch",)
    assert parents_of(Weights(version=0), (), "trainer") == ()


def test_a_doubt_is_an_error_with_its_remedy() -> None:
    with pytest.raises(
        ValueError, match="names no parent while it holds 2 inputs; embed the input record in it"
    ):
        parents_of(Weights(version=1), {"a", "b"}, "trainer")
    with pytest.raises(ValueError, match="collect gave a Batch that names 'x' as parent, which it hasn't"):
        parents_of(Batch(parents=("x",), samples=()), {"a"}, "collect")


def test_names_are_the_same_in_every_run_and_differ_between_siblings() -> None:
    assert child_id("generator", ("p1",), 0) == "p1>generator"
    assert child_id("generator", ("p1",), 2) == "p1>generator#2"
    assert child_id("collect", ("a", "b"), 0) == child_id("collect", ("a", "b"), 0)
    names = {
        child_id("collect", parents, k) for parents in (("a", "b"), ("b", "a"), ("ab", "")) for k in (0, 1)
    }
    assert len(names) == 6


def test_origins_are_those_of_all_parents_once_and_in_order() -> None:
    records = [Record(origins=(4, 2)), Record(origins=(3,)), Record(origins=(2,))]
    assert origins_of(records) == (2, 3, 4)


def test_an_input_that_is_given_on_is_its_own_parent() -> None:
    # A filter or shaping step returns what it got, perhaps changed: its parents are those of the input.
    given = Prompt(id="a>reward", text="", parents=("a",))
    assert parents_of(given, {"a>reward"}, "shape") == ("a>reward",)


def test_a_join_that_gives_an_input_on_names_both_of_its_parents() -> None:
    given = Prompt(id="a>left", text="", parents=("a>left", "a>right"))
    assert parents_of(given, {"a>left", "a>right"}, "join") == ("a>left", "a>right")
