"""Checks of where content stands: nothing stands in two places, or two things in one; others find it too."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate, pairwise

import numpy as np

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
    for place, groups in record.indexed:
        where = f"the index at {place.part}/{place.start}"
        rows = [
            (g.arrays.part, start, length)
            for g in groups
            for start, length in zip(accumulate(g.lengths, initial=g.arrays.start), g.lengths, strict=False)
        ]
        rewards = [v for g in groups for v in (g.scores.values if g.scores else (math.nan,) * len(g.lengths))]
        try:
            found = record.index(place)
        except (KeyError, ValueError, OSError) as error:
            yield Finding(check="content", where=where, what=f"can't be read: {error!r:.120}")
            continue
        at = np.lexsort((found["rows"][:, 1], found["rows"][:, 0]))  # groups stand in any order
        due = sorted(zip(rows, rewards, strict=True), key=lambda pair: pair[0])
        same_rows = np.array_equal(found["rows"][at], np.array([row for row, _ in due], np.int64))
        told = [reward for _, reward in due]
        if not same_rows or not np.array_equal(found["rewards"][at], told, equal_nan=True):
            yield Finding(check="content", where=where, what="says other places or rewards than the record")
