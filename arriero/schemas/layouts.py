"""Which rank holds which part of which tensor, as data: the two sides of a resharding plan.

A *logical* tensor is one of the model, under the name and with the shape that its checkpoint gives it. A rank
*stores* tensors of its own; each is filled from boxes of logical tensors. So a fused QKV projection is one
stored tensor with three pieces, a row of FSDP shards one piece per rank, and tied embeddings one logical
tensor that one stored tensor, or two, are filled from.
"""

from math import prod
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from arriero.schemas.weights import DType

Shape = tuple[NonNegativeInt, ...]
_Name = Annotated[str, Field(min_length=1)]


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LogicalTensor(_Data):
    """A tensor of the model."""

    name: _Name
    shape: Shape


class Piece(_Data):
    """Elements [start, stop) of a logical tensor, held by a stored tensor from index `at` on."""

    tensor: _Name
    start: Shape
    stop: Shape
    at: Shape

    @property
    def shape(self) -> Shape:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @model_validator(mode="after")
    def _is_a_box(self) -> Self:
        if not len(self.start) == len(self.stop) == len(self.at):
            raise ValueError(f"{self.tensor}: start, stop and at have different numbers of dimensions")
        if any(a > b for a, b in zip(self.start, self.stop, strict=True)):
            raise ValueError(f"{self.tensor}: start {self.start} is beyond stop {self.stop}")
        return self


class StoredTensor(_Data):
    """A tensor in the memory of one rank. `unfilled` elements come from nowhere, e.g. vocabulary padding."""

    name: _Name
    dtype: DType
    shape: Shape
    pieces: tuple[Piece, ...]
    unfilled: NonNegativeInt = 0

    @model_validator(mode="after")
    def _pieces_fill_it_once(self) -> Self:
        placed = [(p.at, tuple(a + n for a, n in zip(p.at, p.shape, strict=True))) for p in self.pieces]
        for piece, (low, high) in zip(self.pieces, placed, strict=True):
            if len(low) != len(self.shape) or any(b > n for b, n in zip(high, self.shape, strict=True)):
                raise ValueError(f"{self.name}{self.shape}: the piece of {piece.tensor} ends at {high}")
            for other, (low2, high2) in zip(self.pieces, placed, strict=True):
                meet = all(max(a, c) < min(b, d) for a, b, c, d in zip(low, high, low2, high2, strict=True))
                if other is not piece and meet:
                    raise ValueError(f"{self.name}: pieces of {piece.tensor} and {other.tensor} overlap")
        filled = sum(prod(p.shape) for p in self.pieces)
        if filled + self.unfilled != prod(self.shape):
            raise ValueError(
                f"{self.name}{self.shape}: pieces fill {filled} of {prod(self.shape)} elements, "
                f"and unfilled says {self.unfilled}"
            )
        return self


class RankLayout(_Data):
    """What one rank stores."""

    stored: tuple[StoredTensor, ...]


class WorldLayout(_Data):
    """All ranks of one side. A logical tensor that several names share (tied) stands here once."""

    tensors: Annotated[tuple[LogicalTensor, ...], Field(min_length=1)]
    ranks: Annotated[tuple[RankLayout, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _pieces_are_of_these_tensors(self) -> Self:
        shapes = {tensor.name: tensor.shape for tensor in self.tensors}
        if len(shapes) != len(self.tensors):
            raise ValueError("a logical tensor stands twice")
        for rank, layout in enumerate(self.ranks):
            names = {stored.name for stored in layout.stored}
            if len(names) != len(layout.stored):
                raise ValueError(f"rank {rank} stores two tensors of one name")
            for piece in (piece for stored in layout.stored for piece in stored.pieces):
                shape = shapes.get(piece.tensor)
                if shape is None:
                    raise ValueError(f"rank {rank} holds a piece of {piece.tensor}, which is no tensor here")
                if len(shape) != len(piece.stop) or any(
                    b > n for b, n in zip(piece.stop, shape, strict=True)
                ):
                    raise ValueError(f"rank {rank}: {piece.tensor}{shape} has no element {piece.stop}")
        return self


class LlamaShape(BaseModel):
    """The numbers of a Llama that decide its tensors; `model_validate` takes a Hugging Face config."""

    model_config = ConfigDict(frozen=True, from_attributes=True)

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    vocab_size: PositiveInt
    head_dim: PositiveInt | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} attention heads for {self.num_key_value_heads} key-value heads"
            )
        return self


class Parallelism(_Data):
    """How one side splits a model over its ranks; rank = (replica * fsdp + shard) * tensor + slice.

    Tensor parallelism cuts projections by heads or columns and the embeddings by vocabulary; FSDP cuts what
    is left into chunks of rows, the last ones smaller or empty, as torch.chunk does. `fused`: one qkv_proj
    and one gate_up_proj, as inference engines store them. `tied=False` gives a tied model an lm_head of its
    own. Vocabularies are padded to a multiple of `vocabulary_multiple`, except under FSDP.
    """

    tensor: PositiveInt = 1
    fsdp: PositiveInt = 1
    replicas: PositiveInt = 1
    fused: bool = False
    tied: bool = True
    vocabulary_multiple: PositiveInt = 1
    dtype: DType = "float32"

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.fsdp * self.replicas
