"""Repetition vectors, admission windows and deadlocks, against values worked out by hand or in print."""

from __future__ import annotations

import time
from math import gcd

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arriero.engine.errors import GraphError
from arriero.engine.graph import Graph
from arriero.engine.rates import (
    Window,
    ancestors,
    capacities,
    records_per_firing,
    repetitions,
    run_symbolically,
    windows,
)
from arriero.schemas.graph import Capacity, GraphSpec
from arriero.schemas.messages import Weights
from tests.graphs import Follower, Join, Source, Stage, Versions, chain, fork, looped

RATES = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([(1, 1)], [1, 1]),
        ([(2, 3)], [3, 2]),  # Lee and Messerschmitt 1987, section III: the smallest integers with 2a = 3b
        ([(1, 32)], [32, 1]),
        ([(8, 1), (1, 128)], [16, 128, 1]),
        # From 44.1 kHz to 48 kHz in stages, Murthy, Bhattacharyya and Lee 1997 (the CD-DAT converter).
        ([(1, 1), (2, 3), (2, 7), (8, 7), (5, 1)], [147, 147, 98, 28, 32, 160]),
    ],
)
def test_the_repetition_vector_of_a_chain(rates: list[tuple[int, int]], expected: list[int]) -> None:
    assert list(repetitions(chain(*rates).spec()).values()) == expected


@given(RATES)
def test_the_repetition_vector_balances_every_edge_and_is_the_smallest(rates: list[tuple[int, int]]) -> None:
    counts = list(repetitions(chain(*rates).spec()).values())
    for (produced, consumed), before, after in zip(rates, counts, counts[1:], strict=False):
        assert before * produced == after * consumed
    assert all(any(c % prime for c in counts) for prime in (2, 3, 5, 7, 11))


def test_a_fork_that_rejoins_has_one_repetition_vector() -> None:
    # One iteration of `many` takes 6 prompts; the join takes 2 of each branch.
    assert repetitions(fork(batch=6, left=2, right=2).spec()) == {"source": 6, "one": 6, "many": 1, "join": 3}


def test_two_sources_that_are_joined_are_one_graph() -> None:
    g = Graph("two")
    left = g.add(Source(), name="left")()
    right = g.add(Source(produces=3), name="right")()
    g.add(Join(left=2), name="join")(left, right)
    assert repetitions(g.spec()) == {"left": 6, "right": 1, "join": 3}


def test_a_port_that_is_fed_at_another_rate_is_named() -> None:
    with pytest.raises(GraphError, match=r"^join\.second: many feeds it at 1/2 of the rate its node needs"):
        repetitions(fork(batch=4, left=1, right=2).spec())


def test_parts_without_connection_are_named() -> None:
    g = Graph("parts")
    g.add(Stage(), name="a")(g.add(Source(), name="first")())
    g.add(Stage(), name="b")(g.add(Source(), name="second")())
    with pytest.raises(GraphError, match=r"^second, b: not connected to first; use one graph for each part$"):
        repetitions(g.spec())


def test_who_is_upstream_and_how_much_of_it_goes_into_one_firing() -> None:
    spec = looped((1, 1), (32, 1)).spec()
    assert ancestors(spec, "s0") == {"source", "follower", "s0"}  # the loop brings no records
    assert records_per_firing(spec, "versions") == {"source": 32}
    assert records_per_firing(spec, "s0") == {"source": 1}


@pytest.mark.parametrize(
    ("staleness", "version", "dropped", "expected"),
    # (v + S + 1) * G with G = 32, and every dropped record gives its place back.
    [(0, 0, 0, 32), (1, 0, 0, 64), (3, 0, 0, 128), (0, 5, 0, 192), (1, 5, 3, 227)],
)
def test_the_admission_window(staleness: int, version: int, dropped: int, expected: int) -> None:
    (window,) = windows(looped((1, 1), (32, 1), staleness=staleness).spec())
    assert window == Window(
        loop="weights", producer="versions", sources=("source",), per_version=32, staleness=staleness
    )
    assert window.limit(version, dropped) == expected


def test_a_graph_without_loops_has_no_window() -> None:
    assert windows(chain((1, 4)).spec()) == ()


def test_a_version_must_take_whole_source_records() -> None:
    g = looped((1, 3), closes=2)  # two thirds of a prompt
    with pytest.raises(
        GraphError, match=r"loop weights: one version of versions takes 2/3 records of source"
    ):
        windows(g.spec())


