"""The second consumer of the edges: what passes them is on record before the broker lets go of it.

    edges (group `record`), loops, ledger events -> held -> one commit -> acknowledged

A commit is, as a rule, a step: groups are held until the batch that names them comes, so that they stand
together. What no batch will name (held-out prompts, dropped groups, other records) goes along.

| who waits    | for what                                    | unblocked by                                  |
|--------------|---------------------------------------------|-----------------------------------------------|
| a held group | the batch that names it                     | that batch; its drop; its edge being full     |
| a held batch | its groups, if they are late on their edge  | the groups; a second in which nothing comes   |
| a producer   | room that the recorder holds                | a commit within about a second, of everything |
|              |                                             | (within half a minute if it needs over half)  |
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from arriero.engine.broker import Broker, BrokerError, EdgeEnded, Lease
from arriero.engine.codec import CodecError, decode
from arriero.engine.portable import resolve
from arriero.engine.rates import capacities
from arriero.schemas.graph import GraphSpec
from arriero.schemas.ledger import DroppedEvent, Event, loop_log
from arriero.schemas.lineage import Anchor, RunEntry, RunState
from arriero.schemas.messages import Batch, Prompt, Record, RolloutGroup, ScoredGroup, Weights

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from arriero.engine.lineage.writer import Item, LineageWriter

RECORD = "record"  # the recorder's group on an edge; those of the nodes are called <node>-<port>
_PAUSE_S = 1.0
_STILL = 30  # pauses in which nothing came: then whoever has to come may be waiting for room himself
_WAIT_S = 5.0
_HELD_BYTES = 256 << 20
_DROPS_KEPT = 1 << 16
_NEWEST = 5

Key = tuple[str, str]  # edge and id


def recorded(spec: GraphSpec) -> tuple[str, ...]:
    """The edges that are recorded: those whose records aren't whole in what every reader makes of them.

    A prompt stands in its rollout group, and that in the scored group.
    """
    found: list[str] = []
    for node in spec.nodes:
        outputs = [resolve(reader.output) for reader, _ in spec.consumers(node.name)]
        if outputs and not all(_WHOLE.get(out) is resolve(node.output) for out in outputs):
            found.append(node.name)
    return tuple(found)


_WHOLE: dict[type[Record], type[Record]] = {RolloutGroup: Prompt, ScoredGroup: RolloutGroup}


@dataclass(frozen=True)
class _Held:
    edge: str
    record: Record
    lease: Lease

    @property
    def group(self) -> RolloutGroup | None:
        record = self.record
        return (
            record.group
            if isinstance(record, ScoredGroup)
            else record
            if isinstance(record, RolloutGroup)
            else None
        )


class Recorder:
    """Records one run: `run` beside it, `event` for every event, at the end `drain` and `seal`."""

    def __init__(self, spec: GraphSpec, writer: LineageWriter, *, lease_s: float) -> None:
        self._spec, self._writer, self._lease_s = spec, writer, lease_s
        self._rooms = {name: room for name, room in capacities(spec).items() if name in recorded(spec)}
        self._held: dict[Key, _Held] = {}
        self._other: list[Item] = []  # events and versions, in the order in which they came
        self._drops: dict[str, None] = {}  # ids that no batch will name
        self._versions: dict[str, str] = {}  # the newest id by loop
        self._open = set(self._rooms)
        self._ended = asyncio.Event()
        self._arrived = asyncio.Event()
        self._moved = False
        self._storing: asyncio.Task[None] | None = None
        self.newest: deque[ScoredGroup] = deque(maxlen=_NEWEST)  # of what came, for who looks on

    def event(self, event: Event) -> None:
        """An event of the ledger; it goes with the next commit."""
        self._other.append(event)
        self._moved = True
        if isinstance(event, DroppedEvent):
            self._drops[event.parent] = None
            if len(self._drops) > _DROPS_KEPT:
                del self._drops[next(iter(self._drops))]

    def note(self, entry: RunEntry) -> None:
        """As `event`, for what happened to the run itself."""
        self._other.append(entry)

    def hurry(self, bound_s: float) -> None:
        """The run is to be over: what the store doesn't take `bound_s` from now is let go."""
        self._writer.hurry(bound_s)

    async def run(self, broker: Broker) -> None:
        """Record until cancelled. Raises the first error."""
        work = [self._follow(broker, loop.name) for loop in self._spec.loops]
        work += [self._take(broker, name) for name in self._rooms]
        tasks = [asyncio.create_task(w) for w in (*work, self._extend(), self._store_all(broker))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._storing is not None:
                await asyncio.gather(self._storing, return_exceptions=True)

    async def drain(self, broker: Broker, *, bound_s: float) -> bool:
        """When nobody sends any more: until all of it is stored, for at most `bound_s`; whether it is."""
        with suppress(TimeoutError, BrokerError):
            async with asyncio.timeout(bound_s):
                await self._ended.wait()
                for loop in self._spec.loops:
                    newest = cast(
                        "AsyncGenerator[bytes, None]", broker.follow(loop_log(loop.name), newest_only=True)
                    )
                    last = decode(await anext(newest), Weights)
                    await newest.aclose()
                    while self._versions.get(loop.name) != last.id:  # noqa: ASYNC110  # another task's work
                        await asyncio.sleep(0.01)
                return True
        return False

    def seal(self, state: RunState, model: Mapping[str, str]) -> Anchor:
        """The run is over, and left the files `model`: store what is left; the head of the chain."""
        return self._writer.close(state, [*self._other, *_seen(self._held.values())], model=model)

    # --- what comes ---------------------------------------------------------------------------------------

    async def _take(self, broker: Broker, edge: str) -> None:
        kind = cast("type[Record]", resolve(self._spec.node(edge).output))
        consumer = broker.consumer(edge, RECORD)
        try:
            while True:
                if (lease := await consumer.lease(wait_s=_WAIT_S)) is not None:
                    await self._keep(edge, kind, lease)
        except EdgeEnded:
            self._open.discard(edge)
            self._arrived.set()

    async def _keep(self, edge: str, kind: type[Record], lease: Lease) -> None:
        if self._writer.knows(edge, lease.id):
            await lease.ack()
            return
        try:
            record = decode(lease.payload, kind)
        except CodecError as error:  # whoever was to take it gives it up, and says so
            self._other.append(RunEntry(what="unreadable", detail=f"{lease.id} on {edge}: {error}"))
            await lease.ack()
            return
        self._held[edge, record.id] = _Held(edge, record, lease)
        if isinstance(record, ScoredGroup):
            self.newest.append(record)
        self._moved = True
        self._arrived.set()

    async def _follow(self, broker: Broker, loop: str) -> None:
        from arriero.engine.lineage.writer import Seen

        async for payload in broker.follow(loop_log(loop)):
            version = decode(payload, Weights)
            if not self._writer.knows(loop, version.id):
                self._other.append(Seen(loop, version))
            self._versions[loop] = version.id
            self._moved = True

    async def _extend(self) -> None:
        """Hold what is held, however long a step takes."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            for held in tuple(self._held.values()):
                await held.lease.extend()

    # --- what is stored -----------------------------------------------------------------------------------

    async def _store_all(self, broker: Broker) -> None:
        still = 0
        while True:
            self._arrived.clear()
            if not self._open and not self._held:
                self._ended.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(_PAUSE_S):
                    await self._arrived.wait()
            quiet, self._moved = not self._moved, False
            still = still + 1 if quiet else 0
            everything = not self._open or self._bytes() > _HELD_BYTES or still >= _STILL
            if everything or (quiet and self._held and await self._full(broker)):
                ready = [*self._held]
            else:
                ready = self._ready(quiet=quiet)
            if ready or (quiet and self._other):
                self._storing = asyncio.create_task(self._store(ready))  # a cancellation doesn't break it off
                await asyncio.shield(self._storing)

    async def _store(self, ready: Sequence[Key]) -> None:
        """Commit, then acknowledge."""
        held = [self._held[key] for key in ready]
        others = len(self._other)  # what comes meanwhile goes with the next; what fails, with the last
        items = [*self._other, *_seen(held)]
        await asyncio.to_thread(self._writer.commit, items)
        del self._other[:others]
        for key in ready:
            del self._held[key]
        await asyncio.gather(*(h.lease.ack() for h in held))

    def _ready(self, *, quiet: bool) -> list[Key]:
        """Batches whose groups are here, with these, and then also what waits for no batch."""
        here = {key[1]: key for key, h in self._held.items() if not isinstance(h.record, Batch)}
        found: dict[Key, None] = {}
        for key, held in self._held.items():
            if isinstance(held.record, Batch):
                named = dict.fromkeys(s.group for s in held.record.samples)
                if quiet or all(name in here or self._known(name) for name in named):
                    found.update(dict.fromkeys(here[name] for name in named if name in here))
                    found[key] = None
        if found or quiet:
            found.update(dict.fromkeys(key for key, h in self._held.items() if self._free(h)))
        return [*found]

    def _free(self, held: _Held) -> bool:
        """Whether no batch will name it."""
        group = held.group
        if group is None:
            return not isinstance(held.record, Batch)
        return group.prompt.split == "eval" or held.record.id in self._drops

    def _known(self, name: str) -> bool:
        return any(self._writer.knows(edge, name) for edge in self._rooms)

    async def _full(self, broker: Broker) -> bool:
        """Whether an edge may have no room for one more, while we hold some of it."""
        for edge in {key[0] for key in self._held}:
            depth, room = await broker.depth(edge), self._rooms[edge]
            if depth.messages >= room.messages or 2 * depth.bytes > room.bytes:
                return True
        return False

    def _bytes(self) -> int:
        return sum(len(h.lease.payload) for h in self._held.values())


def _seen(held: Iterable[_Held]) -> list[Item]:
    from arriero.engine.lineage.writer import Seen

    return [Seen(h.edge, h.record) for h in held]
