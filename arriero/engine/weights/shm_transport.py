"""Sharded weights on one host: all source ranks write their parts of a slot in one shared segment.

    slot = part of source rank 0, part of rank 1, ..., fingerprints of all cells (16 bytes each)

The first rank owns the segment, frees a slot and commits it; between the two every rank packs its part. A
receiver copies straight from the slot into its parameters, so any number of them costs the senders nothing.
"""

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate

import numpy as np

from arriero.engine.weights.copying import Bytes
from arriero.engine.weights.layout import WeightError
from arriero.engine.weights.plan import Plan
from arriero.engine.weights.ranks import OneRank, Ranks, first_says
from arriero.engine.weights.ring import SlotRing
from arriero.engine.weights.shm import MAX_SLOTS, Segment
from arriero.engine.weights.shm_slots import SlotInUse, SlotReader, Ticket, drain
from arriero.engine.weights.transport import Outcome, Span, lease_timeout
from arriero.schemas.weights import WeightManifest, cells_fingerprint

_POLL_S = 1e-3


class _Parts:
    """Where the parts of the source ranks and the fingerprints lie in a slot."""

    def __init__(self, plan: Plan) -> None:
        sizes = [plan.part_bytes(rank) for rank in range(plan.num_sources)]
        self.starts = (0, *accumulate(sizes))
        self.fingerprints_at = self.starts[-1]
        self.slot_bytes = self.fingerprints_at + 16 * len(plan.cells)


class ShmOutlet:
    """A source rank's end of shm://<name>. All ranks make theirs together."""

    def __init__(
        self,
        url: str,
        plan: Plan,
        ranks: Ranks | None = None,
        *,
        slots: int = 2,
        keep_every: int = 0,
        lease_timeout_s: float | None = None,
    ) -> None:
        self._ring = ring = SlotRing(slots, keep_every)
        if ring.total > MAX_SLOTS:
            raise ValueError(
                f"{ring.total} slots, but shared memory has at most {MAX_SLOTS}; lower the staleness"
            )
        self.url = url
        self.overtaken: tuple[str, ...] = ()
        self._ranks, self._parts = ranks or OneRank(), _Parts(plan)
        self._lease_timeout_s = lease_timeout(self._parts.slot_bytes, lease_timeout_s)
        segment: list[Segment] = []

        def create() -> bytes:
            fresh = Segment.create(url, plan.digest, ring.total, self._parts.slot_bytes, plan.encode())
            segment.append(fresh)
            newest = fresh.newest()
            return bytes([] if newest is None else [newest])

        # A restarted sender keeps what was announced last.
        for slot in first_says(self._ranks, create):
            ring.written(slot)
        self._segment = segment[0] if segment else Segment.open(url)

    @property
    def session(self) -> str:
        return self._segment.id

    def begin(self, version: int) -> tuple[int, Bytes]:
        slot = self._ring.slot(version)

        def free() -> bytes:
            self.overtaken = drain(self._segment, slot, self._lease_timeout_s)
            self._segment.begin(slot)
            return b""

        first_says(self._ranks, free)
        start, stop = self._parts.starts[self._ranks.rank : self._ranks.rank + 2]
        return slot, self._segment.slot(slot, start, stop - start)

    def announce(self, manifest: WeightManifest) -> None:
        if not self._ranks.rank:
            raw = np.frombuffer(bytes.fromhex("".join(manifest.cells)), dtype=np.uint8)
            self._segment.slot(manifest.slot, self._parts.fingerprints_at, raw.size)[:] = raw
            self._segment.commit(manifest.slot, manifest.version, manifest.fingerprint)
        self._ring.written(manifest.slot)

    def outcomes(self) -> Mapping[str, Outcome]:
        return self._segment.outcomes()

    def close(self) -> None:
        """Unmap. What is published stays readable until the run's owner calls `destroy`."""
        self._segment.close()


class ShmInlet:
    """A receiver rank's end. `name` is what the sender calls it, e.g. generator-0/1."""

    stable, carried = True, False

    def __init__(self, url: str, name: str) -> None:
        self._url = url
        self._reader = SlotReader(name)
        self._use: SlotInUse | None = None
        self._known: tuple[str, Plan, _Parts] | None = None

    def plan(self, session: str) -> Plan:
        return self._of(self._reader.attach(self._url, session)[0])[0]

    def newest(self, after: int = -1, wait_s: float = 0.0) -> WeightManifest | None:
        until = time.monotonic() + wait_s
        while True:
            manifest = self._newest()
            if manifest is not None and manifest.version > after:
                return manifest
            if time.monotonic() >= until:
                return None
            # The segment may not exist yet, and its sender may die: there is nothing to wait on.
            time.sleep(_POLL_S)

    @contextmanager
    def lease(self, manifest: WeightManifest, spans: Sequence[Span]) -> Generator[None, None, None]:
        ticket = Ticket(
            url=manifest.url,
            segment=manifest.session,
            slot=manifest.slot,
            slot_bytes=self._parts(manifest).slot_bytes,
            version=manifest.version,
            fingerprint=manifest.fingerprint,
        )
        with self._reader.leased(ticket) as self._use:
            try:
                yield
            finally:
                self._use = None

    def fetch(self, manifest: WeightManifest, spans: Sequence[Span]) -> Generator[Bytes, None, None]:
        use, starts = self._use, self._parts(manifest).starts
        assert use is not None, "fetch within a lease"
        for span in spans:
            yield use.segment.slot(manifest.slot, starts[span.source] + span.offset, span.nbytes)

    def report(self, version: int, error: str) -> None:
        try:
            segment, entry = self._reader.attach(self._url, None)
        except WeightError:
            return  # no sender to tell
        segment.tried(entry, version, error)

    def close(self) -> None:
        self._reader.close()

    def _newest(self) -> WeightManifest | None:
        try:
            segment, _ = self._reader.attach(self._url, None)
            if segment.replaced():
                self._reader.detach(self._url)
                segment, _ = self._reader.attach(self._url, None)
        except WeightError:
            return None
        slot = segment.newest()
        if slot is None:
            return None
        plan, parts = self._of(segment)
        state = segment.state(slot)
        raw = segment.slot(slot, parts.fingerprints_at, 16 * len(plan.cells)).tobytes()
        cells = tuple(raw[i : i + 16].hex() for i in range(0, len(raw), 16))
        if not state.written or state.closed or cells_fingerprint(segment.layout, cells) != state.fingerprint:
            return None  # overwritten meanwhile: a newer one follows
        return WeightManifest(
            version=state.version,
            url=self._url,
            session=segment.id,
            plan=segment.layout,
            slot=slot,
            cells=cells,
            fingerprint=state.fingerprint,
        )

    def _of(self, segment: Segment) -> tuple[Plan, _Parts]:
        if self._known is None or self._known[0] != segment.id:
            plan = Plan.decode(segment.plan)
            self._known = segment.id, plan, _Parts(plan)
        return self._known[1:]

    def _parts(self, manifest: WeightManifest) -> _Parts:
        return self._of(self._reader.attach(self._url, manifest.session, manifest.version)[0])[1]
