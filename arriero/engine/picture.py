"""The graph for people: Mermaid, SVG, and the table of who waits for what and is unblocked by whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape

from arriero.engine.backlog import backlog_edge
from arriero.engine.rates import backlogs, capacities, fusible, windows
from arriero.schemas.graph import GraphSpec, InputSpec, NodeSpec

BOX_H, GAP_Y, LOOP_H, MARGIN = 52, 38, 40, 28
LETTER_W = 7  # of 12 px sans-serif, and a little more
INK, ORANGE = "#4a5568", "#c05621"
BACKLOG = "Continuation"
# Of a live picture: how boxes are filled, and edges drawn, by what a node does and how its edge stands.
FILLS = {"works": "#bee3f8", "waits": "#edf2f7", "syncs": "#feebc8", "ended": "#ffffff", "starts": "#ffffff"}
STROKES = {
    "full": ("#c53030", 'stroke-width="4" '), "flows": ("#2b6cb0", 'stroke-width="2" '),
    "empty": ("#a0aec0", ""),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Live:
    """What a picture shows of a run: a key of `FILLS` and a hint by node, of `STROKES` by edge's producer."""

    nodes: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    edges: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])


def mermaid(spec: GraphSpec) -> str:
    """A Mermaid flowchart: records on solid edges, loops dotted with their staleness bound."""
    # Ids get a prefix: a node may be called `end` or `style`, which Mermaid takes for its own words.
    lines = ["flowchart LR"]
    lines += [f'    n_{n.name}["{_title(n)}<br/><small>{_class(n)}</small>"]' for n in spec.nodes]
    for n in spec.nodes:
        lines += [f"    n_{n.name} -->|{_label(i)}| n_{c.name}" for c, i in spec.consumers(n.name)]
    lines += [f"    n_{n.name} -->|{BACKLOG}| n_{n.name}" for n in spec.nodes if n.puts_back]
    for loop in spec.loops:
        label = f"{_short(loop.record)}, staleness ≤ {loop.staleness}"
        lines += [f"    n_{loop.producer} -.->|{label}| n_{reader}" for reader in _readers(spec, loop.name)]
    return "\n".join(lines) + "\n"


def table(spec: GraphSpec) -> list[tuple[str, str, str, str, str]]:
    """Rows (node, consumes, produces, waits for, unblocked by), with a header row first."""
    limits, own, inside = capacities(spec), backlogs(spec), fusible(spec)
    rows = [("node", "consumes", "produces", "waits for", "unblocked by")]
    for n in spec.nodes:
        readers = [c.name for c, _ in spec.consumers(n.name)]
        waits = [f"{i.consumes} of {i.source}" for i in n.inputs if not i.loop]
        waits += [f"a version through {i.source}" for i in n.inputs if i.loop]
        frees = [i.source if not i.loop else _producer(spec, i.source) for i in n.inputs]
        for w in windows(spec):
            if n.name in w.sources:
                waits.append(f"admission by {w.loop}: (version + {w.staleness} + 1) * {w.per_version}")
                frees.append(w.producer)
        if n.puts_back:
            waits.append(
                f"a {BACKLOG} ({own[backlog_edge(n.name)].messages} records; it never waits for room)"
            )
            frees.append(n.name)
        if readers:
            where = ", in its process" if n.name in inside else ""
            waits.append(f"room on its edge ({limits[n.name].messages} records{where})")
            frees += readers
        takes = ", ".join(f"{i.consumes} {_short(i.record)}" for i in n.inputs) or "-"
        gives = f"{n.produces} {_short(n.output)}"
        if n.puts_back:
            takes, gives = f"{takes} or 1 {BACKLOG}", f"{gives} or 1 {BACKLOG}"
        rows.append((n.name, takes, gives, "; ".join(waits), ", ".join(dict.fromkeys(frees))))
    return rows


def svg(spec: GraphSpec, live: Live | None = None) -> str:
    """A self-contained SVG: layers from left to right by distance from the sources, loops as arcs below."""
    live = live or Live()
    place = _layout(spec)
    box = _box_width(spec)
    width = max(x for x, _ in place.values()) + box + MARGIN
    bottom = max(y for _, y in place.values()) + BOX_H
    height = bottom + MARGIN + LOOP_H * len(spec.loops)
    body = [*_edges(spec, place, box, live), *_backlogs(spec, place, box), *_loops(spec, place, box, bottom)]
    body += _boxes(spec, place, box, live)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif" font-size="12">\n'
        f"<title>{escape(spec.name)}</title>\n<defs>{_tip('tip', INK)}{_tip('looptip', ORANGE)}</defs>\n"
        f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _tip(name: str, colour: str) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
    )


def _box_width(spec: GraphSpec) -> int:
    longest = max(len(text) for n in spec.nodes for text in (_title(n), _class(n)))
    return max(120, LETTER_W * longest + 28)


