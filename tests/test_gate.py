"""Admission by hand-computed numbers: S is the staleness bound, G the groups of one version."""

from __future__ import annotations

import pytest

from arriero.engine.rates import Window
from arriero.engine.runtime.gate import Gate
from tests.test_ledger import admitted, dropped, trained


def window(staleness: int, groups: int, producer: str = "trainer") -> Window:
    return Window(
        loop="weights", producer=producer, sources=("prompts",), per_version=groups, staleness=staleness
    )


def gate_after(versions: int, *, staleness: int, groups: int, steps: int | None = None) -> Gate:
    """A gate whose ledger says that `versions` whole batches were admitted and trained."""
    gate = Gate((window(staleness, groups),), steps)
    for k in range(versions * groups):
        gate.apply(admitted(k))
    for v in range(versions):
        gate.apply(trained(v + 1, *range(v * groups, (v + 1) * groups)))
    return gate


@pytest.mark.parametrize("version", [0, 5, 10, 50])
@pytest.mark.parametrize("running", [0, 1, 30, 48])
def test_capacity_after_a_restart_is_48_less_what_runs(version: int, running: int) -> None:
    """AReaL #1345: staleness 2, batch 16; recovery made it (2 + version + 1) * 16."""
    gate = gate_after(version, staleness=2, groups=16)
    k = version * 16
    for _ in range(running):
        gate.apply(admitted(k))
        k += 1
    limit = gate.limit()
    assert limit is not None
    assert limit - k == 48 - running
    assert gate.open_for(k) == (running < 48)


def test_a_trainer_that_starts_at_version_50_with_an_empty_ledger_doesnt_open_the_gate_wider() -> None:
    gate = gate_after(0, staleness=2, groups=16)
    assert gate.limit() == 48
    for k in range(48):
        gate.apply(admitted(k))
    gate.apply(trained(51, *range(16)))
    assert gate.limit() == 48 + 16
    assert gate.min_version(48) == 51 + 32 // 16 - 2


@pytest.mark.parametrize(("staleness", "window_"), [(0, 4), (1, 8), (3, 16)])
def test_s_plus_one_batches_are_in_flight_and_s_0_works(staleness: int, window_: int) -> None:
    """TRL #5656: max_staleness * k left nothing to do at 0."""
    gate = gate_after(0, staleness=staleness, groups=4)
    assert [k for k in range(100) if gate.open_for(k)] == list(range(window_))


def test_with_s_0_batch_n_is_sampled_by_version_n_alone() -> None:
    """prime-rl #1901: off by one."""
    for version in range(4):
        gate = gate_after(version, staleness=0, groups=3)
        first = 3 * version
        assert [gate.min_version(k) for k in range(first, first + 3)] == [version] * 3
        assert not gate.open_for(first + 3)


def test_one_update_moves_the_window_by_one_batch_exactly() -> None:
    """prime-rl #1764: the lag grew by two."""
    gates = [gate_after(v, staleness=1, groups=4) for v in range(4)]
    assert [gate.limit() for gate in gates] == [8, 12, 16, 20]
    assert [gate.min_version(4 * v + 7) for v, gate in enumerate(gates)] == [0, 1, 2, 3]


def test_a_dropped_prompt_gives_its_place_back_once() -> None:
    gate = gate_after(0, staleness=1, groups=4)
    for k in range(8):
        gate.apply(admitted(k))
    gate.apply(dropped(5))
    assert gate.limit() == 9
    assert gate.min_version(8) == 0  # eighth alive: belongs to the second batch
    gate.apply(admitted(8))
    gate.apply(trained(1, 0, 1, 2, 3))
    assert gate.limit() == 13
    assert gate.min_version(9) == 1


def test_a_short_batch_doesnt_let_more_than_two_batches_fly() -> None:
    """Two of four groups were dropped at the trainer: versions 1 is made of two, six stay in flight."""
    gate = gate_after(0, staleness=1, groups=4)
    for k in range(8):
        gate.apply(admitted(k))
    gate.apply(dropped(0, 1))
    gate.apply(trained(1, 2, 3))
    in_flight = 8 - 2 - 2
    assert gate.limit() == 8 + (8 - in_flight)


def test_a_held_out_prompt_takes_no_place() -> None:
    gate = gate_after(0, staleness=0, groups=2)
    gate.apply(admitted(-1, split="eval"))
    assert (gate.limit(), gate.held_out_back) == (2, 0)


def test_no_more_is_admitted_than_the_steps_can_train() -> None:
    gate = gate_after(0, staleness=3, groups=4, steps=2)
    assert gate.limit() == 8
    for k in range(8):
        gate.apply(admitted(k))
    gate.apply(dropped(7))
    assert gate.limit() == 9
    gate.apply(trained(1, 0, 1, 2, 3))
    assert not gate.finished
    gate.apply(trained(2, 4, 5, 6))
    assert gate.finished


def test_the_slowest_of_two_loops_decides() -> None:
    gate = Gate((window(1, 4), window(0, 4, "critic")), None)
    assert gate.limit() == 4
    for k in range(4):
        gate.apply(admitted(k))
    gate.apply(trained(1, 0, 1, 2, 3))
    assert (gate.limit(), gate.version) == (4, 0)
    gate.apply(trained(1, 0, 1, 2, 3, node="critic"))
    assert (gate.limit(), gate.version) == (8, 1)
    assert gate.min_version(4) == 1


def test_without_a_loop_the_gate_is_open() -> None:
    gate = Gate((), 3)
    assert gate.open_for(10**9)
    assert not gate.finished
    assert gate.min_version(7) == 0


def test_versions_that_an_ended_source_is_good_for() -> None:
    gate = gate_after(1, staleness=3, groups=4)
    for k in range(4, 14):
        gate.apply(admitted(k))
    assert gate.whole_versions(14) == 3
    gate.apply(dropped(4, 5, 6))
    assert gate.whole_versions(14) == 2


def test_the_wait_graph_says_why_a_record_is_held() -> None:
    gate = gate_after(2, staleness=0, groups=4)
    assert gate.state(12) == "admission of record 12 (limit 12; trainer at version 2)"
