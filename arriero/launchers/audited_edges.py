"""What was recorded against the graph's edges: else it would be no node's to be computed again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from arriero.engine.errors import GraphError
from arriero.engine.lineage.findings import Finding
from arriero.engine.lineage.reader import Lineage
from arriero.engine.portable import resolve
from arriero.schemas.graph import GraphSpec
from arriero.schemas.messages import Batch, RolloutGroup, ScoredGroup


def on_edges(record: Lineage, spec: GraphSpec) -> Iterator[Finding]:
    """Groups, batches and versions that the graph has no edge for, or that came by none of them."""
    outputs = {node.name: _kind(node.output) for node in spec.nodes}
    loops = {loop.name for loop in spec.loops}
    above = {name: spec.above(name) for name in outputs}
    for name, g in record.groups.items():
        due = "ScoredGroup" if g.scores else "RolloutGroup"
        if outputs.get(g.edge) != due:
            yield Finding(check="edges", where=name, what=f"is a {due} of {g.edge}, which gives none")
        for parent in g.scores.parents if g.scores else ():
            if parent not in (g.id, g.prompt.id) and parent not in record.groups:
                yield Finding(check="edges", where=name, what=f"comes from {parent}, which isn't on record")
    for name, b in record.batches.items():
        if outputs.get(b.edge) != "Batch":
            yield Finding(check="edges", where=name, what=f"is a Batch of {b.edge}, which gives none")
            continue
        for group in (record.groups[n] for n in b.groups if n in record.groups):
            if group.edge in outputs and group.edge not in above[b.edge]:
                what = f"holds a group of {group.edge}, from which {b.edge} gets nothing"
                yield Finding(check="edges", where=name, what=what)
                break
    for w in record.weights:
        if w.loop not in loops:
            yield Finding(check="edges", where=w.id, what=f"is a version of {w.loop}, which is no loop")


def _kind(output: str) -> str:
    """What a record of `output` is recorded as: it may be of a class that a pipeline has derived."""
    with suppress(GraphError, TypeError):  # not installed here, or no class
        made = resolve(output)
        return next((k.__name__ for k in (RolloutGroup, ScoredGroup, Batch) if issubclass(made, k)), "")
    return output.rpartition(":")[2]
