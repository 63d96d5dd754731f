"""The right tensors of a micro-batch, in every layout."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

import numpy as np
import pytest
import torch

from arriero.components.packing import Layout, check_samples, pack, read
from arriero.schemas.messages import Sample
from tests.batches import random_sample


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
    assert micro.rows is None
    assert micro.index_T.tolist() == [1, 2, 3]  # the last is the first position of the second row
    assert micro.tokens.targets_T.tolist() == [3, 4, 6]
    assert micro.tokens.weights_T.tolist() == [0.25, 0.25, 0.5]
    assert micro.tokens.temperatures_T.tolist() == [0.5, 0.5, 1.0]
    assert micro.tokens.advantages_T.tolist() == pytest.approx([0.3, 0.4, 0.6])
    assert micro.tokens.sequence_T.tolist() == [0, 0, 1]
    assert micro.tokens.behaviour_T is not None
    assert micro.tokens.behaviour_T.tolist() == [-3.0, -4.0, -6.0]


def test_a_packed_row_by_hand() -> None:
    micro = pack(by_hand(), (0, 1), np.array([0.25, 0.5]), layout="packed")
    assert micro.input_ids_BL.tolist() == [[1, 2, 3, 5]]
    assert micro.position_ids_BL is not None
    assert micro.position_ids_BL.tolist() == [[0, 1, 2, 0]]
    assert micro.index_T.tolist() == [1, 2, 3]


def test_a_shared_prefix_by_hand() -> None:
    asked = [1, 2, 3]
    group = (
        sample([*asked, 4, 5], [False] * 3 + [True] * 2, 1.0),
        sample([*asked, 6, 7, 8], [False] * 3 + [True] * 3, 0.5),
        sample([*asked, 4, 9, 4], [False] * 3 + [True] * 3, 1.0),
    )
    micro = pack(group, (0, 1, 2), np.ones(3), layout="shared_prefix")
    # 1 2 3 4 of the first, then 9 of the third, which goes on from that 4, then 6 7 of the second.
    assert micro.input_ids_BL.tolist() == [[1, 2, 3, 4, 9, 6, 7]]
    assert micro.position_ids_BL is not None
    assert micro.position_ids_BL.tolist() == [[0, 1, 2, 3, 4, 3, 4]]
    assert micro.index_T.tolist() == [2, 3, 2, 5, 6, 2, 3, 4]
    assert micro.tokens.targets_T.tolist() == [4, 5, 6, 7, 8, 4, 9, 4]
    assert micro.rows is not None
    x_ND = torch.arange(1.0, 8.0)[:, None]
    assert micro.rows.shapes == ((3, 5),)
    rows = micro.rows.spread(x_ND).view(3, 5).tolist()
    assert rows == [[1, 2, 3, 6, 7], [1, 2, 3, 4, 5], [1, 2, 3, 4, 0]]
    assert micro.rows.collect(micro.rows.spread(x_ND)).tolist() == x_ND.tolist()


def test_packed_sequences_of_few_lengths_attend_where_they_lie() -> None:
    samples = [random_sample(n, seed=i) for i, n in enumerate([40, 90, 40, 90, 90])]
    micro = pack(samples, range(5), np.ones(5), layout="packed")
    assert micro.rows is not None
    assert micro.rows.moves is None
    assert micro.rows.shapes == ((3, 89), (2, 39))  # the last token isn't read
    assert micro.position_ids_BL is not None
    assert micro.position_ids_BL.tolist() == [[*range(89)] * 3 + [*range(39)] * 2]
    many = [random_sample(n, seed=n) for n in range(2, 60)]
    scattered = pack(many, range(len(many)), np.ones(len(many)), layout="packed").rows
    assert scattered is not None
    assert scattered.moves is not None
    assert len(scattered.shapes) < 12


@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prefix"])
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


def test_token_ids_become_int64_and_the_rest_float32() -> None:
    micro = pack(by_hand(), (1,), np.array([0.25, 0.5]))
    tokens = micro.tokens
    assert {micro.input_ids_BL.dtype, micro.index_T.dtype, tokens.targets_T.dtype} == {torch.int64}
    assert {tokens.advantages_T.dtype, tokens.weights_T.dtype, tokens.temperatures_T.dtype} == {torch.float32}


def test_one_supervised_sample_leaves_the_micro_batch_without_behaviour() -> None:
    samples = (*by_hand(), random_sample(4, supervised=True))
    assert pack(samples, (0, 2), np.ones(3)).tokens.behaviour_T is None


def test_nothing_after_the_last_trained_token_is_read() -> None:
    whole = random_sample(9)
    assert read(random_sample(9, trained=False)).tolist() == whole.tokens[:1].tolist()
    assert read(whole).tolist() == whole.tokens[:8].tolist()
    assert read(by_hand()[1]).tolist() == [5]


def test_a_sample_beyond_the_context_is_named() -> None:
    # The last token of a sample is predicted and not read.
    with pytest.raises(ValueError, match="sample 1 of group 'g3' has 9 tokens to read; the context is 8"):
        check_samples([random_sample(9), random_sample(10, seed=3)], context=8)


def test_a_trained_first_token_is_refused() -> None:
    with pytest.raises(ValueError, match="must begin with a token that isn't trained on"):
        check_samples([random_sample(8, prompt=0)], context=None)
