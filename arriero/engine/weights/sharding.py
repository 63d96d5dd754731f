"""Layouts of the models that trainers and engines know, from their config and a parallelism.

The rules are those of the sources named at each function; what a real FSDP2 module or a real engine stores is
compared with them in the tests.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from arriero.engine.weights.boxes import Box
from arriero.engine.weights.layout import WeightError
from arriero.schemas.layouts import (
    LlamaShape,
    LogicalTensor,
    Parallelism,
    Piece,
    RankLayout,
    StoredTensor,
    WorldLayout,
)

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class _Part:
    """One logical tensor's share of a stored one, on one rank, before FSDP: a box of full columns or rows."""

    tensor: str
    box: Box


def llama_layout(
    shape: LlamaShape, parallel: Parallelism, tensors: Mapping[str, Sequence[int]] | None = None
) -> WorldLayout:
    """Every rank's tensors of a Llama. Raises WeightError if heads or columns don't divide by `tensor`.

    `tensors`: names and shapes of a relative that adds biases or norms; without them, those of a Llama.

    Query heads, key-value heads, gate, up and vocabulary are split by output (rows of the weight), o_proj and
    down_proj by input (columns); fewer key-value heads than ranks are repeated. Source: Megatron-LM,
    arXiv:1909.08053, section 3; fused and padded as vLLM's `linear.py` and `vocab_parallel_embedding.py` do.
    """
    _check_divides(shape, parallel)
    named = _llama_tensors(shape) if tensors is None else tensors.items()
    sizes = {name: tuple(size) for name, size in named}
    ranks: list[RankLayout] = []
    for _, shard, rank in product(range(parallel.replicas), range(parallel.fsdp), range(parallel.tensor)):
        stored = [
            _stored(name, _shard(parts, shard, parallel.fsdp), parts[0].box.shape[1:], rows, parallel)
            for name, parts, rows in _llama_rank(shape, sizes, parallel, rank)
        ]
        ranks.append(RankLayout(stored=tuple(stored)))
    logical = tuple(LogicalTensor(name=name, shape=size) for name, size in sizes.items())
    return WorldLayout(tensors=logical, ranks=tuple(ranks))


def fsdp_rows(rows: int, shard: int, shards: int) -> tuple[int, int]:
    """Rows [a, b) of one shard as torch.chunk and FSDP2 cut them: equal ones, then a smaller, then none."""
    each = -(-rows // shards)
    return min(shard * each, rows), min((shard + 1) * each, rows)


def _llama_tensors(shape: LlamaShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_attention_heads * shape.head_size, shape.num_key_value_heads * shape.head_size
    yield _EMBEDDING, (shape.vocab_size, hidden)
    if not shape.tie_word_embeddings:
        yield _HEAD, (shape.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    for i in range(shape.num_hidden_layers):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        attention = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden)}
        for name, size in {**attention, "o_proj": (hidden, q)}.items():
            yield f"{layer}.self_attn.{name}.weight", size
            if shape.attention_bias:
                yield f"{layer}.self_attn.{name}.bias", size[:1]
        for name, size in {
            "gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)
        }.items():  # fmt: skip
            yield f"{layer}.mlp.{name}.weight", size
            if shape.mlp_bias:
                yield f"{layer}.mlp.{name}.bias", size[:1]


def _llama_rank(
    shape: LlamaShape, sizes: Mapping[str, tuple[int, ...]], parallel: Parallelism, rank: int
) -> Iterator[tuple[str, list[_Part], int | None]]:
    """(stored name, its parts, rows with padding) of one tensor-parallel rank."""
    fused: dict[str, list[_Part]] = {}
    for name, size in sizes.items():
        if name in (_EMBEDDING, _HEAD):
            each = -(-size[0] // parallel.vocabulary_multiple) * parallel.vocabulary_multiple
            each = -(-each // parallel.tensor)
            low, high = (min(rank * each, size[0]), min((rank + 1) * each, size[0]))
            part = _Part(name, Box((low, 0), (high, size[1])))
            rows = each if parallel.vocabulary_multiple > 1 else None
            yield name, [part], rows
            if name == _EMBEDDING and shape.tie_word_embeddings and not parallel.tied:
                yield _HEAD, [part], rows
            continue
        module, _, kind = name.rpartition(".")
        box = _slice(module.rpartition(".")[2], size, shape, parallel.tensor, rank)
        target = _fused_name(module) if parallel.fused else module
        if target == module:
            yield name, [_Part(name, box)], None
        else:
            fused.setdefault(f"{target}.{kind}", []).append(_Part(name, box))
    for name, parts in fused.items():
        yield name, parts, None


def _slice(projection: str, size: Sequence[int], shape: LlamaShape, ranks: int, rank: int) -> Box:
    whole = Box.whole(size)
    if projection in ("q_proj", "gate_proj", "up_proj"):
        each = size[0] // ranks
        return Box((rank * each, *whole.start[1:]), ((rank + 1) * each, *whole.stop[1:]))
    if projection in ("k_proj", "v_proj"):
        parts = min(ranks, shape.num_key_value_heads)
        each, part = size[0] // parts, rank // (ranks // parts)
        return Box((part * each, *whole.start[1:]), ((part + 1) * each, *whole.stop[1:]))
    if projection in ("o_proj", "down_proj") and len(size) == 2:
        each = size[1] // ranks
        return Box((0, rank * each), (size[0], (rank + 1) * each))
    return whole


def _fused_name(module: str) -> str:
    parent, _, name = module.rpartition(".")
    fused = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
    fused |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    return f"{parent}.{fused[name]}" if name in fused else module


def _shard(parts: Sequence[_Part], shard: int, shards: int) -> list[_Part]:
    """The rows of this shard, counted through all parts of the stored tensor, one after the other."""
    if shards == 1:
        return list(parts)
    low, high = fsdp_rows(sum(part.box.shape[0] for part in parts), shard, shards)
    kept: list[_Part] = []
    begin = 0
    for part in parts:
        box, rows = part.box, part.box.shape[0]
        a, b = max(low, begin) - begin, min(high, begin + rows) - begin
        if a < b:
            start, stop = (box.start[0] + a, *box.start[1:]), (box.start[0] + b, *box.stop[1:])
            kept.append(_Part(part.tensor, Box(start, stop)))
        begin += rows
    return kept


def _stored(
    name: str, parts: Sequence[_Part], tail: tuple[int, ...], rows: int | None, parallel: Parallelism
) -> StoredTensor:
    pieces: list[Piece] = []
    at = 0
    for part in parts:
        start, stop = part.box
        pieces.append(Piece(tensor=part.tensor, start=start, stop=stop, at=(at, *(0 for _ in start[1:]))))
        at += part.box.shape[0]
    total = max(rows, at) if rows is not None and parallel.fsdp == 1 else at
    return StoredTensor(
        name=name,
        dtype=parallel.dtype,
        shape=(total, *tail),
        pieces=tuple(pieces),
        unfilled=(total - at) * prod(tail),
    )


def _check_divides(shape: LlamaShape, parallel: Parallelism) -> None:
    ranks, kv = parallel.tensor, shape.num_key_value_heads
    if shape.num_attention_heads % ranks:
        raise WeightError(f"{shape.num_attention_heads} attention heads don't divide by tensor={ranks}")
    if shape.intermediate_size % ranks:
        raise WeightError(f"intermediate size {shape.intermediate_size} doesn't divide by tensor={ranks}")
    if kv % ranks and ranks % kv:
        raise WeightError(f"{kv} key-value heads neither divide by tensor={ranks} nor divide it")
