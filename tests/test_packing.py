"""Every sample once, equal counts on all ranks, little padding, and the right tensors."""

# pyright: reportUnknownMemberType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arriero.components.packing import Layout, check_samples, forward_length, pack, plan
from arriero.schemas.messages import Sample
from tests.batches import random_sample

lengths_of_samples = st.lists(st.integers(1, 60), min_size=1, max_size=40)
layouts = st.sampled_from(["padded", "concatenated"])


@given(lengths_of_samples, st.integers(1, 200), st.integers(1, 5), layouts)
def test_a_plan_keeps_every_sample_once_within_the_budget_and_equal_counts(
    lengths: list[int], token_budget: int, ranks: int, layout: Layout
) -> None:
    shares = plan(lengths, token_budget=token_budget, ranks=ranks, layout=layout)
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
    shares = plan([7] * samples, token_budget=7, ranks=4)
    assert sorted(i for micros in shares for m in micros for i in m) == list(range(samples))
    assert {len(micros) for micros in shares} == {-(-samples // 4)}


def test_a_rank_that_needs_three_micro_batches_runs_four_when_another_needs_four() -> None:
    shares = plan([10, 6, 6, 6, 6, 6, 6], token_budget=10, ranks=2)
    assert [[len(m) for m in micros] for micros in shares] == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_a_sample_longer_than_the_budget_stands_alone() -> None:
    for layout in ("padded", "concatenated"):
        (micros,) = plan([100, 3, 4], token_budget=10, layout=layout)
        assert (0,) in micros


def test_rows_of_similar_length_share_a_micro_batch() -> None:
    lengths = np.random.default_rng(0).integers(16, 257, 64).tolist()
    (micros,) = plan(lengths, token_budget=8192)
    padded = sum(len(m) * max(lengths[i] for i in m) for m in micros)
    assert padded < 1.1 * sum(lengths)
    assert len(micros) < 12


def test_a_plan_is_a_function_of_its_arguments() -> None:
    lengths = np.random.default_rng(1).integers(1, 50, 99).tolist()
    assert plan(lengths, token_budget=100, ranks=3) == plan(lengths, token_budget=100, ranks=3)


@pytest.mark.parametrize(("token_budget", "ranks"), [(0, 1), (1, 0)])
def test_no_budget_and_no_ranks_are_refused(token_budget: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="must be >= 1"):
        plan([1], token_budget=token_budget, ranks=ranks)


def sample(tokens: list[int], mask: list[bool], temperature: float) -> Sample:
    return Sample(
        group="g",
        tokens=np.array(tokens, dtype=np.int32),
        mask=np.array(mask),
        advantages=np.array([t / 10 for t in tokens], dtype=np.float32),
        logprobs=np.where(mask, -np.array(tokens), np.nan).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        temperature=temperature,
    )


def by_hand() -> tuple[Sample, Sample]:
    # The last token of the second isn't trained on, so neither it nor the one before it has to be read.
    return sample([1, 2, 3, 4], [False, False, True, True], 0.5), sample([5, 6, 7], [False, True, False], 1.0)


def test_padded_rows_by_hand() -> None:
    micro = pack(by_hand(), (0, 1), np.array([0.25, 0.5]), layout="padded")
    assert micro.input_ids_BL.tolist() == [[1, 2, 3], [5, 0, 0]]
    assert micro.position_ids_BL is None
    # All three columns are kept: the first predicts the trained token of the second row.
    assert (micro.keep, micro.index_T.tolist()) == (3, [1, 2, 3])
    assert micro.tokens.targets_T.tolist() == [3, 4, 6]
    assert micro.tokens.weights_T.tolist() == [0.25, 0.25, 0.5]
    assert micro.tokens.temperatures_T.tolist() == [0.5, 0.5, 1.0]
    assert micro.tokens.advantages_T.tolist() == pytest.approx([0.3, 0.4, 0.6])
    assert micro.tokens.sequence_T.tolist() == [0, 0, 1]
    assert micro.tokens.behaviour_T is not None
    assert micro.tokens.behaviour_T.tolist() == [-3.0, -4.0, -6.0]


def test_concatenated_rows_by_hand() -> None:
    micro = pack(by_hand(), (0, 1), np.array([0.25, 0.5]), layout="concatenated")
    assert micro.input_ids_BL.tolist() == [[1, 2, 3, 5]]
    assert micro.position_ids_BL is not None
    assert micro.position_ids_BL.tolist() == [[0, 1, 2, 0]]
    assert isinstance(micro.keep, torch.Tensor)
    assert (micro.keep.tolist(), micro.index_T.tolist()) == ([1, 2, 3], [0, 1, 2])


@pytest.mark.parametrize("layout", ["padded", "concatenated"])
def test_a_dummy_has_a_token_to_read_and_none_to_train_on(layout: Layout) -> None:
    micro = pack(by_hand(), (), np.array([0.25, 0.5]), layout=layout)
    assert micro.input_ids_BL.shape == (1, 1)
    assert len(micro.index_T) == len(micro.tokens.targets_T) == 0


def test_what_is_trained_on_is_what_was_sampled_whatever_its_id() -> None:
    # ROLL 1f9d2171: where the end of sequence is also the padding, a mask made from ids loses or adds tokens.
    tokens = [1, 2, 2, 42, 3, 5, 0]
    ended = sample(tokens, [False] * 3 + [True] * 4, 1.0)
    longer = sample([1, *range(2, 10)], [False] + [True] * 8, 1.0)
    packed = pack((ended, longer), (0, 1), np.ones(2)).tokens
    assert packed.targets_T[packed.sequence_T == 0].tolist() == [42, 3, 5, 0]


def test_rows_that_pad_a_batch_change_nothing() -> None:
    # rllm PR#508: rows added so that a batch of 3 divides by 4 had a mask.
    alone = pack(by_hand(), (0, 1), np.array([0.25, 0.5])).tokens
    filled = pack((*by_hand(), random_sample(6, trained=False)), (0, 1, 2), np.array([0.25, 0.5, 0.0])).tokens
    for name in ("targets_T", "advantages_T", "weights_T", "behaviour_T", "sequence_T"):
        assert torch.equal(getattr(alone, name), getattr(filled, name))


@pytest.mark.parametrize(("ranks", "layout"), [(1, "padded"), (3, "concatenated")])
def test_samples_that_belong_together_share_a_micro_batch(ranks: int, layout: Layout) -> None:
    lengths = [3, 30, 8, 8, 20, 5, 6, 6]
    shares = plan(lengths, token_budget=32, ranks=ranks, layout=layout, together=2)
    micros = [micro for share in shares for micro in share]
    assert sorted(i for micro in micros for i in micro) == list(range(8))
    assert all(micro[k] + 1 == micro[k + 1] for micro in micros for k in range(0, len(micro), 2))
    assert len({len(share) for share in shares}) == 1
    with pytest.raises(ValueError, match="7 samples don't divide into terms of 2"):
        plan(lengths[:7], token_budget=32, together=2)


def test_token_ids_become_int64_and_the_rest_float32() -> None:
    micro = pack(by_hand(), (1,), np.array([0.25, 0.5]))
    tokens = micro.tokens
    assert {micro.input_ids_BL.dtype, micro.index_T.dtype, tokens.targets_T.dtype} == {torch.int64}
    assert {tokens.advantages_T.dtype, tokens.weights_T.dtype, tokens.temperatures_T.dtype} == {torch.float32}


def test_one_supervised_sample_leaves_the_micro_batch_without_behaviour() -> None:
    samples = (*by_hand(), random_sample(4, supervised=True))
    assert pack(samples, (0, 2), np.ones(3)).tokens.behaviour_T is None


def test_a_sample_without_trained_tokens_is_one_token_long() -> None:
    assert forward_length(random_sample(9, trained=False)) == 1
    assert forward_length(random_sample(9)) == 8


def test_a_sample_beyond_the_context_is_named() -> None:
    with pytest.raises(ValueError, match="sample 1 of group 'g3' has 9 tokens; the context is 8"):
        check_samples([random_sample(8), random_sample(9, seed=3)], context=8)


def test_a_trained_first_token_is_refused() -> None:
    with pytest.raises(ValueError, match="must begin with a token that isn't trained on"):
        check_samples([random_sample(8, prompt=0)], context=None)
