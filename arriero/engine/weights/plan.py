"""The resharding plan: from both layouts, once, which bytes of which sender go where at each receiver.

    source ranks          cells                            receiver ranks
    stored tensors  --->  boxes that no border of either  --->  stored tensors
                          side crosses, each packed by one
                          source rank

A cell is the unit of everything that follows: it is packed contiguously, has one fingerprint, and a receiver
takes it whole or not at all. So a receiver fetches exactly the bytes it lacks, and can verify each of them,
however differently the two sides are split.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import xxhash
from torch import Tensor

from arriero.engine.weights.boxes import Box, chunks, refine
from arriero.engine.weights.layout import WeightError, some
from arriero.schemas.layouts import Piece, WorldLayout
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


@dataclass(frozen=True)
class Cell:
    """A box of a logical tensor, packed by `source` at `offset` of its part of a slot."""

    index: int
    tensor: str
    box: Box
    dtype: DType
    source: int
    held: Slice
    offset: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.tensor}[{', '.join(f'{a}:{b}' for a, b in zip(*self.box, strict=True))}]"


@dataclass(frozen=True)
class Landing:
    """A cell that a receiver takes, and the places it fills there: two for an untied copy of a tied one."""

    cell: Cell
    targets: tuple[Slice, ...]


@dataclass(frozen=True)
class Plan:
    """Cells of all source ranks; by kind of receiver, the landings of each of its ranks, sorted by source."""

    cells: tuple[Cell, ...]
    source: WorldLayout
    kinds: Mapping[str, WorldLayout]
    receivers: Mapping[str, tuple[tuple[Landing, ...], ...]]
    digest: str

    @property
    def num_sources(self) -> int:
        return len(self.source.ranks)

    def packed(self, source: int) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.source == source)

    def part_bytes(self, source: int) -> int:
        """Length of a source rank's part of a slot."""
        return max((_aligned(c.offset + c.nbytes) for c in self.cells if c.source == source), default=0)

    def received_bytes(self, kind: str, rank: int) -> int:
        return sum(landing.cell.nbytes for landing in self.receivers[kind][rank])

    def landings(self, kind: str, rank: int) -> tuple[Landing, ...]:
        """Of one receiver rank; WeightError with what there is."""
        ranks = self.receivers.get(kind)
        if ranks is None or not 0 <= rank < len(ranks):
            have = ", ".join(f"{name} ({len(r)} ranks)" for name, r in sorted(self.receivers.items()))
            raise WeightError(f"the plan has no rank {rank} of a receiver {kind!r}; it has {have}")
        return ranks[rank]


@dataclass
class _Holders:
    """Of one logical tensor: (source rank, dtype, piece, stored name), and what its receivers want of it."""

    held: list[tuple[int, DType, Piece, str]]
    wanted: list[Box]


def plan_weights(
    source: WorldLayout, receivers: Mapping[str, WorldLayout], *, cell_bytes: int = CELL_BYTES
) -> Plan:
    """Which source rank packs which cells, and where they land at each kind of receiver.

    Every element that a receiver stores is written once per update, and crosses to each receiver rank once.
    What several source ranks hold is packed by the one with the least to do. Raises WeightError, naming the
    tensor, if a receiver wants what no source has, or a source tensor reaches a receiver nowhere.
    """
    if not receivers:
        raise WeightError("no receivers to plan for")
    tensors = _tensors(source, receivers)
    packed = [0] * len(source.ranks)
    cells: list[Cell] = []
    by_tensor: dict[str, list[Cell]] = {}
    # Large tensors first: what is left to balance the ranks with is small.
    for name in sorted(tensors, key=lambda n: (-sum(box.numel for box in tensors[n].wanted), n)):
        begin = len(cells)
        for box in _cells_of(name, tensors[name], cell_bytes):
            cells.append(_place(name, box, tensors[name], len(cells), packed))
        by_tensor[name] = cells[begin:]
    return Plan(
        cells=tuple(cells),
        source=source,
        kinds=dict(receivers),
        receivers={kind: _landings(layout, by_tensor) for kind, layout in receivers.items()},
        digest=_digest(cells),
    )


def _tensors(source: WorldLayout, receivers: Mapping[str, WorldLayout]) -> dict[str, _Holders]:
    shapes = {tensor.name: tensor.shape for tensor in source.tensors}
    tensors = {name: _Holders([], []) for name in shapes}
    for rank, layout in enumerate(source.ranks):
        for stored in layout.stored:
            for piece in stored.pieces:
                tensors[piece.tensor].held.append((rank, stored.dtype, piece, stored.name))
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
    dtypes: set[DType] = {dtype for _, dtype, _, _ in holders.held}
    if len(dtypes) > 1:
        raise WeightError(f"{name} is {' and '.join(sorted(dtypes))} at the source; use one dtype")
    for _, _, piece, _ in holders.held:
        if all(a < b for a, b in zip(piece.start, piece.stop, strict=True)):
            cells = refine(cells, Box(piece.start, piece.stop))
    most = cell_bytes // max((ITEM_BYTES[dtype] for dtype in dtypes), default=4)
    return [part for cell in sorted(cells) for part in chunks(cell, max(most, 1))]


def _place(name: str, box: Box, holders: _Holders, index: int, packed: list[int]) -> Cell:
    holding = [h for h in holders.held if box.meet(Box(h[2].start, h[2].stop)) == box]
    if not holding:
        raise WeightError(f"{name}: no source rank holds elements {box.start} to {box.stop}")
    rank, dtype, piece, stored = min(holding, key=lambda h: (packed[h[0]], h[0]))
    cell = Cell(
        index=index,
        tensor=name,
        box=box,
        dtype=dtype,
        source=rank,
        held=Slice(stored, box.moved(piece.start, piece.at)),
        offset=packed[rank],
        nbytes=box.numel * ITEM_BYTES[dtype],
    )
    packed[rank] = _aligned(cell.offset + cell.nbytes)
    return cell


def _landings(
    layout: WorldLayout, by_tensor: Mapping[str, Sequence[Cell]]
) -> tuple[tuple[Landing, ...], ...]:
    ranks: list[tuple[Landing, ...]] = []
    for rank in layout.ranks:
        targets: dict[int, tuple[Cell, list[Slice]]] = {}
        for name, piece in ((stored.name, piece) for stored in rank.stored for piece in stored.pieces):
            whole = Box(piece.start, piece.stop)
            for cell in by_tensor[piece.tensor]:
                if whole.meet(cell.box) == cell.box:
                    place = Slice(name, cell.box.moved(piece.start, piece.at))
                    targets.setdefault(cell.index, (cell, []))[1].append(place)
        ordered = sorted(targets.values(), key=lambda t: (t[0].source, t[0].offset))
        ranks.append(tuple(Landing(cell, tuple(places)) for cell, places in ordered))
    return tuple(ranks)


def _digest(cells: Iterable[Cell]) -> str:
    return xxhash.xxh3_128("\n".join(map(repr, cells)).encode()).hexdigest()


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
