"""What the policy made of each prompt, from the ledger: for sources that choose by it."""

from __future__ import annotations

from arriero.schemas.ledger import Admitted, DroppedEvent, Event, Trained


class Results:
    """The share of right rollouts by record, and the version of `producers` from which on it is known.

    A group that was dropped for its results counts from the version that trained a later prompt. In a
    deterministic run batches are in the order of admission, so what a version shows is the same every time.
    """

    def __init__(self, producers: tuple[str, ...]) -> None:
        self._producers = producers
        self._ids: dict[int, str] = {}  # of prompts under way
        self._shares: dict[str, tuple[int, float]] = {}
        self._dropped: dict[int, float] = {}  # by origin, until a later one is trained

    def share(self, record: str, version: int) -> float | None:
        """In [0, 1]; None if `version` doesn't show it."""
        known = self._shares.get(record)
        return known[1] if known is not None and known[0] <= version else None

    def apply(self, event: Event) -> None:
        """Take one event of the ledger into account."""
        match event:
            case Admitted() if event.split == "train":
                self._ids[event.origin] = event.id
            case Trained() if event.node in self._producers:
                for origin, share in zip(event.origins, event.right_shares, strict=False):
                    self._know(origin, event.version, share)
                last = max(event.origins, default=-1)
                for origin in [o for o in self._dropped if o < last]:
                    self._know(origin, event.version, self._dropped.pop(origin))
            case DroppedEvent():
                for origin in event.origins:
                    if event.right_share is not None:
                        self._dropped[origin] = event.right_share
                    else:
                        self._ids.pop(origin, None)
            case _:
                pass

    def _know(self, origin: int, version: int, share: float) -> None:
        if (record := self._ids.pop(origin, None)) is not None:
            self._shares[record] = (version, share)
