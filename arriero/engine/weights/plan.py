"""The resharding plan: from both layouts, once, which bytes of which sender go where at each receiver.

    source ranks          cells                            receiver ranks
    stored tensors  --->  boxes that no border of either  --->  stored tensors
                          side crosses, each packed by one
                          source rank

A cell is the unit of everything that follows: it is packed contiguously, has one fingerprint, and a receiver
takes it whole or not at all. So a receiver fetches exactly the bytes it lacks, and can verify each of them,
however differently the two sides are split. Receivers get the plan from the senders (`encode`), and find out
themselves where its cells go (`landings`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import msgspec
import xxhash
from torch import Tensor

from arriero.engine.weights.boxes import Box, chunks, refine
from arriero.engine.weights.layout import WeightError, some
from arriero.schemas.layouts import Piece, RankLayout, WorldLayout
from arriero.schemas.weights import ALIGNMENT_BYTES, ITEM_BYTES, DType

CELL_BYTES = 8 << 20


@dataclass(frozen=True)
class Slice:
    """A box of a stored tensor."""

    stored: str
    box: Box

    def of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """A view; nothing is copied."""
        return tensors[self.stored][tuple(slice(a, b) for a, b in zip(*self.box, strict=True))]


class Cell(msgspec.Struct, frozen=True, array_like=True):
    """A box of a logical tensor, packed by `source` at `offset` of its part of a slot."""

    index: int
    tensor: str
    box: Box
    dtype: DType
    source: int
    offset: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.tensor}[{', '.join(f'{a}:{b}' for a, b in zip(*self.box, strict=True))}]"


class Landing(msgspec.Struct, frozen=True):
    """A cell that a receiver takes, and the places it fills there: two for an untied copy of a tied one."""

    cell: Cell
    targets: tuple[Slice, ...]


class Plan(msgspec.Struct, frozen=True, dict=True):
    """Cells of all source ranks, and what the logical tensors are."""

    tensors: dict[str, tuple[int, ...]]  # shapes
    dtypes: dict[str, DType]
    cells: tuple[Cell, ...]
    num_sources: int

    @cached_property
    def digest(self) -> str:
        """Equal for equal plans."""
        return xxhash.xxh3_128(self.encode()).hexdigest()

    def encode(self) -> bytes:
        return _encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "Plan":
        return _decode(data)

    @cached_property
    def _by_tensor(self) -> dict[str, list[Cell]]:
        cells: dict[str, list[Cell]] = {name: [] for name in self.tensors}
        for cell in self.cells:
            cells[cell.tensor].append(cell)
        return cells

    def packed(self, source: int) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.source == source)

    def part_bytes(self, source: int) -> int:
        """Length of a source rank's part of a slot."""
        return max((_aligned(c.offset + c.nbytes) for c in self.cells if c.source == source), default=0)

    def sources_of(self, layout: RankLayout, source: int) -> list[tuple[Cell, Slice]]:
        """The cells that a source rank packs, and where it holds each of them."""
        held: list[tuple[Cell, Slice]] = []
        pieces = {
            name: [(stored.name, piece) for stored in layout.stored for piece in stored.pieces
                   if piece.tensor == name]
            for name in {cell.tensor for cell in self.packed(source)}
        }  # fmt: skip
        for cell in self.packed(source):
            name, piece = next(
                (n, p) for n, p in pieces[cell.tensor] if cell.box.meet(Box(p.start, p.stop)) == cell.box
            )
            held.append((cell, Slice(name, cell.box.moved(piece.start, piece.at))))
        return held

    def landings(self, layout: RankLayout) -> tuple[Landing, ...]:
        """What a receiver rank takes, in the order of the sources' parts.

        WeightError if it stores a tensor that isn't sent, or if the senders' cells cross a border of it.
        """
        targets: dict[int, tuple[Cell, list[Slice]]] = {}
        for name, piece in ((stored.name, piece) for stored in layout.stored for piece in stored.pieces):
            whole, filled = Box(piece.start, piece.stop), 0
            if piece.tensor not in self.tensors:
                raise WeightError(f"{name} is filled from {piece.tensor}, which is not sent")
            for cell in self._by_tensor[piece.tensor]:
                if whole.meet(cell.box) == cell.box:
                    filled += cell.box.numel
                    place = Slice(name, cell.box.moved(piece.start, piece.at))
                    targets.setdefault(cell.index, (cell, []))[1].append(place)
            if filled != whole.numel:
                raise WeightError(
                    f"{name} takes {whole.numel} elements of {piece.tensor} from {whole.start}, but only "
                    f"{filled} of them come in parts that cross no border: plan with this receiver's layout"
                )
        ordered = sorted(targets.values(), key=lambda t: (t[0].source, t[0].offset))
        return tuple(Landing(cell, tuple(places)) for cell, places in ordered)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Plan).decode


@dataclass
class _Holders:
    """Of one logical tensor: (source rank, dtype, piece), and what its receivers want of it."""

    held: list[tuple[int, DType, Piece]]
    wanted: list[Box]


