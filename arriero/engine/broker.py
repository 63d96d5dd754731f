"""The contract of the engine that carries messages; `memory` and `nats` keep it, one suite tests both.

An *edge* is the output of one node: a bounded queue of un-acknowledged messages. Each consuming port is a
*group*: every group gets every message (BROADCAST), the replicas of one group share them (SCATTER). A message
leaves the edge when all its groups have acknowledged it, and only then gives its place back.

A *log* is an append-only list that anybody can follow from its start: the ledger, the versions of a loop.

Capacity is an upper bound. Its bytes count what the engine stores: the payload and an envelope of at most
`ENVELOPE_BYTES` a message. A replica is one `Consumer` object; a connection is one `Broker` object.

A lease that ran out is still good for an `ack` (the work was done, whoever else has the message now), while
`nack` and `extend` of it do nothing. When the server itself is killed, an acknowledgement that it hadn't
written yet is forgotten and the message delivered again, so consumers must recognise known ids.

| who waits      | for what                                        | unblocked by                        |
|----------------|-------------------------------------------------|-------------------------------------|
| `put`          | a place on the edge (messages and bytes)         | the slowest group's acknowledgement |
| `offer`        | nothing: it is refused where `put` would wait     |                                     |
| `lease`        | a message, or the end of all producers           | `put`, `end`, a lease given back    |
| `follow`       | the next entry of a log                          | `append`                            |
| `watch`        | the next view                                    | `show`                              |
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from arriero.schemas.graph import Capacity

ENVELOPE_BYTES = 512


class BrokerError(RuntimeError):
    """The engine can't do what was asked: unreachable, undeclared edge, message larger than the edge."""


class EdgeEnded(Exception):
    """All producers of the edge have ended and nothing is left that this replica could still get."""


@dataclass(frozen=True, kw_only=True)
class EdgeDecl:
    """An edge before anything is sent on it; `groups` and `producers` are known from the graph.

    Of an `open` edge more producers may come, until `seal` says how many there have been.

    A lease that is neither acknowledged nor extended within `lease_s` is delivered again; a message that was
    delivered `max_deliveries` times without acknowledgement goes to the dead letters: at once when the last
    holder gives it back, or in place of one more delivery when the last lease ran out.
    """

    name: str
    groups: tuple[str, ...]
    producers: int = 1
    capacity: Capacity = Capacity(messages=1024)
    lease_s: float = 30.0
    max_deliveries: int = 3
    open: bool = False


@dataclass(frozen=True, kw_only=True)
class Depth:
    """State of an edge: messages and bytes held; per group how many wait and how many are leased.

    A message that was given back may be counted as leased until it is delivered again.
    """

    messages: int
    bytes: int
    waiting: dict[str, int]
    leased: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Beat:
    """The last heartbeat of a replica and its age in seconds."""

    payload: bytes
    age_s: float


@dataclass(frozen=True, kw_only=True)
class DeadLetter:
    """A message that went nowhere: which group gave it up, after how many deliveries, with what error."""

    edge: str
    group: str
    id: str
    error: str
    deliveries: int
    payload: bytes


class Lease(Protocol):
    """One message, held by one replica until acknowledged. Every verb is idempotent."""

    @property
    def id(self) -> str: ...
    @property
    def payload(self) -> bytes: ...
    @property
    def deliveries(self) -> int:
        """1 on the first delivery."""
        ...

    async def ack(self) -> None:
        """Done: the message is never delivered to this group again. Returns when that is certain."""
        ...

    async def nack(self, error: str = "") -> None:
        """Give it back: delivered again at once, or dead-lettered with `error` after `max_deliveries`."""
        ...

    async def extend(self) -> None:
        """Hold it for another `lease_s`."""
        ...


class Producer(Protocol):
    """One replica's way into an edge."""

    async def put(self, id: str, payload: bytes, *, earlier: int = 0) -> bool:
        """True when the message is durable, False when its `id` was known; waits while the edge is full.

        `earlier`: how often what it was made from had been delivered in vain. Where messages aren't durable
        it counts as so many deliveries of this one, for its reader died with those who had it before.

        Messages of one producer that wait for a place get it in the order of their puts. Raises BrokerError
        for a message that can never fit, for an undeclared edge and when the server stays away. After a
        cancellation the message may or may not be on the edge; putting it again is safe.
        """
        ...

    async def offer(self, id: str, payload: bytes) -> bool | None:
        """As `put`, but None where that would wait: then nothing is stored, and the `id` isn't known."""
        ...

    async def knows(self, id: str) -> bool:
        """Whether a put of this `id` would be False; stores nothing, however full the edge is."""
        ...

    @property
    def durable(self) -> bool:
        """Messages outlive this process; if not, what they were made from is acknowledged once `settled`."""
        ...

    async def settled(self, id: str) -> None:
        """Returns when all groups have acknowledged message `id`. Only where messages aren't durable."""
        ...

    async def end(self) -> None:
        """This replica sends nothing more; puts under way are waited for. Durable and idempotent.

        Only a replica that holds a lease of this very edge may still put something in its place.
        """
        ...


