"""What a rank does with its tensors: compare them with their layout, and take arriving bytes into them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from arriero.engine.weights.copying import Bytes, Staging, as_bytes, fingerprint, load
from arriero.engine.weights.layout import (
    TORCH_DTYPES,
    WeightError,
    compare_names,
    dtype_name,
    identity,
    overlapping,
    some,
)
from arriero.engine.weights.plan import Cell, Landing, Slice, runs
from arriero.engine.weights.transport import Span
from arriero.schemas.layouts import RankLayout
from arriero.schemas.weights import DType, ShardManifest

SPAN_BYTES = 8 << 20
_DIRECT_BYTES = 64 << 10  # below, cells that lie side by side are fetched together


@dataclass(frozen=True)
class _SentCell:
    """A cell as `load` knows it."""

    cell: Cell
    fingerprint: str

    @property
    def name(self) -> str:
        return str(self.cell)

    @property
    def dtype(self) -> DType:
        return self.cell.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.cell.box.shape


def check_shards(layout: RankLayout, tensors: Mapping[str, Tensor], who: str) -> None:
    """Raise WeightError if these are not the layout's tensors: names, shapes, and floats where floats are.

    A further name for a tensor of the layout (tied) is allowed.
    """
    wanted = {stored.name: stored for stored in layout.stored}
    have = {identity(tensors[name]) for name in wanted if name in tensors}
    offered = [name for name in tensors if name in wanted or identity(tensors[name]) not in have]
    compare_names(wanted, offered, f"{who}: {{}} of {len(wanted)} tensors")
    for name, stored in wanted.items():
        tensor = tensors[name]
        dtype = dtype_name(name, tensor)
        if tuple(tensor.shape) != stored.shape:
            raise WeightError(f"{who}: {name} has shape {tuple(tensor.shape)}, its layout {stored.shape}")
        floats = tensor.is_floating_point() and TORCH_DTYPES[stored.dtype].is_floating_point
        if dtype != stored.dtype and not floats:
            raise WeightError(f"{who}: {name} is {dtype}, its layout says {stored.dtype}")
    shared = overlapping({name: tensors[name] for name in wanted})
    if shared:
        raise WeightError(f"{who}: {some(shared)} share memory, but their layout has them apart")


def landing_spans(
    landings: Sequence[Landing], into: Mapping[str, Tensor]
) -> list[tuple[Span, tuple[Landing, ...]]]:
    """What to fetch, in the order of the sources' slots, and what each fetched span is for.

    A large cell whose place is contiguous and has its dtype is fetched straight into it; small ones that lie
    side by side are fetched together.
    """
    spans: list[tuple[Span, tuple[Landing, ...]]] = []
    small: list[Landing] = []

    def flush() -> None:
        for group in runs(small, SPAN_BYTES):
            first, last = group[0].cell, group[-1].cell
            nbytes = last.offset + last.nbytes - first.offset
            spans.append((Span(first.source, first.offset, nbytes), group))
        small.clear()

    for landing in landings:
        cell = landing.cell
        place = landing.targets[0].of(into).detach() if cell.nbytes >= _DIRECT_BYTES else None
        if (
            place is None
            or place.device.type != "cpu"
            or not place.is_contiguous()
            or place.dtype != TORCH_DTYPES[cell.dtype]
        ):
            small.append(landing)
            continue
        flush()
        spans.append((Span(cell.source, cell.offset, cell.nbytes, as_bytes(place)), (landing,)))
    flush()
    return spans


def receive_span(
    manifest: ShardManifest,
    span: Span,
    landings: Sequence[Landing],
    data: Bytes,
    into: Mapping[str, Tensor],
    staging: Staging,
) -> None:
    """Put fetched bytes where they belong, and read each place back; WeightError names the cell."""
    direct = data is span.into
    for landing in landings:
        cell = landing.cell
        sent = _SentCell(cell, manifest.cells[cell.index])
        part = data[cell.offset - span.offset : cell.offset - span.offset + cell.nbytes]
        targets = landing.targets
        if direct:
            _check_landed(sent, targets[0], into, staging)
            targets = targets[1:]
        for target in targets:
            load(sent, part, target.of(into), staging)


def _check_landed(sent: _SentCell, target: Slice, into: Mapping[str, Tensor], staging: Staging) -> None:
    got = fingerprint(target.of(into), staging)
    if got != sent.fingerprint:
        raise WeightError(
            f"{sent.name} does not hold what was sent: read back {got}, sent {sent.fingerprint}"
        )
