"""Charts as inline SVG: a line, a histogram, the timeline of replicas. Every text is escaped."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from arriero.launchers.look import syncs
from arriero.launchers.trace import Slice

_W, _H, _LEFT, _BOTTOM, _TOP = 420, 170, 52, 24, 24
_BLUE, _ORANGE, _GREY = "#2b6cb0", "#c05621", "#cbd5e0"
_SYNCS = "#ed8936"
Points = Sequence[tuple[float, float]]


def line(title: str, points: Points, *, marks: Points = (), other: Points = ()) -> str:
    """Values over steps; `marks` are drawn as dots (held-out results), `other` in another colour."""
    known = [(x, y) for x, y in points if math.isfinite(y)]
    others = [(x, y) for x, y in other if math.isfinite(y)]
    every = [*known, *marks, *others]
    if not every:
        return ""
    xs, ys = [x for x, _ in every], [y for _, y in every]
    to_x, to_y = _scale(min(xs), max(xs), _LEFT, _W - 10), _scale(min(ys), max(ys), _H - _BOTTOM, _TOP)

    def drawn(values: Points, colour: str) -> str:
        path = " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in _thinned(values))
        return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>'

    dots = "".join(
        f'<circle cx="{to_x(x):.1f}" cy="{to_y(y):.1f}" r="3.5" fill="{_ORANGE}"/>' for x, y in marks
    )
    body = drawn(known, _BLUE) + (drawn(others, _ORANGE) if others else "") + dots
    return _frame(title, body, (min(xs), max(xs)), (min(ys), max(ys)))


def histogram(title: str, values: Sequence[float], *, bins: int = 24) -> str:
    """How many of `values` lie where; whole numbers that are few get a bar each."""
    if not values:
        return ""
    low, high = min(values), max(values)
    whole = all(float(v).is_integer() for v in values)
    count = min(bins, int(high - low) + 1) if whole else bins
    width = max((high - low + (1 if whole else 0)) / count, 1e-9)
    counts = [0] * count
    for value in values:
        counts[min(int((value - low) / width), count - 1)] += 1
    step = (_W - 10 - _LEFT) / count
    to_y = _scale(0, max(counts), _H - _BOTTOM, _TOP)
    bars = "".join(
        f'<rect x="{_LEFT + k * step + 0.5:.1f}" y="{to_y(n):.1f}" width="{max(step - 1, 0.5):.1f}" '
        f'height="{_H - _BOTTOM - to_y(n):.1f}" fill="{_BLUE}">'
        f"<title>{low + k * width:.4g}: {n}</title></rect>"
        for k, n in enumerate(counts)
    )
    return _frame(title, bars, (low, high), (0, max(counts)))


def timeline(rows: Mapping[str, Sequence[Slice]]) -> str:
    """A bar per replica and node: dark where it was busy, light where it waited, orange for weights."""
    spans = [s for found in rows.values() for s in found]
    if not spans:
        return ""
    begin, end = min(s[0] for s in spans), max(s[1] for s in spans)
    left, right, height = 170, 890, 16
    to_x = _scale(begin, end, left, right)
    body: list[str] = []
    for k, (name, found) in enumerate(rows.items()):
        y = 6 + k * (height + 4)
        body.append(f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">{escape(name)}</text>')
        for a, b, what in _merged(found, (end - begin) / 700):
            colour = _BLUE if what == "busy" else _SYNCS if syncs(what) else _GREY
            body.append(
                f'<rect x="{to_x(a):.1f}" y="{y}" width="{max(to_x(b) - to_x(a), 0.5):.1f}" '
                f'height="{height}" fill="{colour}"><title>{escape(what)}, {b - a:.2f} s</title></rect>'
            )
    bottom = 6 + len(rows) * (height + 4)
    body.append(f'<text x="{left}" y="{bottom + 12}">0 s</text>')
    body.append(f'<text x="{right}" y="{bottom + 12}" text-anchor="end">{end - begin:.0f} s</text>')
    return (
        f'<svg class="wide" viewBox="0 0 900 {bottom + 20}" font-size="11" '
        f'font-family="Helvetica, Arial, sans-serif">{"".join(body)}</svg>'
    )


def _merged(found: Sequence[Slice], shortest_s: float) -> list[Slice]:
    """Slices that could be seen: shorter ones are drawn as what came before."""
    merged: list[Slice] = []
    for begin, end, what in found:
        if merged and (merged[-1][2] == what or end - begin < shortest_s):
            merged[-1] = (merged[-1][0], end, merged[-1][2])
        else:
            merged.append((begin, end, what))
    return merged


def _frame(title: str, body: str, xs: tuple[float, float], ys: tuple[float, float]) -> str:
    base = _H - _BOTTOM
    return (
        f'<svg viewBox="0 0 {_W} {_H}" font-size="11" font-family="Helvetica, Arial, sans-serif">'
        f'<text x="{_LEFT}" y="14" font-weight="bold">{escape(title)}</text>'
        f'<path d="M{_LEFT} {_TOP}V{base}H{_W - 10}" fill="none" stroke="{_GREY}"/>{body}'
        f'<text x="{_LEFT - 5}" y="{base}" text-anchor="end">{ys[0]:.3g}</text>'
        f'<text x="{_LEFT - 5}" y="{_TOP + 8}" text-anchor="end">{ys[1]:.3g}</text>'
        f'<text x="{_LEFT}" y="{_H - 8}">{xs[0]:.4g}</text>'
        f'<text x="{_W - 10}" y="{_H - 8}" text-anchor="end">{xs[1]:.4g}</text></svg>'
    )


def _scale(low: float, high: float, to_low: float, to_high: float) -> Callable[[float], float]:
    """Maps [low, high] to [to_low, to_high]; one value alone to the middle."""
    span = high - low
    return lambda value: to_low + (to_high - to_low) * ((value - low) / span if span else 0.5)


def _thinned(points: Points, most: int = 800) -> Points:
    every = math.ceil(len(points) / most) if points else 1
    return [*points[::every], *points[-1:]]
