"""Takes texts, tokens and log-probabilities out of a record that is over, and says so on its chain.

    entry `redacted` -> content overwritten with nothing

The chain holds hashes of the content behind a salt that goes with it. So it holds as before, and nobody can
try a guess. Masks, versions, rewards and advantages stay, so that staleness, batches and advantages can still
be proven.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from arriero.engine.errors import UserError
from arriero.engine.lineage.chain import Chain
from arriero.engine.lineage.content import pieces
from arriero.engine.lineage.reader import Lineage
from arriero.engine.lineage.spaces import Spaces
from arriero.engine.lineage.tables import origins_of
from arriero.schemas.lineage import Anchor, BatchEntry, Committed, GroupEntry, Place, Redacted


@dataclass(frozen=True, kw_only=True)
class Redaction:
    """What was taken away, and the head of the chain since."""

    entry: Redacted
    anchor: Anchor


def redact(record: Lineage, origins: Collection[int], *, reason: str) -> Redaction:
    """Take away what came of the prompts `origins` (admission numbers), for good.

    Broken off at any point, it can be begun again. Raises UserError if nothing came of them.
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
    chain = Chain(record.url)
    if not record.redacted.issuperset(named):
        chain.commit([found], chain.last or Committed())
    spaces = Spaces(record.url)
    for name in found.groups:
        _wipe_group(spaces, record.groups[name])
    for name in found.records:
        _wipe_text(spaces, record.records[name].text)
    for name in found.batches:
        _wipe_batch(spaces, record.batches[name], wanted)
    return Redaction(entry=found, anchor=chain.anchor)


def _holds(batch: BatchEntry, wanted: set[int]) -> bool:
    """Whether the batch has content of its own that came of them."""
    return any(
        origin in wanted and (rollout < 0 or referenced)
        for origin, rollout, referenced in zip(batch.origin, batch.rollout, batch.referenced, strict=True)
    )


def _wipe_group(spaces: Spaces, entry: GroupEntry) -> None:
    _wipe_tokens(spaces, entry.arrays)
    _wipe_text(spaces, entry.text)


def _wipe_batch(spaces: Spaces, entry: BatchEntry, wanted: set[int]) -> None:
    _wipe_text(spaces, entry.salt)
    own = [k for k, rollout in enumerate(entry.rollout) if rollout < 0]
    for k, piece in zip(own, pieces(entry.lengths[k] for k in own), strict=True):
        if entry.origin[k] in wanted:
            _wipe_tokens(spaces, _part(entry.own, piece))
    read = [k for k, yes in enumerate(entry.referenced) if yes]
    for k, piece in zip(read, pieces(entry.lengths[k] for k in read), strict=True):
        if entry.origin[k] in wanted:
            place = _part(entry.reference, piece)
            values = spaces.read("reference", place, "values")["values"]
            spaces.overwrite("reference", place, {"values": _silent(values)})


def _part(place: Place, piece: slice) -> Place:
    return place.model_copy(update={"start": place.start + piece.start, "size": piece.stop - piece.start})


def _wipe_tokens(spaces: Spaces, place: Place) -> None:
    if place.size:
        logprobs = spaces.read("rollouts", place, "logprobs")["logprobs"]
        nothing = np.zeros(place.size, np.int32)
        spaces.overwrite("rollouts", place, {"tokens": nothing, "logprobs": _silent(logprobs)})


def _wipe_text(spaces: Spaces, place: Place) -> None:
    if place.size:
        spaces.overwrite("text", place, {"bytes": np.zeros(place.size, np.uint8)})


def _silent(
    logprobs: np.ndarray[tuple[int], np.dtype[np.float32]],
) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """0 where a token was sampled, NaN elsewhere, as before."""
    return np.where(np.isnan(logprobs), np.float32(np.nan), np.float32(0))
