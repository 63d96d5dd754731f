"""What a rank does with its tensors: compare them with their layout, and take arriving bytes into them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from arriero.engine.weights.copying import Bytes, Staging, fingerprint, held, load
from arriero.engine.weights.layout import (
    TORCH_DTYPES,
    WeightError,
    compare_names,
    dtype_name,
    identity,
    overlapping,
    some,
)
from arriero.engine.weights.plan import Cell, Landing, runs
from arriero.engine.weights.transport import Span
from arriero.schemas.layouts import RankLayout
from arriero.schemas.weights import DType, WeightManifest

SPAN_BYTES = 8 << 20
_DIRECT_BYTES = 64 << 10  # below, cells that lie side by side are fetched together


_T = TypeVar("_T")


class Remembered(Generic[_T]):
    """What `make` gives for some tensors, made anew only when one of them lies elsewhere."""

    def __init__(self, make: Callable[[Mapping[str, Tensor]], _T]) -> None:
        self._make = make
        self._known: tuple[list[tuple[str, tuple[object, ...]]], _T] | None = None
        self._held: Mapping[str, Tensor] = {}  # while they live nothing else can lie where they do

    def __call__(self, tensors: Mapping[str, Tensor]) -> _T:
        held = {name: tensors[name] for name in tensors}
        where = _where(held)
        if self._known is None or self._known[0] != where:
            self._known, self._held = (where, self._make(held)), held
        return self._known[1]

    def forget(self) -> None:
        self._known, self._held = None, {}

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """WeightError if these tensors are not the ones of the last call."""
        assert self._known is not None, "after a call"
        for (name, before), (_, now) in zip(self._known[0], _where(tensors), strict=True):
            if before != now:
                raise WeightError(f"{name} is a new tensor at each access: what it received is lost")


def _where(tensors: Mapping[str, Tensor]) -> list[tuple[str, tuple[object, ...]]]:
    return [(name, identity(tensors[name])) for name in tensors]


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


def check_shards(layout: RankLayout, tensors: Mapping[str, Tensor], who: str, *, cast: bool) -> None:
    """Raise WeightError if these are not the layout's tensors by name, shape and dtype.

    With `cast`, any floats will do where it has floats. A further name for a tensor of it (tied) is allowed.
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
        floats = cast and tensor.is_floating_point() and TORCH_DTYPES[stored.dtype].is_floating_point
        if dtype != stored.dtype and not floats:
            raise WeightError(f"{who}: {name} is {dtype}, its layout says {stored.dtype}")
    shared = overlapping({name: tensors[name] for name in wanted})
    if shared:
        raise WeightError(f"{who}: {some(shared)} share memory, but their layout has them apart")


def check_writable(tensors: Mapping[str, Tensor]) -> None:
    """Raise WeightError if elements of one of the tensors share memory."""
    for name, tensor in tensors.items():
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            raise WeightError(f"{name} is an expanded view: its elements share memory and can't be written")


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
        target = landing.targets[0].of(into)
        place = held(target) if cell.nbytes >= _DIRECT_BYTES else target
        if isinstance(place, Tensor) or target.dtype != TORCH_DTYPES[cell.dtype]:
            small.append(landing)
            continue
        flush()
        spans.append((Span(cell.source, cell.offset, cell.nbytes, place), (landing,)))
    flush()
    return spans


def receive_span(
    manifest: WeightManifest,
    span: Span,
    landings: Sequence[Landing],
    data: Bytes,
    into: Mapping[str, Tensor],
    staging: Staging,
) -> None:
    """Put fetched bytes where they belong, and read each place back; WeightError names the cell."""
    for landing in landings:
        cell = landing.cell
        sent = _SentCell(cell, manifest.cells[cell.index])
        part = data[cell.offset - span.offset : cell.offset - span.offset + cell.nbytes]
        targets = landing.targets
        if span.into is not None:
            if data is span.into:
                _check_landed(sent, span.into, staging)
            else:
                load(sent, part, span.into, staging)
            targets = targets[1:]
        for target in targets:
            load(sent, part, target.of(into), staging)


def _check_landed(sent: _SentCell, place: Bytes, staging: Staging) -> None:
    got = fingerprint(place, staging)
    if got != sent.fingerprint:
        raise WeightError(
            f"{sent.name} does not hold what was sent: read back {got}, sent {sent.fingerprint}"
        )
