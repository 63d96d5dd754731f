"""What the policy made of each prompt: known from the version on that shows it, the same in every run."""

from __future__ import annotations

from arriero.engine.runtime.results import Results
from arriero.schemas.ledger import Admitted, DroppedEvent, Trained


def admitted(origin: int) -> Admitted:
    return Admitted(id=f"p{origin}", origin=origin, split="train", epoch=0, row=origin, min_version=0)


def trained(version: int, origins: tuple[int, ...], *shares: float, node: str = "trainer") -> Trained:
    return Trained(
        node=node, version=version, batch="b", origins=origins, tokens=1, staleness_max=0, staleness_mean=0.0,
        reward_mean=0.0, right_shares=shares,
    )  # fmt: skip


def test_a_result_is_known_from_its_version_on() -> None:
    found = Results(("trainer",))
    for k in range(4):
        found.apply(admitted(k))
    found.apply(trained(1, (0, 2), 0.5, 1.0))
    assert found.share("p0", 0) is None
    assert found.share("p0", 1) == 0.5
    assert found.share("p2", 7) == 1.0
    assert found.share("p1", 7) is None
    found.apply(trained(2, (1,), 0.25, node="critic"))  # not the loop's producer
    assert found.share("p1", 7) is None


def test_a_group_dropped_for_its_results_counts_when_a_later_prompt_is_trained() -> None:
    found = Results(("trainer",))
    for k in range(4):
        found.apply(admitted(k))
    drop = DroppedEvent(node="advantage", parent="g", origins=(1,), reason="filtered", right_share=1.0)
    found.apply(drop)
    found.apply(DroppedEvent(node="generator", parent="h", origins=(2,), reason="too_long"))
    found.apply(trained(1, (0,), 0.5))
    assert found.share("p1", 1) is None
    found.apply(trained(2, (3,), 0.5))
    assert found.share("p1", 1) is None
    assert found.share("p1", 2) == 1.0
    assert found.share("p2", 9) is None
