"""Takes texts, tokens and log-probabilities out of a record that is over, and says so on its chain.

    entry `redacted` -> content overwritten with nothing

The chain holds hashes of the content behind a salt that goes with it. So it holds as before, and nobody can
try a guess. Masks, versions, rewards and advantages stay, so that staleness, batches and advantages can still
be proven.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain as chain_of
from typing import Any

import numpy as np
import numpy.typing as npt

from arriero.engine.errors import UserError
from arriero.engine.lineage.chain import Chain, ChainError
from arriero.engine.lineage.content import pieces, readings
from arriero.engine.lineage.reader import Lineage
from arriero.engine.lineage.spaces import Spaces
from arriero.engine.lineage.tables import origins_of
from arriero.schemas.lineage import Anchor, BatchEntry, Committed, GroupEntry, Place, RecordEntry, Redacted


@dataclass(frozen=True, kw_only=True)
class Redaction:
    """What was taken away, and the head of the chain since."""

    entry: Redacted
    anchor: Anchor


def redact(record: Lineage, origins: Collection[int], *, reason: str) -> Redaction:
    """Take away what came of the prompts `origins` (admission numbers), for good.

    What was made anew under the same id, and what an unfinished commit left, goes too. Broken off at any
    point, it can be begun again. Raises UserError if nothing came of them.
    """
    wanted = {*origins}
    found = Redacted(
        groups=tuple(name for name, g in record.groups.items() if wanted & {*origins_of(g)}),
        records=tuple(name for name, r in record.records.items() if wanted & {*r.origins} and r.text.size),
        batches=tuple(name for name, b in record.batches.items() if _holds(b, wanted)),
        reason=reason,
    )
    named = (*found.groups, *found.records, *found.batches)
    if not named:
        raise UserError("nothing on record came of these prompts; see --sql 'select id, row from prompts'")
    try:
        chain = Chain(record.url)
    except (ChainError, OSError) as error:
        raise UserError(f"the record can't be redacted: {error}") from error
    if not record.redacted.issuperset(named):
        chain.commit([found], chain.last or Committed())
    spaces = Spaces(record.url, chain.last.ends if chain.last else None)
    gone = _Gone(spaces)
    for entry in chain_of(
        record.groups.values(), record.records.values(), record.batches.values(), record.replaced
    ):
        gone.add(entry, wanted)
    gone.overwrite()
    spaces.trim()
    chain.release()
    return Redaction(entry=found, anchor=chain.anchor)


def _holds(batch: BatchEntry, wanted: set[int]) -> bool:
    """Whether the batch has content of its own that came of them."""
    read = {k for k, _, _ in readings(batch)}
    of_its_own = (k for k, rollout in enumerate(batch.rollout) if rollout < 0 or k in read)
    return any(batch.origin[k] in wanted for k in of_its_own)


class _Gone:
    """Places to be overwritten, array by array, so that each chunk is written once."""

    def __init__(self, spaces: Spaces) -> None:
        self._spaces = spaces
        self._places: defaultdict[str, dict[tuple[int, int], Place]] = defaultdict(dict)

    def add(self, entry: GroupEntry | RecordEntry | BatchEntry, wanted: set[int]) -> None:
        """What came of the prompts `wanted`."""
        match entry:
            case GroupEntry() if wanted & {*origins_of(entry)}:
                self._tokens(entry.arrays)
                self._add("text", entry.text, "bytes")
            case RecordEntry() if wanted & {*entry.origins}:
                self._add("text", entry.text, "bytes")
            case BatchEntry() if _holds(entry, wanted):
                self._batch(entry, wanted)
            case _:
                pass

    def overwrite(self) -> None:
        """With nothing."""
        for path, places in self._places.items():
            self._spaces.rewrite(path, places.values(), _nothing)

    def _batch(self, entry: BatchEntry, wanted: set[int]) -> None:
        """Mismatched responses too, for any of them may be one to a wanted prompt, beside another."""
        self._add("text", entry.salt, "bytes")
        mismatched = {k for k, more in enumerate(entry.more) if more.get("mismatched")}
        gone = mismatched | {k for k, origin in enumerate(entry.origin) if origin in wanted}
        own = [k for k, rollout in enumerate(entry.rollout) if rollout < 0]
        for k, piece in zip(own, pieces(entry.lengths[k] for k in own), strict=True):
            if k in gone:
                self._tokens(_part(entry.own, piece))
        for k, _, piece in readings(entry):
            if k in gone:
                self._add("reference", _part(entry.reference, piece), "values")

    def _tokens(self, place: Place) -> None:
        self._add("rollouts", place, "tokens", "logprobs")

    def _add(self, space: str, place: Place, *names: str) -> None:
        for name in names if place.size else ():
            self._places[f"{space}/{place.part}/{name}"][place.start, place.size] = place


def _part(place: Place, piece: slice) -> Place:
    return place.model_copy(update={"start": place.start + piece.start, "size": piece.stop - piece.start})


def _nothing(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """0; NaN where there is none anyway: off the mask."""
    if values.dtype.kind != "f":
        return np.zeros_like(values)
    return np.where(np.isnan(values), values, values.dtype.type(0))
