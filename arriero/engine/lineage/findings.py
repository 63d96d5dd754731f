"""What a check of a record says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from arriero.engine.lineage.reader import Lineage


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that isn't as it must be."""

    check: str
    where: str
    what: str


Check = Callable[[Lineage], Iterator[Finding]]
