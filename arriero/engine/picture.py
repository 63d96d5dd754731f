"""The graph for people: Mermaid, SVG, and the table of who consumes, produces, waits for and is unblocked by what."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from arriero.engine.rates import capacities, windows
from arriero.schemas.graph import GraphSpec, NodeSpec

BOX_W, BOX_H, GAP_X, GAP_Y, MARGIN = 168, 52, 96, 34, 24


def mermaid(spec: GraphSpec) -> str:
    """A Mermaid flowchart: records on solid edges, loops dotted with their staleness bound."""
    lines = ["flowchart LR", *(f'    {n.name}["{_title(n)}<br/><small>{_class(n)}</small>"]' for n in spec.nodes)]
    for n in spec.nodes:
        lines += [f"    {n.name} -->|{_short(i.record)}| {c.name}" for c, i in spec.consumers(n.name)]
    for loop in spec.loops:
        label = f"{_short(loop.record)}, staleness ≤ {loop.staleness}"
        lines += [f"    {loop.producer} -.->|{label}| {c}" for c in _readers(spec, loop.name)]
    return "\n".join(lines) + "\n"


def table(spec: GraphSpec) -> list[tuple[str, str, str, str, str]]:
    """Rows (node, consumes, produces, waits for, unblocked by), with a header row first."""
    limits = capacities(spec)
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
        if readers:
            waits.append(f"room on its edge ({limits[n.name].messages} records)")
            frees += readers
        takes = ", ".join(f"{i.consumes} {_short(i.record)}" for i in n.inputs) or "-"
        rows.append((n.name, takes, f"{n.produces} {_short(n.output)}", "; ".join(waits), ", ".join(dict.fromkeys(frees))))
    return rows


def svg(spec: GraphSpec) -> str:
    """A self-contained SVG: layers from left to right by distance from the sources, loops as arcs below."""
    place = _layout(spec)
    width = max(x for x, _ in place.values()) + BOX_W + MARGIN
    bottom = max(y for _, y in place.values()) + BOX_H
    height = bottom + MARGIN + 44 * len(spec.loops)
    body = [*_edges(spec, place), *_loops(spec, place, bottom), *_boxes(spec, place)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">\n'
        f'<title>{escape(spec.name)}</title>\n<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" '
        'markerWidth="8" markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="#4a5568"/></marker></defs>\n'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _layout(spec: GraphSpec) -> dict[str, tuple[int, int]]:
    depth: dict[str, int] = {}
    for n in spec.nodes:  # nodes read only streams that stand before them, so one pass suffices
        depth[n.name] = 1 + max((depth[i.source] for i in n.inputs if not i.loop), default=-1)
    layers: dict[int, list[str]] = {}
    for name, level in depth.items():
        layers.setdefault(level, []).append(name)
    return {
        name: (MARGIN + level * (BOX_W + GAP_X), MARGIN + row * (BOX_H + GAP_Y))
        for level, names in layers.items()
        for row, name in enumerate(names)
    }


def _boxes(spec: GraphSpec, place: dict[str, tuple[int, int]]) -> Iterator[str]:
    for n in spec.nodes:
        x, y = place[n.name]
        middle = x + BOX_W // 2
        yield (
            f'<rect x="{x}" y="{y}" width="{BOX_W}" height="{BOX_H}" rx="8" fill="#ebf4ff" stroke="#2b6cb0"/>'
            f'<text x="{middle}" y="{y + 22}" text-anchor="middle" font-weight="bold">{escape(_title(n))}</text>'
            f'<text x="{middle}" y="{y + 39}" text-anchor="middle" fill="#4a5568">{escape(_class(n))}</text>'
        )


def _edges(spec: GraphSpec, place: dict[str, tuple[int, int]]) -> Iterator[str]:
    for n in spec.nodes:
        for c, i in spec.consumers(n.name):
            (x1, y1), (x2, y2) = place[n.name], place[c.name]
            x1, y1, y2 = x1 + BOX_W, y1 + BOX_H // 2, y2 + BOX_H // 2
            half = (x1 + x2) // 2
            yield (
                f'<path d="M{x1} {y1}C{half} {y1} {half} {y2} {x2} {y2}" fill="none" stroke="#4a5568" '
                'marker-end="url(#tip)"/>'
                f'<text x="{half}" y="{(y1 + y2) // 2 - 6}" text-anchor="middle">{escape(_short(i.record))}</text>'
            )


def _loops(spec: GraphSpec, place: dict[str, tuple[int, int]], bottom: int) -> Iterator[str]:
    for number, loop in enumerate(spec.loops):
        for reader in _readers(spec, loop.name):
            x1, y1 = place[loop.producer][0] + BOX_W // 2, place[loop.producer][1] + BOX_H
            x2, y2 = place[reader][0] + BOX_W // 2, place[reader][1] + BOX_H
            low = bottom + 26 + 40 * number
            label = f"{_short(loop.record)} (staleness ≤ {loop.staleness})"
            yield (
                f'<path d="M{x1} {y1}C{x1} {low} {x1} {low} {x1 - 30} {low}L{x2 + 30} {low}C{x2} {low} {x2} {low} '
                f'{x2} {y2}" fill="none" stroke="#c05621" stroke-dasharray="6 4" marker-end="url(#tip)"/>'
                f'<text x="{(x1 + x2) // 2}" y="{low - 6}" text-anchor="middle" fill="#c05621">{escape(label)}</text>'
            )


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
