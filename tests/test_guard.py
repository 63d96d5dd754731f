"""The trainer's guard by hand-computed numbers, and which nodes have one."""

from __future__ import annotations

import numpy as np
import pytest

from arriero.engine.runtime.guard import (
    Ahead,
    guarded,
    held_out,
    sampled_otherwise,
    stale_groups,
    trained,
)
from arriero.schemas.messages import (
    Batch,
    Outcome,
    Prompt,
    RolloutGroup,
    Sample,
    Score,
    ScoredGroup,
    Split,
    Weights,
)
from tests.runtime_runs import graph
from tests.test_ledger import dropped
from tests.test_ledger import trained as trained_event
from tests.toys import rollout, samples


def scored(origin: int, *versions: int, split: Split = "train", min_version: int = 0) -> ScoredGroup:
    """A group with one rollout per version."""
    prompt = Prompt(id=f"p{origin}", text="?", split=split, origins=(origin,), min_version=min_version)
    group = RolloutGroup(prompt=prompt, rollouts=tuple(rollout(v) for v in versions), origins=(origin,))
    score = Score(value=0.5, outcome=Outcome.OK)
    return ScoredGroup(id=f"g{origin}", group=group, scores=(score,) * len(versions), origins=(origin,))


def batch(*groups: ScoredGroup) -> Batch:
    rows = tuple(s for g in groups for s in samples(g))
    return Batch(id="b", samples=rows, origins=tuple(g.origins[0] for g in groups))


@pytest.mark.parametrize(
    ("bound", "version", "stale"), [(0, 7, False), (0, 8, True), (1, 8, False), (1, 9, True), (3, 10, False)]
)
def test_a_group_is_stale_when_its_oldest_token_is_older_than_the_bound(
    bound: int, version: int, stale: bool
) -> None:
    assert bool(stale_groups(scored(0, 9, 7), version, bound)) == stale


def test_one_old_rollout_condemns_its_group_but_not_the_others_of_a_batch() -> None:
    found = stale_groups(batch(scored(3, 5, 2), scored(4, 5, 5)), 5, 1)
    assert [(s.group, s.origins) for s in found] == [("g3", (3,))]
    assert found[0].detail == "sampled by version 2, version 5 is about to be replaced"


def test_supervised_samples_are_never_stale() -> None:
    sample = Sample(
        group="g",
        tokens=np.zeros(2, np.int32),
        mask=np.ones(2, np.bool_),
        advantages=np.ones(2, np.float32),
    )
    assert stale_groups(Batch(samples=(sample,)), 99, 0) == []


def test_the_ledger_measures_staleness_over_every_sampled_token() -> None:
    """Version 6 replaces version 5: tokens of versions 4 (three), 5 (three) and 5 (three) are 1, 0, 0 old."""
    event = trained(
        "trainer", Weights(version=6, metrics={"loss": 1.0}), batch(scored(0, 4, 5), scored(1, 5))
    )
    assert (event.version, event.staleness_max, event.origins, event.tokens) == (6, 1, (0, 1), 9)
    assert event.staleness_mean == pytest.approx(1 / 3)
    assert event.reward_mean == 0.5


def test_a_held_out_group_is_an_evaluation_for_the_version_it_was_sent_for() -> None:
    assert held_out(scored(1, 0)) is None
    event = held_out(scored(-2, 4, split="eval", min_version=4))
    assert event is not None
    assert (event.id, event.origin, event.version, event.values) == ("p-2", -2, 4, (0.5,))


def test_a_held_out_group_that_other_versions_sampled_too_says_nothing_of_the_one_it_was_sent_for() -> None:
    assert sampled_otherwise(scored(-2, 4, 4, split="eval", min_version=4)) == ""
    mixed = scored(-2, 4, 6, split="eval", min_version=4)
    assert sampled_otherwise(mixed) == "sampled by versions 4, 6, to be evaluated was 4"
    newer = scored(-2, 5, split="eval", min_version=4)
    assert sampled_otherwise(newer) == "sampled by versions 5, to be evaluated was 4"


def test_the_nodes_that_fire_once_per_version_are_guarded() -> None:
    spec = graph(staleness=3)
    found = {n.name: w.staleness if (w := guarded(spec, n.name)) else None for n in spec.nodes}
    assert found == {"prompts": None, "generator": None, "reward": None, "collect": 3, "trainer": 3}


def test_a_batch_under_way_replaces_one_version_further_on() -> None:
    ahead = Ahead("trainer")
    assert ahead.version == 0
    ahead.gave(Batch(id="batch1", samples=()))
    ahead.gave(Batch(id="batch2", samples=()))
    assert ahead.version == 2
    ahead.apply(trained_event(1, 0))
    assert ahead.version == 2
    ahead.apply(trained_event(2, 1, node="critic"))
    assert ahead.version == 2


def test_a_batch_that_never_arrives_replaces_nothing() -> None:
    ahead = Ahead("trainer")
    for name in ("p0>collect", "p1>collect", "p11>collect"):
        ahead.gave(Batch(id=name, samples=()))
    ahead.apply(dropped(7).model_copy(update={"parent": "p0>collect"}))
    assert ahead.version == 2
    ahead.apply(trained_event(1, 1).model_copy(update={"batch": "p1>collect>reference"}))
    assert ahead.version == 2  # one made, one under way
    ahead.apply(trained_event(2, 2).model_copy(update={"batch": "p11>collect"}))
    assert ahead.version == 2


def test_what_was_made_of_a_batch_and_something_else_is_known_by_its_prompts() -> None:
    ahead = Ahead("trainer")
    for name, origins in (("batch-a", (0, 1)), ("batch-b", (2, 3))):
        ahead.gave(Batch(id=name, origins=origins, samples=()))
    ahead.apply(trained_event(1, 0, 1).model_copy(update={"batch": "critic-c"}))
    assert ahead.version == 2  # one made, one under way
    ahead.apply(dropped(2, 3).model_copy(update={"parent": "critic-d"}))
    assert ahead.version == 1


def test_a_batch_component_that_starts_again_counts_from_the_ledger() -> None:
    ahead = Ahead("trainer")
    ahead.apply(trained_event(50, 0))
    ahead.gave(Batch(id="batch", samples=()))
    assert ahead.version == 51


def test_a_batch_whose_groups_were_all_dropped_replaces_nothing() -> None:
    ahead = Ahead("trainer")
    groups = [scored(k, 0).model_copy(update={"id": f"g{k}"}) for k in range(2)]
    ahead.gave(Batch(id="batch", origins=(0, 1), samples=tuple(s for g in groups for s in samples(g))))
    ahead.apply(dropped(0).model_copy(update={"parent": "g0"}))
    assert ahead.version == 1
    ahead.apply(dropped(1).model_copy(update={"parent": "g1"}))
    assert ahead.version == 0


def test_a_held_out_group_replaces_nothing() -> None:
    ahead = Ahead("trainer")
    ahead.gave(scored(-1, 0, split="eval"))
    assert ahead.version == 0
