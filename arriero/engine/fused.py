"""Edges that never leave a process: between nodes of one role, in memory, with answers in a chain.

A record on such an edge is lost with its process, so what it was made from stays leased until every reader
has answered for it: the lease upstream is acknowledged when the last output downstream is durable.

    durable edge -> node a -> edge in memory -> node b -> durable edge
         ^ acknowledged            ^ settled        | put
         '-------------------------'<---------------'

A crash therefore looks as if one node had died that does the work of all: the records at its entrance are
delivered again. What a source gives comes from no record, and nobody could make it again; its edge is always
durable, as is one that somebody outside the role reads.

| who waits    | for what                                   | unblocked by                             |
|--------------|--------------------------------------------|------------------------------------------|
| the producer | room on the edge (messages and bytes)      | the slowest reader's answer              |
| its leases   | the answers of all readers to what it gave | what these readers give becoming durable |
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from arriero.engine.broker import Beat, Broker, BrokerError, Consumer, DeadLetter, Depth, EdgeDecl, Producer
from arriero.engine.memory import MemoryBroker
from arriero.engine.rates import capacities, fusible
from arriero.schemas.graph import GraphSpec
from arriero.schemas.run import RunOptions

_NO_LEASE_ENDS_S = 10 * 365 * 86400.0  # its holder and the edge end together


def fused_edges(spec: GraphSpec, options: RunOptions) -> frozenset[str]:
    """The edges of `spec` that stay in a process: what the record takes too has to be durable."""
    from arriero.engine.lineage.recorder import recorded

    return fusible(spec) - (frozenset(recorded(spec)) if options.record else frozenset())


async def fused(broker: Broker, spec: GraphSpec, options: RunOptions, role: str) -> Broker:
    """`broker` for one process of `role`, with the edges between its own nodes in memory."""
    here = fused_edges(spec, options) & {n.name for n in spec.roles[role]}
    if not here:
        return broker
    room = capacities(spec)
    inner = MemoryBroker(durable=False)
    decls = [
        EdgeDecl(
            name=name,
            groups=tuple(f"{reader.name}-{i.port}" for reader, i in spec.consumers(name)),
            capacity=room[name],
            lease_s=_NO_LEASE_ENDS_S,
            max_deliveries=options.max_deliveries,
        )
        for name in sorted(here)
    ]
    await inner.declare(decls, [])
    return FusedBroker(broker, inner, here)


class FusedBroker:
    """Connection `outside`, but the edges `here` are those of `inside`. Each replica has its own.

    `end` of a producer and EdgeEnded are of this replica alone: its nodes feed one another.
    """

    def __init__(self, outside: Broker, inside: MemoryBroker, here: frozenset[str]) -> None:
        self._outside, self._inside, self._here = outside, inside, here

    def _of(self, edge: str) -> Broker:
        return self._inside if edge in self._here else self._outside

    async def declare(self, edges: Sequence[EdgeDecl], logs: Sequence[str]) -> None:
        if inside := [e.name for e in edges if e.name in self._here]:
            raise BrokerError(f"{', '.join(inside)}: in memory already; declare the edges between roles only")
        await self._outside.declare(edges, logs)

    async def edge(self, name: str) -> EdgeDecl:
        return await self._of(name).edge(name)

    def producer(self, edge: str, replica: int) -> Producer:
        if edge in self._here:
            return self._inside.producer(edge, 0)
        return self._outside.producer(edge, replica)

    def consumer(self, edge: str, group: str) -> Consumer:
        return self._of(edge).consumer(edge, group)

    async def seal(self, edge: str, producers: int) -> None:
        await self._of(edge).seal(edge, producers)

    async def depth(self, edge: str) -> Depth:
        return await self._of(edge).depth(edge)

    async def append(self, log: str, id: str, payload: bytes) -> bool:
        return await self._outside.append(log, id, payload)

    async def appended(self, log: str, id: str) -> bool:
        return await self._outside.appended(log, id)

    def follow(self, log: str, *, newest_only: bool = False) -> AsyncIterator[bytes]:
        return self._outside.follow(log, newest_only=newest_only)

    def start_pulse(self, key: str, state: Callable[[], bytes], *, interval_s: float) -> None:
        self._outside.start_pulse(key, state, interval_s=interval_s)

    async def beats(self) -> dict[str, Beat]:
        return await self._outside.beats()

    async def servers(self) -> dict[str, str]:
        return await self._outside.servers()

    async def show(self, payload: bytes) -> None:
        await self._outside.show(payload)

    def watch(self) -> AsyncIterator[bytes]:
        return self._outside.watch()

    async def evict(self, key: str) -> None:
        await self._outside.evict(key)

    async def dead_letters(self) -> list[DeadLetter]:
        return [*await self._outside.dead_letters(), *await self._inside.dead_letters()]

    async def close(self) -> None:
        await self._inside.close()
        await self._outside.close()
