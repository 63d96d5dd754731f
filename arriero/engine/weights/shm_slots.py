"""Both ends of a slot in shared memory: freeing it before it is overwritten, reading it under a lease."""

import logging
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from arriero.engine.weights.layout import StaleWeights, WeightError
from arriero.engine.weights.shm import MAX_NAME_BYTES, Segment

log = logging.getLogger(__name__)


def drain(segment: Segment, slot: int, timeout_s: float) -> tuple[str, ...]:
    """Wait until nobody reads the slot; names of those that had their time and still do."""
    segment.close_slot(slot)
    pause_s = 50e-6
    while readers := segment.readers(slot):
        now_ns = time.monotonic_ns()
        if all(now_ns - reader.since_ns >= timeout_s * 1e9 for reader in readers):
            for reader in readers:
                held_s = (now_ns - reader.since_ns) / 1e9
                log.warning(
                    "receiver %s (pid %d) has read slot %d of %s for %.1f s; going on without it",
                    *(reader.receiver, reader.pid, slot, segment.path.name, held_s),
                )
            return tuple(reader.receiver for reader in readers)
        # A stopped or dead process can't wake us, so a condition would need the same period.
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 10e-3)
    return ()


@dataclass(frozen=True)
class Ticket:
    """What a manifest says of one version in shared memory."""

    url: str
    segment: str
    slot: int
    slot_bytes: int
    version: int
    fingerprint: str


class SlotReader:
    """A receiver's mapped segments, and its entry in each."""

    def __init__(self, name: str) -> None:
        if not 0 < len(name.encode()) <= MAX_NAME_BYTES:
            raise ValueError(f"receiver name {name!r} must have 1 to {MAX_NAME_BYTES} bytes")
        self.name = name
        self._attached: dict[str, tuple[Segment, int]] = {}

    @contextmanager
    def leased(self, ticket: Ticket) -> Generator["SlotInUse", None, None]:
        """The version while it is read; its outcome is recorded at the end.

        Raises StaleWeights if it was overwritten, before or meanwhile; any other WeightError inside is
        raised with the receiver's name and the version.
        """
        segment, entry = self.attach(ticket.url, ticket.segment, ticket.version)
        try:
            with segment.leased(entry, ticket.slot, ticket.version) as state:
                self._check(ticket, segment)
                use = SlotInUse(self.name, ticket, segment, state.sequence)
                try:
                    yield use
                except WeightError as error:
                    # Torn bytes fail their fingerprint first; the cause is that the slot was overwritten.
                    use.check()
                    raise WeightError(f"{self.name}, version {ticket.version}: {error}") from error
                use.check()
        except StaleWeights:
            raise  # no outcome: it takes the newest version next
        except BaseException as error:
            segment.tried(entry, ticket.version, f"{type(error).__name__}: {error}")
            raise
        segment.tried(entry, ticket.version)

    def attach(self, url: str, session: str | None, version: int | None = None) -> tuple[Segment, int]:
        """The segment at `url` and our entry in it; WeightError if it is not `session`, if that is given."""
        attached = self._attached.get(url)
        if attached is None or (attached[0].id != session and session is not None):
            segment = Segment.open(url)
            if session is not None and segment.id != session:
                found = segment.id
                segment.close()
                raise WeightError(
                    f"{self.name}: manifest of version {version} is of another run: "
                    f"{url} is segment {found}, the manifest's was {session}"
                )
            self.detach(url)
            attached = self._attached[url] = segment, segment.claim(self.name)
        return attached

    def detach(self, url: str) -> None:
        """Unmap one segment and give back its lease."""
        if url in self._attached:
            self._attached.pop(url)[0].close()

    def close(self) -> None:
        """Unmap all segments and give back their leases."""
        for url in list(self._attached):
            self.detach(url)

    def _check(self, ticket: Ticket, segment: Segment) -> None:
        if ticket.slot >= segment.num_slots or ticket.slot_bytes != segment.slot_bytes:
            raise WeightError(
                f"{self.name}: manifest says slot {ticket.slot} of {ticket.slot_bytes} bytes, but "
                f"{ticket.url} has {segment.num_slots} of {segment.slot_bytes}"
            )
        state = segment.state(ticket.slot)
        if state.sequence == 0:
            raise WeightError(f"{self.name}: slot {ticket.slot} of {ticket.url} was never written")
        if state.closed or not state.written or state.version != ticket.version:
            raise StaleWeights(f"{self.name}: version {ticket.version} is no longer in slot {ticket.slot}")
        if state.fingerprint != ticket.fingerprint:
            raise WeightError(
                f"{self.name}: version {ticket.version} at {ticket.url} is {state.fingerprint}, but "
                f"the manifest says {ticket.fingerprint}: it is of another run"
            )


@dataclass(frozen=True)
class SlotInUse:
    """A leased version."""

    receiver: str
    ticket: Ticket
    segment: Segment
    sequence: int

    def check(self) -> None:
        """Raise StaleWeights if the sender went on without this reader."""
        if self.segment.state(self.ticket.slot).sequence != self.sequence:
            raise StaleWeights(
                f"{self.receiver} was overtaken: version {self.ticket.version} was overwritten as it was read"
            )
