"""What every transport of the weight plane offers, so that one transaction runs over all of them.

    step       sender (every source rank)           receiver (each of its ranks)
    announce   begin, pack, announce                newest
    transfer   -                                    lease, fetch
    verify     -                                    reads back what it stored, against the manifest
    switch     -                                    takes the version
    release    outcomes                             the end of the lease, with its outcome

A receiver takes bytes, nobody pushes them: so a slow one holds up nobody else, and one that joins late asks
for the newest version and has it.
"""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from arriero.engine.weights.copying import Bytes
from arriero.engine.weights.plan import Plan
from arriero.schemas.weights import WeightManifest

BATCH_BYTES = 32 << 20  # asked for at once
SLOWEST_BYTES_PER_S = 100e6  # a receiver below this is taken for stuck, if no timeout is given


def lease_timeout(nbytes: int, timeout_s: float | None = None) -> float:
    """Seconds that a receiver may read: as configured, or 30 s or what its bytes take at 100 MB/s."""
    return max(30.0, nbytes / SLOWEST_BYTES_PER_S) if timeout_s is None else timeout_s


@dataclass(frozen=True)
class Span:
    """Bytes of one source rank's part of a slot. `into`: where they may be put at once, without a detour."""

    source: int
    offset: int
    nbytes: int
    into: Bytes | None = None


def batches(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans of one source each, up to BATCH_BYTES and one span more."""
    groups: list[list[Span]] = []
    size = 0
    for span in spans:
        if not groups or groups[-1][0].source != span.source or size >= BATCH_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(span)
        size += span.nbytes
    return groups


@dataclass(frozen=True)
class Outcome:
    """The last thing that is known of a receiver: which version it tried last, and what came of it.

    `version` is -1 before the first. `gone`: its process has ended without saying so.
    """

    version: int
    error: str = ""
    gone: bool = False


@dataclass(frozen=True)
class SyncReport:
    """Who has taken a version and verified it, and who has not, each with the reason."""

    version: int
    taken: tuple[str, ...]
    failed: Mapping[str, str]


class Outlet(Protocol):
    """A source rank's end. Its buffers are allocated at its start and used for every version."""

    @property
    def url(self) -> str:
        """Where receivers find the first source rank."""
        ...

    @property
    def session(self) -> str: ...

    @property
    def overtaken(self) -> tuple[str, ...]:
        """Receivers that `begin` no longer waited for."""
        ...

    def begin(self, version: int) -> tuple[int, Bytes]:
        """A slot that nobody reads, and this rank's part of it. Waits for leases, each up to its bound."""
        ...

    def announce(self, manifest: WeightManifest) -> None:
        """From now on receivers may lease this version; called on the first rank last."""
        ...

    def outcomes(self) -> Mapping[str, Outcome]:
        """Of every receiver that has joined and not left, by name; on the first rank."""
        ...

    def close(self) -> None: ...


class Inlet(Protocol):
    """One receiver rank's end."""

    @property
    def stable(self) -> bool:
        """What `fetch` gave stays valid until the lease ends, and not only until the next is taken."""
        ...

    @property
    def carried(self) -> bool:
        """A thread of the transport goes on receiving meanwhile, so that who fetches may verify as well."""
        ...

    def newest(self, after: int = -1, wait_s: float = 0.0) -> WeightManifest | None:
        """The newest version beyond `after`, if there is one within `wait_s`."""
        ...

    def plan(self, session: str) -> Plan:
        """What the senders of that session pack by; WeightError if they are no longer there."""
        ...

    def lease(self, manifest: WeightManifest, spans: Sequence[Span]) -> AbstractContextManager[None]:
        """Hold a version while its spans are fetched.

        Raises StaleWeights if the version is gone, at entry or at exit.
        """
        ...

    def fetch(self, manifest: WeightManifest, spans: Sequence[Span]) -> Generator[Bytes, None, None]:
        """The bytes of each span in turn: `into` itself, if they were put there. Only within a lease."""
        ...

    def report(self, version: int, error: str) -> None:
        """Tell the senders what came of a version; empty `error`: it is verified."""
        ...

    def close(self) -> None: ...


def await_outcomes(
    version: int,
    outcomes: Callable[[], Mapping[str, Outcome]],
    *,
    expected: Sequence[str] = (),
    timeout_s: float,
) -> SyncReport:
    """Wait until every receiver has taken `version` or failed; who has done neither in time is named too.

    `expected` are receivers that are waited for even if they have not joined yet.
    """
    until = time.monotonic() + timeout_s
    pause_s = 1e-4
    while True:
        known = dict(outcomes())
        taken = tuple(sorted(n for n, o in known.items() if o.version >= version and not o.error))
        failed = {name: o.error for name, o in known.items() if o.version >= version and o.error}
        dead = {name: "its process has died" for name, o in known.items() if o.gone and name not in taken}
        failed |= {name: why for name, why in dead.items() if name not in failed}
        open_ = (known.keys() | set(expected)) - set(taken) - failed.keys()
        if not open_ or time.monotonic() >= until:
            break
        # Outcomes come from other processes; a stopped one can't wake us.
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 10e-3)
    for name in open_:
        failed[name] = f"no answer within {timeout_s:.1f} s" if name in known else "it has not joined"
    return SyncReport(version, taken, failed)
