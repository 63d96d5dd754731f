"""Layouts and the resharding plan, checked element by element on arrays of numbered elements."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import LlamaConfig, LlamaForCausalLM

from arriero.engine.weights import WeightError
from arriero.engine.weights.boxes import Box, chunks, refine
from arriero.engine.weights.live_layout import replicated_layout
from arriero.engine.weights.plan import Landing, Plan, plan_weights
from arriero.engine.weights.sharding import fsdp_rows, llama_layout
from arriero.schemas.layouts import LlamaShape, Parallelism, Piece, StoredTensor, WorldLayout
from arriero.schemas.weights import ITEM_BYTES

torch.set_num_threads(1)
Arrays = dict[str, npt.NDArray[np.int64]]


def numbered(world: WorldLayout) -> Arrays:
    """Every element of every logical tensor has a number of its own, from 0."""
    arrays: Arrays = {}
    begin = 0
    for tensor in world.tensors:
        count = prod(tensor.shape)
        arrays[tensor.name] = np.arange(begin, begin + count).reshape(tensor.shape)
        begin += count
    return arrays


def stored(world: WorldLayout, rank: int, logical: Mapping[str, npt.NDArray[np.int64]]) -> Arrays:
    """What a rank holds, built from its layout; -1 where nothing is held."""
    arrays: Arrays = {}
    for tensor in world.ranks[rank].stored:
        array = np.full(tensor.shape, -1)
        for piece in tensor.pieces:
            to = tuple(slice(a, a + n) for a, n in zip(piece.at, piece.shape, strict=True))
            array[to] = logical[piece.tensor][
                tuple(slice(a, b) for a, b in zip(piece.start, piece.stop, strict=True))
            ]
        arrays[tensor.name] = array
    return arrays


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(*box, strict=True))


def received_bytes(landings: Sequence[Landing]) -> int:
    return sum(landing.cell.nbytes for landing in landings)


def check(source: WorldLayout, receivers: Mapping[str, WorldLayout], plan: Plan) -> None:
    """Carry the plan out on numbered elements, and count."""
    logical = numbered(source)
    held = [stored(source, rank, logical) for rank in range(len(source.ranks))]
    packed = {
        cell.index: held[rank][place.stored][index(place.box)]
        for rank, layout in enumerate(source.ranks)
        for cell, place in plan.sources_of(layout, rank)
    }
    sent = np.concatenate([packed[cell.index].reshape(-1) for cell in plan.cells])
    assert sorted(sent.tolist()) == list(range(sum(prod(t.shape) for t in source.tensors)))
    for world in receivers.values():
        for rank, layout in enumerate(world.ranks):
            landings = plan.landings(layout)
            want = stored(world, rank, logical)
            got = {name: np.full(array.shape, -1) for name, array in want.items()}
            writes = {name: np.zeros(array.shape, dtype=np.int64) for name, array in want.items()}
            for landing in landings:
                for target in landing.targets:
                    got[target.stored][index(target.box)] = packed[landing.cell.index]
                    writes[target.stored][index(target.box)] += 1
            for name, array in want.items():
                assert np.array_equal(got[name], array)
                assert np.array_equal(writes[name], array >= 0)
            needed = {int(e) for array in want.values() for e in array.reshape(-1) if e >= 0}
            item = ITEM_BYTES[source.ranks[0].stored[0].dtype]
            assert received_bytes(landings) == len(needed) * item
    for rank in range(len(source.ranks)):
        spans = sorted((cell.offset, cell.offset + cell.nbytes) for cell in plan.packed(rank))
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert not spans or spans[-1][1] <= plan.part_bytes(rank)


@st.composite
def shapes(draw: st.DrawFn) -> LlamaShape:
    kv = draw(st.sampled_from([1, 2, 4]))
    return LlamaShape(
        hidden_size=draw(st.integers(1, 9)),
        intermediate_size=4 * draw(st.integers(1, 3)),
        num_hidden_layers=draw(st.integers(1, 2)),
        num_attention_heads=4,
        num_key_value_heads=kv,
        vocab_size=draw(st.integers(1, 19)),
        head_dim=draw(st.integers(1, 3)),
        tie_word_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
    )


parallelisms = st.builds(
    Parallelism,
    tensor=st.sampled_from([1, 2, 4]),
    fsdp=st.integers(1, 5),
    replicas=st.integers(1, 2),
    fused=st.booleans(),
    tied=st.booleans(),
    vocabulary_multiple=st.sampled_from([1, 4, 8]),
)


@given(
    shapes(), parallelisms, st.lists(parallelisms, min_size=1, max_size=3), st.sampled_from([16, 64, 1 << 20])
)
@settings(max_examples=30)
def test_every_element_is_written_once_and_crosses_once_for_any_two_sides(
    shape: LlamaShape, source: Parallelism, receivers: list[Parallelism], cell_bytes: int
) -> None:
    left = llama_layout(shape, source)
    right = {f"kind-{i}": llama_layout(shape, parallel) for i, parallel in enumerate(receivers)}
    plan = plan_weights(left, right, cell_bytes=cell_bytes)
    check(left, right, plan)
    assert all(cell.nbytes <= max(cell_bytes, 4 * 9 * 3 * 4) for cell in plan.cells)


def llama(*, kv: int = 2, tied: bool = False, layers: int = 2) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=kv, vocab_size=101, tie_word_embeddings=tied, max_position_embeddings=64,
    )  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
def test_the_layout_of_one_rank_is_the_state_dict_of_the_model(tied: bool) -> None:
    config = llama(tied=tied)
    model = LlamaForCausalLM(config)
    state = dict(model.named_parameters())
    layout = llama_layout(LlamaShape.model_validate(config), Parallelism())
    assert {s.name: s.shape for s in layout.ranks[0].stored} == {n: tuple(p.shape) for n, p in state.items()}
    by_tensors = replicated_layout(model.state_dict())
    assert {t.name: t.shape for t in layout.tensors} == {
        # Of two tied names the first in the alphabet stands for both.
        "model.embed_tokens.weight" if tied and t.name == "lm_head.weight" else t.name: t.shape
        for t in by_tensors.tensors
    }


def test_rows_are_cut_as_torch_cuts_them() -> None:
    for rows in range(12):
        for shards in range(1, 6):
            mine = [fsdp_rows(rows, shard, shards) for shard in range(shards)]
            theirs = [len(c) for c in torch.chunk(torch.empty(rows), shards)] if rows else []
            assert [b - a for a, b in mine] == theirs + [0] * (shards - len(theirs))


def test_grouped_query_attention_is_fused_by_rank_as_an_engine_stores_it() -> None:
    # 4 query and 2 key-value heads of 8 on 2 ranks: rank 1 has q rows 16-32, k rows 8-16, v rows 8-16.
    layout = llama_layout(LlamaShape.model_validate(llama()), Parallelism(tensor=2, fused=True))
    (qkv,) = [s for s in layout.ranks[1].stored if s.name == "model.layers.0.self_attn.qkv_proj.weight"]
    assert qkv.shape == (32, 32)
    assert [(p.tensor[-15:], p.start[0], p.stop[0], p.at[0]) for p in qkv.pieces] == [
        ("n.q_proj.weight", 16, 32, 0), ("n.k_proj.weight", 8, 16, 16), ("n.v_proj.weight", 8, 16, 24),
    ]  # fmt: skip
    (down,) = [s for s in layout.ranks[1].stored if s.name == "model.layers.0.mlp.down_proj.weight"]
    assert (down.shape, down.pieces[0].start, down.pieces[0].stop) == ((32, 24), (0, 24), (32, 48))


def test_fewer_key_value_heads_than_ranks_are_repeated() -> None:
    layout = llama_layout(LlamaShape.model_validate(llama(kv=1)), Parallelism(tensor=2))
    both = [next(s for s in rank.stored if "k_proj" in s.name).pieces[0] for rank in layout.ranks]
    assert [(p.start, p.stop) for p in both] == [((0, 0), (8, 32))] * 2


def test_a_padded_vocabulary_leaves_its_padding_alone() -> None:
    # 101 words to a multiple of 64 are 128, 64 a rank; the second has 37 words and 27 rows of padding.
    layout = llama_layout(LlamaShape.model_validate(llama()), Parallelism(tensor=2, vocabulary_multiple=64))
    (embedding,) = [s for s in layout.ranks[1].stored if "embed" in s.name]
    assert (embedding.shape, embedding.unfilled) == ((64, 32), 27 * 32)


def test_no_rank_of_a_sharded_side_packs_or_takes_the_whole_model() -> None:
    shape = LlamaShape.model_validate(llama())
    source = llama_layout(shape, Parallelism(fsdp=4))
    halves = llama_layout(shape, Parallelism(tensor=2, fused=True))
    plan = plan_weights(source, {"tp2": halves})
    whole = sum(cell.nbytes for cell in plan.cells)
    assert whole == 4 * sum(prod(t.shape) for t in source.tensors)
    assert max(plan.part_bytes(rank) for rank in range(4)) < 0.3 * whole
    assert max(received_bytes(plan.landings(rank)) for rank in halves.ranks) < 0.51 * whole


def test_replicas_share_the_packing() -> None:
    shape = LlamaShape.model_validate(llama(layers=4))
    plan = plan_weights(
        llama_layout(shape, Parallelism(replicas=4)), {"tp1": llama_layout(shape, Parallelism())}
    )
    parts = [plan.part_bytes(rank) for rank in range(4)]
    assert max(parts) < 1.2 * min(parts)


def test_an_untied_copy_of_a_tied_tensor_crosses_once() -> None:
    shape = LlamaShape.model_validate(llama(tied=True))
    left, right = llama_layout(shape, Parallelism()), llama_layout(shape, Parallelism(tied=False))
    plan = plan_weights(left, {"engine": right})
    landings = plan.landings(right.ranks[0])
    assert received_bytes(landings) == plan.part_bytes(0) == sum(c.nbytes for c in plan.cells)
    twice = [landing for landing in landings if len(landing.targets) == 2]
    assert {t.stored for landing in twice for t in landing.targets} == {
        "model.embed_tokens.weight", "lm_head.weight",
    }  # fmt: skip


def test_a_plan_says_what_does_not_fit() -> None:
    shape = LlamaShape.model_validate(llama())
    whole, half = llama_layout(shape, Parallelism()), llama_layout(shape, Parallelism(tensor=2))
    one = half.model_copy(update={"ranks": half.ranks[:1]})
    with pytest.raises(WeightError, match="no source rank holds elements"):
        plan_weights(one, {"tp1": whole})
    with pytest.raises(WeightError, match="no rank of tp2 stores elements"):
        plan_weights(whole, {"tp2": one})
    other = llama_layout(LlamaShape.model_validate(llama(tied=True)), Parallelism())
    with pytest.raises(WeightError, match=r"tied shares 20 of 21 tensors: see lm_head\.weight"):
        plan_weights(whole, {"tied": other})
    with pytest.raises(
        WeightError, match=r"takes 1632 elements of model.embed.* only 0 of them come in parts"
    ):
        plan_weights(whole).landings(half.ranks[0])
    with pytest.raises(WeightError, match=r"filled from lm_head\.weight, which is not sent"):
        plan_weights(other).landings(whole.ranks[0])
    with pytest.raises(WeightError, match="4 attention heads don't divide by tensor=3"):
        llama_layout(shape, Parallelism(tensor=3))


def test_a_plan_is_the_same_after_its_way_to_the_receivers() -> None:
    shape = LlamaShape.model_validate(llama())
    plan = plan_weights(llama_layout(shape, Parallelism(fsdp=3)))
    arrived = Plan.decode(plan.encode())
    assert arrived == plan
    assert arrived.digest == plan.digest
    assert plan_weights(llama_layout(shape, Parallelism(fsdp=2))).digest != plan.digest


def test_a_stored_tensor_checks_itself() -> None:
    def stores(*pieces: Piece, unfilled: int = 0) -> StoredTensor:
        return StoredTensor(name="w", dtype="float32", shape=(4,), pieces=pieces, unfilled=unfilled)

    def piece(start: int, stop: int, at: int) -> Piece:
        return Piece(tensor="w", start=(start,), stop=(stop,), at=(at,))

    stores(piece(0, 2, 2), piece(4, 6, 0))
    with pytest.raises(ValidationError, match="pieces fill 2 of 4 elements"):
        stores(piece(0, 2, 0))
    with pytest.raises(ValidationError, match="overlap"):
        stores(piece(0, 2, 0), piece(4, 6, 1), unfilled=0)
    with pytest.raises(ValidationError, match="ends at"):
        stores(piece(0, 5, 0))
    with pytest.raises(ValidationError, match="beyond stop"):
        piece(3, 2, 0)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=4, max_size=4), st.integers(1, 9))
def test_boxes_are_sets_of_indices(corners: list[tuple[int, int]], most: int) -> None:
    (a, b), (c, d), (e, f), (g, h) = ((min(p), max(p)) for p in corners)
    left, right = Box((a, c), (b, d)), Box((e, g), (f, h))

    def indices(*boxes: Box) -> list[tuple[int, int]]:
        return [(i, j) for box in boxes for i in range(box.start[0], box.stop[0])
                for j in range(box.start[1], box.stop[1])]  # fmt: skip

    common = left.meet(right)
    both = sorted(set(indices(left)) & set(indices(right)))
    assert indices(*([common] if common else [])) == both
    assert sorted(indices(*left.minus(right))) == sorted(set(indices(left)) - set(both))
    if left.numel:
        assert sorted(indices(*refine([left], right))) == indices(left)
        assert indices(*chunks(left, most)) == indices(left)
        assert all(part.numel <= max(most, left.shape[1]) for part in chunks(left, most))
