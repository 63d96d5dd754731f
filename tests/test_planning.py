"""Every sample once, equal counts on all ranks, little padding, and little forwarded twice."""

# pyright: reportUnknownMemberType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arriero.components.planning import MOST_REPEATED, Layout, Tokens, in_prefix_order, plan

lengths_of_samples = st.lists(st.integers(1, 60), min_size=1, max_size=40)
layouts = st.sampled_from(["padded", "packed", "shared_prefix"])


def texts(lengths: list[int]) -> list[Tokens]:
    """Sequences of these lengths that differ from the first token on."""
    return [np.full(n, i, np.int32) for i, n in enumerate(lengths)]


@given(lengths_of_samples, st.integers(1, 200), st.integers(1, 5), layouts)
def test_a_plan_keeps_every_sample_once_within_the_budget_and_equal_counts(
    lengths: list[int], token_budget: int, ranks: int, layout: Layout
) -> None:
    shares = plan(texts(lengths), token_budget=token_budget, ranks=ranks, layout=layout)
    assert len(shares) == ranks
    assert len({len(micros) for micros in shares}) == 1
    assert sorted(i for micros in shares for m in micros for i in m) == list(range(len(lengths)))
    for micro in (m for micros in shares for m in micros if len(m) > 1):
        held = [lengths[i] for i in micro]
        assert (max(held) * len(held) if layout == "padded" else sum(held)) <= token_budget
    loads = [sum(lengths[i] for m in micros for i in m) for micros in shares]
    assert max(loads) - min(loads) <= max(lengths)


@pytest.mark.parametrize("samples", [5, 9])
def test_a_ragged_batch_over_four_ranks_loses_nothing(samples: int) -> None:
    shares = plan(texts([7] * samples), token_budget=7, ranks=4)
    assert sorted(i for micros in shares for m in micros for i in m) == list(range(samples))
    assert {len(micros) for micros in shares} == {-(-samples // 4)}


def test_a_rank_that_needs_three_micro_batches_runs_four_when_another_needs_four() -> None:
    shares = plan(texts([10, 6, 6, 6, 6, 6, 6]), token_budget=10, ranks=2)
    assert [[len(m) for m in micros] for micros in shares] == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_a_sample_longer_than_the_budget_stands_alone() -> None:
    for layout in get_args(Layout):
        (micros,) = plan(texts([100, 3, 4]), token_budget=10, layout=layout)
        assert (0,) in micros


def test_rows_of_similar_length_share_a_micro_batch() -> None:
    lengths = np.random.default_rng(0).integers(16, 257, 64).tolist()
    (micros,) = plan(texts(lengths), token_budget=8192)
    padded = sum(len(m) * max(lengths[i] for i in m) for m in micros)
    assert padded < 1.1 * sum(lengths)
    assert len(micros) < 12


def test_a_plan_is_a_function_of_its_arguments() -> None:
    lengths = np.random.default_rng(1).integers(1, 50, 99).tolist()
    assert plan(texts(lengths), token_budget=100, ranks=3) == plan(texts(lengths), token_budget=100, ranks=3)


@pytest.mark.parametrize(("token_budget", "ranks"), [(0, 1), (1, 0)])
def test_no_budget_and_no_ranks_are_refused(token_budget: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="must be >= 1"):
        plan(texts([1]), token_budget=token_budget, ranks=ranks)


@pytest.mark.parametrize(("ranks", "layout"), [(1, "padded"), (3, "packed"), (2, "shared_prefix")])
def test_samples_that_belong_together_share_a_micro_batch(ranks: int, layout: Layout) -> None:
    lengths = [3, 30, 8, 8, 20, 5, 6, 6]
    shares = plan(texts(lengths), token_budget=32, ranks=ranks, layout=layout, together=2)
    micros = [micro for share in shares for micro in share]
    assert sorted(i for micro in micros for i in micro) == list(range(8))
    assert all(micro[k] + 1 == micro[k + 1] for micro in micros for k in range(0, len(micro), 2))
    assert len({len(share) for share in shares}) == 1
    with pytest.raises(ValueError, match="7 samples don't divide into terms of 2"):
        plan(texts(lengths[:7]), token_budget=32, together=2)


def group(seed: int, prompt: int, responses: list[int]) -> list[Tokens]:
    rng = np.random.default_rng(seed)
    asked = rng.integers(0, 50, prompt)
    return [np.concatenate([asked, rng.integers(0, 50, n)]).astype(np.int32) for n in responses]


def forwarded(inputs: list[Tokens], micro: tuple[int, ...]) -> int:
    order, shared = in_prefix_order(inputs, micro)
    return sum(len(inputs[i]) for i in order) - sum(shared)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 300), st.integers(1, 4))
def test_shared_prefixes_stay_within_the_budget_and_the_bound_of_attention(
    sizes: list[int], token_budget: int, ranks: int
) -> None:
    inputs = [s for k, n in enumerate(sizes) for s in group(k, 20, [1 + (i * k) % 7 for i in range(n)])]
    shares = plan(inputs, token_budget=token_budget, ranks=ranks, layout="shared_prefix")
    assert sorted(i for micros in shares for m in micros for i in m) == list(range(len(inputs)))
    assert len({len(micros) for micros in shares}) == 1
    for micro in (m for micros in shares for m in micros if len(m) > 1):
        assert forwarded(inputs, micro) <= token_budget
        assert sum(len(inputs[i]) for i in micro) <= MOST_REPEATED * token_budget


def test_the_prompt_of_a_group_is_forwarded_once() -> None:
    inputs = [s for k in range(4) for s in group(k, 100, [5, 9, 3, 7])]
    (micros,) = plan(inputs, token_budget=4096, layout="shared_prefix")
    assert len(micros) == 1
    assert forwarded(inputs, micros[0]) == 4 * 100 + 4 * (5 + 9 + 3 + 7)


def test_few_groups_are_shared_out_to_many_ranks() -> None:
    inputs = [s for k in range(3) for s in group(k, 20, [30] * 8)]
    shares = plan(inputs, token_budget=4096, ranks=2, layout="shared_prefix")
    loads = [sum(forwarded(inputs, m) for m in micros) for micros in shares]
    assert max(loads) < 1.2 * min(loads)


@pytest.mark.parametrize("examples", [24, 71, 256])
def test_packed_micro_batches_of_gsm8k_are_as_few_as_can_be_and_equally_full(examples: int) -> None:
    # Lengths as those of GSM8K in tokens; on the real ones, `benchmarks/packing.py`.
    lengths = np.random.default_rng(0).lognormal(5.0, 0.35, examples).clip(40, 480).astype(int)
    inputs = [np.zeros(n, np.int32) for n in lengths]
    (micros,) = plan(inputs, token_budget=2048, layout="packed")
    assert len(micros) == -(-lengths.sum() // 2048)
    sizes = [int(lengths[list(m)].sum()) for m in micros]
    assert np.mean(sizes) / max(sizes) > 0.95


def test_a_rank_with_room_spreads_over_the_micro_batches_that_another_needs() -> None:
    # 10, 2 and 2 need two micro-batches of 13; 7, 3 and 2 would fit into one, beside a dummy.
    lengths = [3, 7, 2, 2, 2, 10]
    shares = plan(texts(lengths), token_budget=13, ranks=2, layout="packed")
    assert [[sum(lengths[i] for i in m) for m in micros] for micros in shares] == [[10, 4], [7, 5]]
