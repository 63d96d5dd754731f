"""Samples put together into the batch of a step."""

from __future__ import annotations

from collections.abc import Iterable

from arriero.schemas.messages import Batch, Sample


def batch_of(samples: Iterable[Sample]) -> Batch:
    """The batch whose parents are the records that the samples came from, in their order."""
    samples = tuple(samples)
    origins = tuple(sorted({s.origin for s in samples if s.origin >= 0}))
    return Batch(parents=tuple(dict.fromkeys(s.group for s in samples)), origins=origins, samples=samples)
