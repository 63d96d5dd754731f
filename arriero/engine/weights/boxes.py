"""Boxes of indices: products of half-open intervals, one per dimension."""

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """Indices from `start` up to, not including, `stop`. A scalar has the one box ((), ())."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def meet(self, other: "Box") -> "Box | None":
        """What both hold; None if nothing."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def minus(self, other: "Box") -> "list[Box]":
        """Disjoint boxes of what only `self` holds, at most two per dimension."""
        common = self.meet(other)
        if common is None:
            return [self]
        rest: list[Box] = []
        start, stop = list(self.start), list(self.stop)
        for dim, (low, high) in enumerate(zip(common.start, common.stop, strict=True)):
            if start[dim] < low:
                rest.append(Box(tuple(start), (*stop[:dim], low, *stop[dim + 1 :])))
            if high < stop[dim]:
                rest.append(Box((*start[:dim], high, *start[dim + 1 :]), tuple(stop)))
            start[dim], stop[dim] = low, high
        return rest

    def moved(self, origin: Sequence[int], to: Sequence[int]) -> "Box":
        """The same box where index `origin` has become index `to`."""
        shift = [b - a for a, b in zip(origin, to, strict=True)]
        return Box(
            tuple(a + s for a, s in zip(self.start, shift, strict=True)),
            tuple(b + s for b, s in zip(self.stop, shift, strict=True)),
        )


def refine(cells: Iterable[Box], cut: Box) -> list[Box]:
    """The same indices in boxes that lie either inside `cut` or outside."""
    refined: list[Box] = []
    for cell in cells:
        inside = cell.meet(cut)
        refined += [cell] if inside is None else [inside, *cell.minus(cut)]
    return refined


def chunks(box: Box, most: int) -> list[Box]:
    """The box in parts of at most `most` elements each, cut along its first dimension as far as that goes."""
    if box.numel <= most or not box.shape:
        return [box]
    rows = max(most // prod(box.shape[1:]), 1)
    cut = range(box.start[0], box.stop[0], rows)
    return [Box((a, *box.start[1:]), (min(a + rows, box.stop[0]), *box.stop[1:])) for a in cut]
