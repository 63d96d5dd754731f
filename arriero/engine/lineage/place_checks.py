"""Checks of where content stands: nothing stands in two places, or two things in one; others find it too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from arriero.engine.lineage.content import Columns
from arriero.engine.lineage.findings import Finding
from arriero.engine.lineage.reader import Lineage
from arriero.schemas.lineage import Place


def places(record: Lineage) -> Iterator[Finding]:
    """Whether each group, batch and text has a place of its own, and the space `index` says which."""
    taken: defaultdict[tuple[str, int], list[tuple[int, int, str]]] = defaultdict(list)

    def take(space: str, place: Place, owner: str) -> None:
        if place.size:
            taken[space, place.part].append((place.start, place.start + place.size, owner))

    for name, g in record.groups.items():
        take("rollouts", g.arrays, g.id)  # the nodes that pass it on share its arrays
        take("text", g.text, name)
    for name, other in record.records.items():
        take("text", other.text, name)
    for name, b in record.batches.items():
        take("rollouts", b.own, name)
        take("advantages", b.advantages, name)
        take("reference", b.reference, name)
        take("text", b.salt, name)
    for (space, _), spans in taken.items():
        for (_, end, owner), (start, _, other_owner) in pairwise(sorted(spans)):
            if start < end and owner != other_owner:
                what = f"stands where {owner} stands too, in {space}"
                yield Finding(check="content", where=other_owner, what=what)
    yield from _index(record)


def _index(record: Lineage) -> Iterator[Finding]:
    for place, due in record.indexed:
        where = f"the index at {place.part}/{place.start}"
        try:
            found = record.index(place)
        except (KeyError, ValueError, OSError) as error:
            yield Finding(check="content", where=where, what=f"can't be read: {error!r:.120}")
            continue
        a, b = _in_order(found), _in_order(due)  # groups stand in any order
        if any(not np.array_equal(a[name], b[name], equal_nan=name == "rewards") for name in a):
            yield Finding(check="content", where=where, what="says other places or rewards than the record")


def _in_order(index: Columns) -> Columns:
    """By part and start."""
    at = np.lexsort((index["rows"][:, 1], index["rows"][:, 0]))
    return {name: values[at] for name, values in index.items()}
