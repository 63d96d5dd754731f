"""Which slot a version is written to: a ring for the newest ones, and two places for those to be kept.

    slots = 0 ... ring - 1, in turn | two more, in turn, for every `keep_every`-th version

A kept version stays until the second kept one after it is written, however many others come in between. So
whoever samples with one version for longer than the others live (an evaluation) still finds it.
"""

KEPT = 2


class SlotRing:
    """The slots of `ring` newest versions; with `keep_every` above 0 `KEPT` more. Versions only increase."""

    def __init__(self, ring: int, keep_every: int = 0) -> None:
        if ring < 2:
            raise ValueError(f"slots is {ring}; at least 2: one is written while the other is read")
        self._ring, self._every = ring, keep_every
        self.total = ring + (KEPT if keep_every else 0)
        self._last, self._last_kept = ring - 1, self.total - 1

    def keeps(self, version: int) -> bool:
        return self._every > 0 and version % self._every == 0

    def slot(self, version: int) -> int:
        """Where `version` belongs; the same until it is `written`."""
        if self.keeps(version):
            return self._ring + (self._last_kept - self._ring + 1) % KEPT
        return (self._last + 1) % self._ring

    def written(self, slot: int) -> None:
        """`slot` holds the newest version. Also for what a predecessor wrote last."""
        if slot < self._ring:
            self._last = slot
        else:
            self._last_kept = slot