def _layout(spec: GraphSpec) -> dict[str, tuple[int, int]]:
    """Upper left corner of each node's box; boxes of a layer stand below one another."""
    depth: dict[str, int] = {}
    for n in spec.nodes:  # nodes read only streams that stand before them, so one pass suffices
        depth[n.name] = 1 + max((depth[i.source] for i in n.inputs if not i.loop), default=-1)
    layers: dict[int, list[str]] = {}
    for name, level in depth.items():
        layers.setdefault(level, []).append(name)
    labels = [_label(i) for n in spec.nodes for i in n.inputs if not i.loop]
    step = _box_width(spec) + max(64, LETTER_W * max(map(len, labels), default=0) + 30)
    return {
        name: (MARGIN + level * step, MARGIN + row * (BOX_H + GAP_Y))
        for level, names in layers.items()
        for row, name in enumerate(names)
    }


def _boxes(spec: GraphSpec, place: dict[str, tuple[int, int]], box: int, live: Live) -> Iterator[str]:
    for n in spec.nodes:
        x, y = place[n.name]
        activity, does = live.nodes.get(n.name, ("", ""))
        fill = FILLS.get(activity, "#ebf4ff")
        behind = 2 if n.replicas > 1 or n.ranks > 1 else 0  # copies show as cards in a pile
        for k in range(behind, -1, -1):
            yield (
                f'<rect x="{x + 4 * k}" y="{y - 4 * k}" width="{box}" height="{BOX_H}" rx="8" '
                f'fill="{fill}" stroke="#2b6cb0"/>'
            )
        middle = x + box // 2
        yield (
            f'<text x="{middle}" y="{y + 22}" text-anchor="middle" font-weight="bold" fill="#1a365d">'
            f"{escape(_title(n))}</text>"
            f'<text x="{middle}" y="{y + 39}" text-anchor="middle" fill="{INK}">'
            f"{escape(_class(n))}{_hint(does)}</text>"
        )


def _hint(text: str) -> str:
    """Shown while the pointer rests on it."""
    return f"<title>{escape(text)}</title>" if text else ""


def _edges(spec: GraphSpec, place: dict[str, tuple[int, int]], box: int, live: Live) -> Iterator[str]:
    for n in spec.nodes:
        for c, i in spec.consumers(n.name):
            (x1, y1), (x2, y2) = place[n.name], place[c.name]
            x1, y1, y2 = x1 + box, y1 + BOX_H // 2, y2 + BOX_H // 2
            half, middle = (x1 + x2) // 2, (y1 + y2) // 2
            flow, stands = live.edges.get(n.name, ("", ""))
            colour, width = STROKES.get(flow, (INK, ""))
            yield (
                f'<path d="M{x1} {y1}C{half} {y1} {half} {y2} {x2} {y2}" fill="none" stroke="{colour}" '
                f'{width}marker-end="url(#tip)"/>'
            )
            yield _text(half, middle - 6, _label(i), INK)
            yield from [_text(half, middle + 15, stands, colour)] if stands else []


def _backlogs(spec: GraphSpec, place: dict[str, tuple[int, int]], box: int) -> Iterator[str]:
    for x, y in (place[n.name] for n in spec.nodes if n.puts_back):
        right, left, top = x + 2 * box // 3, x + box // 3, y - 26
        yield (
            f'<path d="M{right} {y}C{right} {top} {left} {top} {left} {y}" fill="none" stroke="{INK}" '
            'marker-end="url(#tip)"/>'
        )
        yield _text(x + box // 2, y - 22, BACKLOG, INK)


def _loops(spec: GraphSpec, place: dict[str, tuple[int, int]], box: int, bottom: int) -> Iterator[str]:
    for number, loop in enumerate(spec.loops):
        low = bottom + 28 + LOOP_H * number
        for reader in _readers(spec, loop.name):
            # Apart by number, so that two loops at one box don't cover each other.
            x1, y1 = place[loop.producer][0] + box // 2 + 8 * number, place[loop.producer][1] + BOX_H
            x2, y2 = place[reader][0] + box // 2 - 8 * number, place[reader][1] + BOX_H
            turn = 14 if x2 < x1 else -14
            yield (
                f'<path d="M{x1} {y1}V{low - 14}Q{x1} {low} {x1 - turn} {low}H{x2 + turn}'
                f'Q{x2} {low} {x2} {low - 14}V{y2}" fill="none" stroke="{ORANGE}" stroke-width="1.5" '
                'stroke-dasharray="6 4" marker-end="url(#looptip)"/>'
            )
            label = f"{_short(loop.record)}, staleness ≤ {loop.staleness}"
            yield _text((x1 + x2) // 2, low - 6, label, ORANGE)


def _text(x: int, y: int, text: str, colour: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="middle" fill="{colour}">{escape(text)}</text>'


def _label(port: InputSpec) -> str:
    return f"{port.consumes} {_short(port.record)}" if port.consumes > 1 else _short(port.record)


def _readers(spec: GraphSpec, loop: str) -> list[str]:
    return [n.name for n in spec.nodes if any(i.loop and i.source == loop for i in n.inputs)]


def _producer(spec: GraphSpec, loop: str) -> str:
    return next(item.producer for item in spec.loops if item.name == loop)


def _title(n: NodeSpec) -> str:
    copies = f" ×{n.replicas}" if n.replicas > 1 else f" ({n.ranks} ranks)" if n.ranks > 1 else ""
    return n.name + copies


def _class(n: NodeSpec) -> str:
    return _short(n.component)


def _short(path: str) -> str:
    return path.rpartition(":")[2].rpartition(".")[2]
