"""What the ranks of an engine with tensor parallelism store of a model, for the plan of the weights.

Both ends ask this module: the trainer, to cut its tensors at the borders of its generators, and each rank of
an engine, to take its own parts. The rules are vLLM's, for Llama and its relatives; of other models a rank
takes every tensor whole, and the engine's loader cuts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from arriero.components.model_directory import LLAMAS
from arriero.engine.weights import llama_layout
from arriero.schemas.layouts import LlamaShape, Parallelism, RankLayout, StoredTensor, WorldLayout

if TYPE_CHECKING:
    from torch import Tensor

_VOCABULARY_MULTIPLE = 64  # that vLLM pads vocabularies to before it splits them


def engine_layout(config: object, tensors: Mapping[str, tuple[int, ...]], ranks: int) -> WorldLayout | None:
    """Parts of `tensors` (of a checkpoint, by name) on each rank; None if every rank takes them whole.

    `config` is that of transformers. WeightError if heads or columns don't divide by `ranks`.
    """
    if ranks == 1 or getattr(config, "model_type", "") not in LLAMAS:
        return None
    parallel = Parallelism(tensor=ranks, vocabulary_multiple=_VOCABULARY_MULTIPLE)
    world = llama_layout(LlamaShape.model_validate(config), parallel, tensors)
    return WorldLayout(tensors=world.tensors, ranks=tuple(_without_padding(rank) for rank in world.ranks))


def engine_layouts(
    config: object, tensors: Mapping[str, Tensor], ranks: Iterable[int]
) -> dict[str, WorldLayout]:
    """The layouts of engines of so many ranks that take parts of `tensors`, for `WeightSender`."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    worlds = {f"{number} ranks": engine_layout(config, shapes, number) for number in ranks}
    return {name: world for name, world in worlds.items() if world is not None}


def _without_padding(rank: RankLayout) -> RankLayout:
    """The engine's loaders add the rows that come from nowhere."""
    bare = [
        StoredTensor(name=s.name, dtype=s.dtype, shape=s.pieces[0].shape, pieces=s.pieces)
        for s in rank.stored
    ]
    return RankLayout(stored=tuple(bare))
