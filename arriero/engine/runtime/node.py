"""One node of the graph, running: streams in, records out, every lease answered.

| who waits     | for what                            | unblocked by                                   |
|---------------|-------------------------------------|------------------------------------------------|
| the component | a record, a version                 | its producer; the end of the stream            |
| the component | room on its own edge                | its slowest consumer; all its consumers leaving |
| the node      | its last outputs to be durable      | the broker                                     |
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from arriero.engine.broker import Broker, Lease
from arriero.engine.graph import Graph, HasWant, Node, PerRecord
from arriero.engine.rates import windows
from arriero.engine.runtime.context import Context, enter
from arriero.engine.runtime.guard import dropped, guarded, held_out, stale_groups, trained
from arriero.engine.runtime.inputs import EdgeSource, LoopSource
from arriero.engine.runtime.journal import Progress, record
from arriero.engine.runtime.outputs import Outbox
from arriero.engine.runtime.provenance import child_id, origins_of, parents_of
from arriero.engine.runtime.waits import NodeClock
from arriero.engine.stream import Loop, Source, Stream
from arriero.schemas.graph import GraphSpec
from arriero.schemas.ledger import DroppedEvent, loop_log
from arriero.schemas.messages import Batch, Dropped, Record, RolloutGroup, Weights
from arriero.schemas.run import RunOptions

if TYPE_CHECKING:
    from arriero.engine.runtime.spmd import World


class NodeRunner:
    """Runs the component of one node in one replica."""

    def __init__(
        self, graph: Graph, spec: GraphSpec, name: str, broker: Broker, options: RunOptions, context: Context,
        progress: Progress, world: World,
    ) -> None:  # fmt: skip
        node = graph.nodes[name]
        self.graph, self.spec, self.node, self.broker, self.options = graph, spec, node, broker, options
        self.progress, self.world = progress, world
        self.clock = NodeClock(node.name, bound_s=options.wait_bound_s)
        self.context = replace(context, count=self.clock.count)
        self._window = guarded(spec, node.name)
        self._loops = tuple(loop.name for loop in spec.loops if loop.producer == node.name)
        self._edges: dict[str, EdgeSource[Any]] = {}
        self._loop_inputs: list[LoopSource] = []
        self._answers: set[asyncio.Task[None]] = set()
        self._children: Counter[tuple[str, ...]] = Counter()
        self._version = 0
        self._stamps: dict[str, Record] = {}
        consumers = spec.consumers(node.name)
        self.outbox = Outbox(
            broker, broker.producer(node.name, context.replica) if consumers else None, self._loops,
            clock=self.clock, consumers_left=progress.consumers_left.get(node.name), recorded=self._recorded,
        )  # fmt: skip

    async def run(self) -> None:
        """To the end of the inputs, or until the component is done. Raises what the component raises."""
        enter(self.context)
        streams = {port: self._stream(port, stream) for port, stream in self.node.inputs.items()}
        self.outbox.start()
        for source in (*self._edges.values(), *self._loop_inputs) if self.world.rank == 0 else ():
            source.start()
        try:
            await self._drive(streams)
            await self.outbox.flush()
            await asyncio.gather(*self._answers)
            self._nothing_swallowed()
            if self.spec.consumers(self.node.name) and self.world.rank == 0:
                await self.broker.producer(self.node.name, self.context.replica).end()
        finally:
            for source in (*self._edges.values(), *self._loop_inputs):
                await source.stop()
            await self.outbox.stop()
            self.clock.stop()

    async def _drive(self, streams: dict[str, Stream[Any]]) -> None:
        if isinstance(self.node.component, PerRecord):
            await self._apply_each(cast("PerRecord[Record, Record]", self.node.component))
            return
        async with aclosing(cast("AsyncGenerator[Record, None]", self.node.component.run(**streams))) as outputs:
            async for output in outputs:
                await self.emit(output)

    async def _apply_each(self, component: PerRecord[Record, Record]) -> None:
        """As `PerRecord.run`, but a record on which `apply` raises is given back alone."""
        (source,) = self._edges.values()
        while (item := await source.next()) is not None:
            try:
                out = component.apply(item)
                out = await out if not isinstance(out, Record) else out
            except Exception as error:  # noqa: BLE001  # a record may fail: it is retried, then a dead letter
                lease, _ = source.taken.pop(item.id)
                await self._failed(lease, item.origins, f"{type(error).__name__}: {error}")
                continue
            await self.emit(out)

    async def emit(self, output: Record) -> None:
        """Publish one output of the component, or record why there is none."""
        taken = self._taken()
        if isinstance(output, Dropped):
            await self._drop(output, taken)
            return
        parents = parents_of(output, taken, self.node.name)
        records = [taken[p][1] for p in parents]
        if not isinstance(output, Weights) or records:
            id = child_id(self.node.name, parents, self._children[parents])
            output = output.stamped(id=id, parents=parents, origins=origins_of(records))
        else:
            output = output.stamped(id=f"{self.node.name}-{output.version}", parents=(), origins=())
        await self.give(output, parents)

    async def give(self, output: Record, parents: tuple[str, ...]) -> None:
        """Hand a stamped output to the outbox with the leases it answers."""
        taken = self._taken()
        self.clock.given += 1
        self.clock.tokens += _sampled_tokens(output)
        self._children[parents] += 1
        answered = parents if self._children[parents] >= self.node.rates.produces else ()
        leases = tuple(taken[p][0] for p in answered)
        if isinstance(output, Weights):
            self._version = output.version
            if parents:
                self._stamps[output.id] = batch = taken[parents[0]][1]
                self.clock.tokens += sum(int(s.mask.sum()) for s in batch.samples) if isinstance(batch, Batch) else 0
        for p in answered:
            self._release(p)
            self._children.pop(parents, None)
        await self.outbox.put(output, leases)

    async def _recorded(self, output: Record) -> None:
        """After an output is durable: a new version goes into the ledger."""
        if isinstance(output, Weights) and (batch := self._stamps.pop(output.id, None)) is not None:
            await record(self.broker, trained(self.node.name, output, batch))

    async def _drop(self, output: Dropped, taken: dict[str, tuple[Lease, Record]]) -> None:
        if output.parent not in taken:
            raise ValueError(f"{self.node.name} dropped {output.parent!r}, which it hasn't taken")
        lease, parent = taken[output.parent]
        self._release(output.parent)
        event = DroppedEvent(
            node=self.node.name, parent=parent.id, origins=parent.origins, reason=output.reason, detail=output.detail
        )
        await record(self.broker, event)
        await lease.ack()

    def _stream(self, port: str, stream: Stream[Any]) -> Stream[Any]:
        live: Source[Any]
        if isinstance(stream, Loop):
            live = LoopSource(
                self.broker, loop_log(stream.source), stream.record, name=f"loop {stream.source}", clock=self.clock,
                keep=self.context.staleness + 2 if self.options.deterministic else 1,
            )  # fmt: skip
            self._loop_inputs.append(live)
        else:
            live = self._edges[port] = EdgeSource(
                self.broker.consumer(stream.source, f"{self.node.name}-{port}"), stream.record,
                name=f"a record of {stream.source}", clock=self.clock, accept=self._accept, poisoned=self._poisoned,
                want=_want(self.spec, self.node, port),
            )  # fmt: skip
        return Stream(stream.source, stream.record, live)

    def _accept(self, lease: Lease, arrived: Record) -> Record | None:
        """What of a record the component may take: nothing held out, nothing too stale."""
        if self._window is None:
            return arrived
        if (evaluated := held_out(arrived)) is not None:
            self._answer(self._record_and_ack(evaluated, lease))
            return None
        version = self._version if self._window.producer == self.node.name else self.clock.given
        stale = stale_groups(arrived, version, self._window.staleness)
        events = [dropped(self.node.name, s) for s in stale]
        left = arrived.without(frozenset(s.group for s in stale)) if stale and isinstance(arrived, Batch) else None
        if not stale or (left is not None and left.samples):
            for event in events:
                self._answer(record(self.broker, event))
            return left or arrived
        self._answer(self._record_and_ack_all(events, lease))
        return None

    async def _record_and_ack(self, event: Any, lease: Lease) -> None:
        await self._record_and_ack_all([event], lease)

    async def _record_and_ack_all(self, events: list[Any], lease: Lease) -> None:
        for event in events:
            await record(self.broker, event)
        await lease.ack()

    async def _poisoned(self, lease: Lease, error: str) -> None:
        await self._failed(lease, (), error)

    async def _failed(self, lease: Lease, origins: tuple[int, ...], error: str) -> None:
        if lease.deliveries >= self.options.max_deliveries:
            event = DroppedEvent(
                node=self.node.name, parent=lease.id, origins=origins, reason="dead_letter", detail=error
            )
            await record(self.broker, event)
        await lease.nack(error)

    def _answer(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._answers.add(task)

    def _taken(self) -> dict[str, tuple[Lease, Record]]:
        return {id: held for source in self._edges.values() for id, held in source.taken.items()}

    def _release(self, id: str) -> None:
        for source in self._edges.values():
            source.taken.pop(id, None)

    def _nothing_swallowed(self) -> None:
        left = [id for source in self._edges.values() if source.ended for id in source.taken]
        if left:
            raise RuntimeError(
                f"{self.node.name} ended without an answer to {len(left)} inputs ({left[0]}, ...); "
                "give an output or Dropped for each"
            )


def _want(spec: GraphSpec, node: Node, port: str) -> int:
    """Records leased ahead: what a firing takes. A component that works on many at once says how many, but one
    replica takes no more than its share of a version, or it would leave the others idle."""
    if not isinstance(node.component, HasWant):
        return max(1, node.rates.consumes.get(port, 1))
    followed = {s.source for s in node.inputs.values() if isinstance(s, Loop)}
    shares = [math.ceil(w.per_version / node.replicas) for w in windows(spec) if w.loop in followed]
    return max(1, min([node.component.want(), *shares]))


def _sampled_tokens(output: Record) -> int:
    return sum(int(r.mask.sum()) for r in output.rollouts) if isinstance(output, RolloutGroup) else 0
