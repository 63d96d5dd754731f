"""The ledger: every prompt has one fate, and the account balances."""

from __future__ import annotations

import json

import pytest

from arriero.engine.runtime import Ledger, LedgerError
from arriero.engine.runtime.journal import event_id
from arriero.engine.runtime.ledger import effective
from arriero.schemas.ledger import EVENT, Admitted, DroppedEvent, Evaluated, Event, Resumed, Trained
from arriero.schemas.messages import DropReason, Split


def admitted(origin: int, *, split: Split = "train") -> Admitted:
    return Admitted(id=f"p{origin}", origin=origin, split=split, epoch=0, row=0, min_version=0)


def dropped(*origins: int, reason: DropReason = "stale") -> DroppedEvent:
    return DroppedEvent(node="reward", parent=f"p{origins[0]}>generator", origins=origins, reason=reason)


def trained(version: int, *origins: int, node: str = "trainer", staleness: int = 0) -> Trained:
    return Trained(
        node=node,
        version=version,
        batch=f"batch{version}",
        origins=origins,
        tokens=1,
        staleness_max=staleness,
        staleness_mean=staleness,
        reward_mean=0,
    )


def after(*events: Event) -> Ledger:
    ledger = Ledger()
    for event in events:
        ledger.apply(event)
    return ledger


def test_admitted_is_trained_and_dropped_and_in_flight() -> None:
    ledger = after(*(admitted(k) for k in range(6)), trained(1, 0, 2, staleness=1), dropped(1), dropped(4))
    assert (ledger.admitted, ledger.trained, ledger.dropped["stale"], ledger.in_flight) == (6, 2, 2, 2)
    assert ledger.in_flight_origins == [3, 5]
    assert (ledger.version("trainer"), ledger.trained_by("trainer"), ledger.staleness_max) == (1, 2, 1)


def test_admissions_may_become_durable_out_of_order() -> None:
    ledger = after(admitted(2), admitted(0))
    assert (ledger.admitted, ledger.in_flight_origins) == (2, [0, 2])
    with pytest.raises(LedgerError, match="prompt number 1 is dropped by reward, but was never admitted"):
        ledger.apply(dropped(1))


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ([admitted(0), admitted(0)], "prompt p0 is admitted as number 0, which was admitted before"),
        (
            [admitted(0), trained(1, 0), trained(2, 0)],
            "number 0 is trained in version 2, but was trained before",
        ),
        (
            [admitted(0), dropped(0), trained(1, 0)],
            "number 0 is trained in version 1, but was dropped before",
        ),
        ([admitted(0), trained(1, 0), dropped(0)], "number 0 is dropped by reward, but was trained before"),
        ([admitted(0), dropped(0), dropped(0)], "number 0 is dropped by reward, but was dropped before"),
        ([trained(1, 5)], "number 5 is trained in version 1, but was never admitted"),
    ],
)
def test_a_contradiction_is_named(events: list[Event], told: str) -> None:
    with pytest.raises(LedgerError, match=told):
        after(*events)


def test_two_trainers_of_one_graph_may_each_train_a_prompt_once() -> None:
    ledger = after(admitted(0), trained(1, 0), trained(1, 0, node="critic"))
    assert (ledger.trained, ledger.trained_by("critic"), ledger.in_flight) == (1, 1, 0)


def test_held_out_prompts_take_no_place() -> None:
    ledger = after(admitted(-1, split="eval"), admitted(-2, split="eval"), admitted(-3, split="eval"))
    assert (ledger.admitted, ledger.held_out_sent, ledger.evaluating) == (0, 3, True)
    back = Evaluated(id="p-1", origin=-1, version=0, values=(1.0,), outcomes=())
    for event in (back, dropped(-2, reason="too_long"), dropped(-3, reason="dead_letter")):
        ledger.apply(event)
    assert (ledger.held_out_back, ledger.evaluating, ledger.dropped.total()) == (3, False, 0)


def test_a_version_written_late_takes_nothing_back() -> None:
    assert after(admitted(0), admitted(1), trained(2, 0), trained(1, 1)).version("trainer") == 2


def test_an_event_written_again_after_a_restart_has_the_same_name() -> None:
    names = [event_id(e) for e in (admitted(3), dropped(3), trained(7, 3, staleness=1))]
    assert names == ["admitted:p3", "dropped:p3>generator", "trained:trainer:7"]
    assert event_id(trained(7, 3, staleness=0)) == names[2]


def test_a_metric_that_overflowed_is_read_back_from_the_ledger_as_it_was() -> None:
    event = trained(1, 0).model_copy(update={"metrics": {"ratio": float("inf"), "kl": float("nan")}})
    for written in (EVENT.dump_json(event), event.model_dump_json()):
        found = json.loads(written, parse_constant=pytest.fail)["metrics"]
        assert found == {"ratio": "Infinity", "kl": "NaN"}
    back = EVENT.validate_json(EVENT.dump_json(event))
    assert isinstance(back, Trained)
    assert back.metrics["ratio"] == float("inf")
    assert back.metrics["kl"] != back.metrics["kl"]


def test_several_trainers_train_a_prompt_once_each() -> None:
    ledger = after(admitted(0), admitted(1), trained(1, 0), trained(1, 0, 1, node="critic"))
    assert (ledger.trained, ledger.trained_by("trainer"), ledger.trained_by("critic")) == (2, 1, 2)
    with pytest.raises(LedgerError, match="prompt number 0 is trained in version 2, but was trained before"):
        ledger.apply(trained(2, 0, node="critic"))


def _let_in(origin: int, *, split: Split = "train", version: int = 0) -> Admitted:
    return Admitted(
        id=f"p{origin}", origin=origin, split=split, epoch=0, row=abs(origin), min_version=version
    )


def _let_go(parent: str, *origins: int) -> DroppedEvent:
    return DroppedEvent(node="run", parent=parent, origins=origins, reason="end_of_run")


def test_prompts_that_other_data_have_replaced_stay_dropped_in_every_later_life() -> None:
    events: list[Event] = [
        _let_in(0), _let_go("run-a", 0), Resumed(number=1, versions={"t": 0}, anew=True),
        _let_in(1), _let_go("run-a-1", 1), Resumed(number=2, versions={"t": 0}),
    ]  # fmt: skip
    assert effective(events) == [_let_in(0), _let_go("run-a", 0), _let_in(1)]


def test_held_out_prompts_of_versions_that_are_undone_were_never_dropped() -> None:
    """At version 2 prompt -1 was sent and, with training prompt 0, let go of; the run goes on from 1."""
    events: list[Event] = [
        _let_in(0), _let_in(-1, split="eval", version=2), _let_go("run-a", 0, -1),
        Resumed(number=1, versions={"t": 1}, anew=True),
    ]  # fmt: skip
    assert effective(events) == [_let_in(0), _let_go("run-a", 0)]
