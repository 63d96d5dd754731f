"""LlamaRL's theorem on random instances, and how it fails when an assumption is dropped."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from arriero.engine.planner.cycles import Arc, maximum_cycle_mean
from arriero.engine.planner.problem import Problem, Stage, asynchronous, strict, synchronous

BASE = Problem(
    devices=64, memory=72.0, sequences=2048,
    train=Stage(static=128.0, each=2.0, fixed=1.0, marginal=0.1, widths=(4,)),
    generate=Stage(static=16.0, each=1.0, fixed=2.0, marginal=0.05, widths=(1,)),
)  # fmt: skip


@st.composite
def stages(draw: st.DrawFn, *, fixed: st.SearchStrategy[float]) -> Stage:
    return Stage(
        static=draw(st.floats(1, 40)), each=draw(st.floats(0.2, 4)), fixed=draw(fixed),
        marginal=draw(st.floats(0.01, 2)), spread=draw(st.floats(0, 0.3)),
        widths=draw(st.sampled_from([(1,), (1, 2), (2, 4), (1, 2, 4, 8)])),
        largest=draw(st.sampled_from([4, 64, 1 << 20])),
    )  # fmt: skip


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    rising = st.floats(0.05, 5)
    return Problem(
        devices=draw(st.sampled_from([8, 64, 1024])), memory=draw(st.floats(10, 80)), sequences=2048,
        train=draw(stages(fixed=rising)), generate=draw(stages(fixed=rising)),
    )  # fmt: skip


@settings(max_examples=150)
@given(p=problems())
def test_asynchronous_optimum_is_strictly_below_the_synchronous_one_where_the_theorem_says_so(
    p: Problem,
) -> None:
    sync, late = synchronous(p), asynchronous(p)
    assume(sync is not None)
    assert sync is not None
    assert late is not None  # what fits together fits apart
    assert late.seconds <= sync.seconds * (1 + 1e-12)
    if strict(p, sync):
        assert late.seconds < sync.seconds


@settings(max_examples=60)
@given(p=problems())
def test_optima_keep_their_constraints_and_balance_the_stages(p: Problem) -> None:
    for found, shared in ((synchronous(p), True), (asynchronous(p), False)):
        if found is None:
            continue
        train = p.train.bytes(found.train_batch, found.train_width)
        generate = p.generate.bytes(found.generate_batch, found.generate_width)
        assert (train + generate if shared else max(train, generate)) <= p.memory * (1 + 1e-12)
        if not shared:
            of_train = p.train.cost(found.train_batch, found.train_width) / found.train_devices
            of_generate = p.generate.cost(found.generate_batch, found.generate_width) / found.generate_devices
            assert of_train == pytest.approx(of_generate)


def test_both_solvers_find_what_trying_everything_finds() -> None:
    p = replace(BASE, devices=8, memory=60.0, whole=True)
    p = replace(
        p,
        train=replace(p.train, widths=(2, 4), spread=0.1),
        generate=replace(p.generate, widths=(1, 2), spread=0.2),
    )
    batches = range(1, 130)
    sync, late = float("inf"), float("inf")
    for m_t, m_g, b_t, b_g in itertools.product((2, 4), (1, 2), batches, batches):
        train, generate = p.train.bytes(b_t, m_t), p.generate.bytes(b_g, m_g)
        costs = p.train.cost(b_t, m_t), p.generate.cost(b_g, m_g)
        if train + generate <= p.memory:
            sync = min(sync, p.sequences * sum(costs) / 8)
        if max(train, generate) <= p.memory:
            for g_t in range(m_t, 8, m_t):
                if g_g := (8 - g_t) // m_g * m_g:
                    late = min(late, p.sequences * max(costs[0] / g_t, costs[1] / g_g))
    found_sync, found_late = synchronous(p), asynchronous(p)
    assert found_sync is not None
    assert found_late is not None
    assert found_sync.seconds == pytest.approx(sync)
    assert found_late.seconds == pytest.approx(late)


def seconds(p: Problem) -> tuple[float, float]:
    """Synchronous and asynchronous."""
    sync, late = synchronous(p), asynchronous(p)
    assert sync is not None
    assert late is not None
    return sync.seconds, late.seconds


def test_without_rising_efficiency_the_two_are_equal() -> None:
    flat = replace(BASE, train=replace(BASE.train, fixed=0.0), generate=replace(BASE.generate, fixed=0.0))
    sync, late = seconds(flat)
    assert late == pytest.approx(sync)
    found = synchronous(flat)
    assert found is not None
    assert not strict(flat, found)


def test_with_memory_to_spare_the_two_are_equal() -> None:
    small = replace(
        BASE, memory=1e6, train=replace(BASE.train, largest=32), generate=replace(BASE.generate, largest=64)
    )
    sync, late = seconds(small)
    assert late == pytest.approx(sync)


def test_a_bubble_can_make_asynchrony_slower() -> None:
    sync, late = seconds(BASE)
    gain = sync / late - 1
    assert gain > 0
    assert seconds(replace(BASE, bubble=gain * 1.5))[1] > sync


def test_an_exposed_weight_sync_can_make_asynchrony_slower() -> None:
    sync, late = seconds(BASE)
    assert seconds(replace(BASE, sync_s=(sync - late) * 1.5))[1] > sync


def test_more_steps_to_the_same_reward_can_make_asynchrony_slower() -> None:
    sync, late = seconds(BASE)
    assert seconds(replace(BASE, staleness_cost=(sync / late - 1) * 1.5))[1] > sync


def test_devices_that_do_not_divide_can_make_asynchrony_slower() -> None:
    """Two devices, training fifty times the work of generation: half of the devices idle."""
    p = replace(
        BASE, devices=2, memory=64.0, whole=True,
        train=Stage(static=8, each=1, fixed=0.1, marginal=5.0, widths=(1,)),
        generate=Stage(static=8, each=1, fixed=0.1, marginal=0.1, widths=(1,)),
    )  # fmt: skip
    sync, late = seconds(p)
    assert late > 1.5 * sync


@st.composite
def graphs(draw: st.DrawFn) -> list[Arc]:
    names = [f"v{i}" for i in range(draw(st.integers(1, 5)))]
    found: list[Arc] = []
    for _ in range(draw(st.integers(1, 12))):
        a, b = draw(st.integers(0, len(names) - 1)), draw(st.integers(0, len(names) - 1))
        # An arc that doesn't go forward carries a token: no cycle is without.
        tokens = draw(st.integers(0, 3)) if a < b else draw(st.integers(1, 3))
        found.append(Arc(names[a], names[b], draw(st.floats(0, 10)), tokens))
    return found


def every_cycle(graph: list[Arc]) -> list[list[Arc]]:
    """All simple cycles, by brute force."""
    found: list[list[Arc]] = []

    def extend(path: list[Arc]) -> None:
        for arc in graph:
            if arc.source != path[-1].target:
                continue
            if arc.target == path[0].source:
                found.append([*path, arc])
            elif all(arc.target != a.source for a in path) and arc.target != path[-1].target:
                extend([*path, arc])

    for arc in graph:
        if arc.source == arc.target:
            found.append([arc])
        else:
            extend([arc])
    return found


@settings(max_examples=150)
@given(graph=graphs())
def test_maximum_cycle_mean_is_the_largest_over_all_cycles(graph: list[Arc]) -> None:
    means = [sum(a.seconds for a in c) / sum(a.tokens for a in c) for c in every_cycle(graph)]
    if not means:
        with pytest.raises(ValueError, match="no cycle"):
            maximum_cycle_mean(graph)
        return
    assert maximum_cycle_mean(graph).seconds == pytest.approx(max(means), abs=1e-9)