class Consumer(Protocol):
    """One replica's way out of an edge, as a member of its group."""

    async def lease(self, *, wait_s: float) -> Lease | None:
        """The next message, or None after `wait_s` (0: whatever waits now).

        Raises EdgeEnded when all producers have ended, nothing waits in this group and its other replicas
        hold nothing. What this replica holds doesn't count; a message that it gives back later is leased
        as before. A cancelled call takes no message.
        """
        ...


class Broker(Protocol):
    """One process's connection to the engine."""

    async def declare(self, edges: Sequence[EdgeDecl], logs: Sequence[str]) -> None:
        """Make edges (with all their groups) and logs, before anything is sent. Idempotent."""
        ...

    async def edge(self, name: str) -> EdgeDecl:
        """How the edge was declared, by whichever connection. Raises BrokerError if it wasn't."""
        ...

    def producer(self, edge: str, replica: int) -> Producer: ...

    def consumer(self, edge: str, group: str) -> Consumer: ...

    async def seal(self, edge: str, producers: int) -> None:
        """No more producers come: an open edge ends when `producers` have, those it was declared with among
        them. Durable and idempotent.
        """
        ...

    async def depth(self, edge: str) -> Depth: ...

    async def append(self, log: str, id: str, payload: bytes) -> bool:
        """True when the entry is durable, False when its `id` was known: it is appended once."""
        ...

    async def appended(self, log: str, id: str) -> bool:
        """Whether the log has an entry `id`."""
        ...

    def follow(self, log: str, *, newest_only: bool = False) -> AsyncIterator[bytes]:
        """Entries from the first one on, in order, without end; `newest_only` starts at the last one."""
        ...

    def start_pulse(self, key: str, state: Callable[[], bytes], *, interval_s: float) -> None:
        """From a thread of its own, every `interval_s`: publish `state()` as the heartbeat of replica `key`
        and extend every lease that this connection holds, however busy the event loop is.

        `interval_s` must be well below `lease_s`. `state` runs in that thread; a beat whose `state` raises
        is left out and logged.
        """
        ...

    async def beats(self) -> dict[str, Beat]:
        """The last heartbeat of every replica; the age is by the clock of the receiver."""
        ...

    async def servers(self) -> dict[str, str]:
        """Of several servers that replicate each other, what each does: `leads`, `follows`, `is behind` or
        `is away`; about the ledger. Empty where there is one.
        """
        ...

    async def show(self, payload: bytes) -> None:
        """Show those who watch now how things are. Kept by nobody; waits for nobody."""
        ...

    def watch(self) -> AsyncIterator[bytes]:
        """What is shown from now on, without end; of what comes while the caller is busy, the newest."""
        ...

    async def evict(self, key: str) -> None:
        """Replica `key` is dead: what its last heartbeat said it had leased is delivered again at once.

        Idempotent: who has taken it since keeps it.
        """
        ...

    async def dead_letters(self) -> list[DeadLetter]:
        """All messages given up so far."""
        ...

    async def close(self) -> None:
        """Stop the pulse and disconnect. Leases still held are given back."""
        ...


def check_fits(decl: EdgeDecl, id: str, payload: bytes) -> None:
    """Raises BrokerError for an id or a payload that `decl` can never take."""
    if not (id and id.isascii() and id.isprintable() and id == id.strip() and len(id) <= 256):
        raise BrokerError(f"edge {decl.name}: id {id!r} isn't 1 to 256 printable ASCII characters")
    limit = decl.capacity.bytes - ENVELOPE_BYTES
    if len(payload) > limit:
        raise BrokerError(
            f"edge {decl.name}: message {id} has {len(payload)} bytes, the edge holds at most {limit}; "
            "raise the capacity of its node (bytes)"
        )