def plan_weights(
    source: WorldLayout, receivers: Mapping[str, WorldLayout] | None = None, *, cell_bytes: int = CELL_BYTES
) -> Plan:
    """Which source rank packs which cells.

    `receivers` are the kinds of them that store parts of tensors: a cell crosses no border of theirs. Those
    that store whole tensors need not be named. Every element is packed once per update; what several source
    ranks hold, by the one with the least to do. Raises WeightError, naming the tensor, if a receiver wants
    what no source has, or a source tensor reaches one of these receivers nowhere.
    """
    tensors = _tensors(source, receivers or {})
    if not any(box.numel for holders in tensors.values() for box in holders.wanted):
        raise WeightError(f"nothing to send: none of {len(tensors)} tensors has an element")
    packed = [0] * len(source.ranks)
    cells: list[Cell] = []
    # Large tensors first: what is left to balance the ranks with is small.
    for name in sorted(tensors, key=lambda n: (-sum(box.numel for box in tensors[n].wanted), n)):
        for box in _cells_of(name, tensors[name], cell_bytes):
            cells.append(_place(name, box, tensors[name], len(cells), packed))
    stored = [stored for rank in source.ranks for stored in rank.stored]
    dtypes: dict[str, DType] = {piece.tensor: tensor.dtype for tensor in stored for piece in tensor.pieces}
    return Plan({t.name: t.shape for t in source.tensors}, dtypes, tuple(cells), len(source.ranks))


def _tensors(source: WorldLayout, receivers: Mapping[str, WorldLayout]) -> dict[str, _Holders]:
    shapes = {tensor.name: tensor.shape for tensor in source.tensors}
    tensors = {name: _Holders([], [Box.whole(shape)]) for name, shape in shapes.items()}
    for rank, layout in enumerate(source.ranks):
        for stored in layout.stored:
            for piece in stored.pieces:
                tensors[piece.tensor].held.append((rank, stored.dtype, piece))
    for kind, world in receivers.items():
        theirs = {tensor.name: tensor.shape for tensor in world.tensors}
        if theirs != shapes:
            differ = [name for name in shapes.keys() | theirs.keys() if shapes.get(name) != theirs.get(name)]
            same = len(shapes) - len(differ)
            raise WeightError(f"{kind} shares {max(same, 0)} of {len(shapes)} tensors: see {some(differ)}")
        wanted: dict[str, list[Box]] = {name: [] for name in shapes}
        for stored in (stored for layout in world.ranks for stored in layout.stored):
            for piece in stored.pieces:
                wanted[piece.tensor].append(Box(piece.start, piece.stop))
        for name, boxes in wanted.items():
            rest = [Box.whole(shapes[name])]
            for box in boxes:
                rest = [r for part in rest for r in part.minus(box)]
            if any(box.numel for box in rest):
                raise WeightError(f"{name}: no rank of {kind} stores elements {rest[0].start} and following")
            tensors[name].wanted += boxes
    return tensors


def _cells_of(name: str, holders: _Holders, cell_bytes: int) -> list[Box]:
    """Boxes that cover what is wanted, once, and that no border of a holder or receiver crosses."""
    cells: list[Box] = []
    for box in dict.fromkeys(box for box in holders.wanted if box.numel):
        rest = [box]
        for cell in cells:
            rest = [r for part in rest for r in part.minus(cell)]
        cells = refine(cells, box) + rest
    dtypes: set[DType] = {dtype for _, dtype, _ in holders.held}
    if len(dtypes) > 1:
        raise WeightError(f"{name} is {' and '.join(sorted(dtypes))} at the source; use one dtype")
    for _, _, piece in holders.held:
        if all(a < b for a, b in zip(piece.start, piece.stop, strict=True)):
            cells = refine(cells, Box(piece.start, piece.stop))
    most = cell_bytes // max((ITEM_BYTES[dtype] for dtype in dtypes), default=4)
    return [part for cell in sorted(cells) for part in chunks(cell, max(most, 1))]


def _place(name: str, box: Box, holders: _Holders, index: int, packed: list[int]) -> Cell:
    holding = [h for h in holders.held if box.meet(Box(h[2].start, h[2].stop)) == box]
    if not holding:
        raise WeightError(f"{name}: no source rank holds elements {box.start} to {box.stop}")
    rank, dtype, _ = min(holding, key=lambda h: (packed[h[0]], h[0]))
    cell = Cell(
        index=index,
        tensor=name,
        box=box,
        dtype=dtype,
        source=rank,
        offset=packed[rank],
        nbytes=box.numel * ITEM_BYTES[dtype],
    )
    packed[rank] = _aligned(cell.offset + cell.nbytes)
    return cell


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def runs(landings: Sequence[Landing], limit: int) -> list[tuple[Landing, ...]]:
    """Landings of one source that lie side by side in its slot, in groups of up to `limit` bytes each."""
    groups: list[list[Landing]] = [[landings[0]]] if landings else []
    for before, landing in pairwise(landings):
        end = _aligned(before.cell.offset + before.cell.nbytes)
        start = groups[-1][0].cell.offset
        beside = before.cell.source == landing.cell.source and landing.cell.offset == end
        if beside and landing.cell.offset + landing.cell.nbytes - start <= limit:
            groups[-1].append(landing)
        else:
            groups.append([landing])
    return [tuple(group) for group in groups]