def test_sources_behind_one_loop_must_give_equally_many() -> None:
    g = Graph("unequal")
    weights = g.loop(Weights, staleness=0)
    few, many = g.add(Source(), name="few")(), g.add(Source(), name="many")()
    both = g.add(Join(left=1, right=2), name="both")(few, many)
    weights.close(g.add(Versions(), name="versions")(g.add(Follower(), name="follower")(both, weights)))
    with pytest.raises(
        GraphError, match=r"takes 1 of few, 2 of many; sources behind one loop must give equally"
    ):
        windows(g.spec())


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_an_edge_holds_all_that_is_admitted(staleness: int) -> None:
    found = capacities(looped((1, 1), (32, 1), staleness=staleness).spec())
    # s0 gives its records one by one, s1 takes 32; 16 is the least that an edge holds by default.
    assert found["source"].messages == (staleness + 1) * 32
    assert found["s0"].messages == max(2 * 32, (staleness + 1) * 32)
    assert found["s1"].messages == 16


def test_a_stated_capacity_is_kept() -> None:
    g = chain((1, 4)).with_capacities({"source": Capacity(messages=5)})
    assert capacities(g.spec())["source"] == Capacity(messages=5)


def symbolically(graph: Graph, **messages: int) -> None:
    spec = graph.with_capacities({n: Capacity(messages=m) for n, m in messages.items()}).spec()
    run_symbolically(spec, capacities(spec))


def test_two_coprime_rates_need_their_sum_less_one() -> None:
    # The smallest buffer of an edge p -> c without deadlock is p + c - gcd(p, c) (Bhattacharyya et al. 1996).
    symbolically(chain((2, 3)), source=4)
    with pytest.raises(GraphError, match=r"deadlock: source waits for room on its output \(2 of 3 taken\)"):
        symbolically(chain((2, 3)), source=3)


@given(st.integers(2, 30), st.integers(1, 30))
def test_the_smallest_buffer_of_any_edge_is_found(produced: int, consumed: int) -> None:
    smallest = produced + consumed - gcd(produced, consumed)
    symbolically(chain((produced, consumed)), source=smallest)
    with pytest.raises(GraphError, match="deadlock"):
        symbolically(chain((produced, consumed)), source=smallest - 1)


def test_reconvergent_paths_starve_each_other_when_the_short_one_is_too_small() -> None:
    # `many` takes 32 prompts before it gives the first; until then `one` must hold 32.
    symbolically(fork(batch=32), one=16, source=16 + 32)
    with pytest.raises(GraphError) as caught:
        symbolically(fork(batch=32), one=16, source=31)
    assert str(caught.value) == (
        "deadlock: source waits for room on its output (31 of 31 taken); "
        "one waits for room on its output (16 of 16 taken); many waits for source (31 of 32 records); "
        "join waits for many (0 of 1 records); raise a capacity or lower what a firing takes"
    )


@given(RATES)
def test_default_capacities_never_deadlock(rates: list[tuple[int, int]]) -> None:
    symbolically(chain(*rates))
    symbolically(fork(batch=rates[0][0]))


def test_a_stage_that_gathers_more_than_the_loop_admits_is_a_deadlock() -> None:
    symbolically(looped((2, 2), staleness=1))
    with pytest.raises(GraphError) as caught:
        symbolically(looped((2, 2), staleness=0))  # one version takes one prompt; s0 waits for the second
    assert str(caught.value) == (
        "deadlock: source waits for loop weights to admit more than 1 records; "
        "follower waits for source (0 of 1 records); s0 waits for follower (1 of 2 records); "
        "versions waits for s0 (0 of 1 records); raise the staleness or lower what a firing takes"
    )


def long_graph(nodes: int, groups: int) -> GraphSpec:
    return looped(*[(1, 1)] * (nodes - 4), (groups, 1)).check()


def test_fifty_nodes_with_groups_of_1024_are_checked_within_seconds() -> None:
    began = time.perf_counter()
    spec = long_graph(50, 1024)
    assert len(spec.nodes) == 50
    assert time.perf_counter() - began < 5  # 0.2 s on an idle machine


def test_asking_again_costs_next_to_nothing() -> None:
    spec = long_graph(50, 1024)
    began = time.perf_counter()
    for _ in range(1000):
        repetitions(spec)
        windows(spec)
    assert time.perf_counter() - began < 2  # 0.2 s on an idle machine


def test_what_is_returned_can_be_changed_without_harm() -> None:
    spec = chain((2, 3)).spec()
    repetitions(spec)["source"] = 7
    assert repetitions(spec)["source"] == 3
