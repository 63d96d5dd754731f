"""One node of the graph, running: streams in, records out, every lease answered.

| who waits     | for what                            | unblocked by                                    |
|---------------|-------------------------------------|-------------------------------------------------|
| the component | a record, a version                 | its producer; the end of the stream             |
| the component | room on its own edge                | its slowest consumer; all its consumers leaving |
| the node      | its last outputs to be durable      | the broker                                      |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from arriero.engine.backlog import Backlog
from arriero.engine.broker import Broker, Lease
from arriero.engine.component import Recovers
from arriero.engine.errors import describe
from arriero.engine.fused import fused_edges
from arriero.engine.graph import Graph, PerRecord
from arriero.engine.patience import HELD_UP
from arriero.engine.runtime.context import Context, enter
from arriero.engine.runtime.frontier import FrontierFold
from arriero.engine.runtime.guard import (
    Ahead,
    guarded,
    learned,
    sampled_tokens,
    trained,
    trained_tokens,
    trainer_after,
)
from arriero.engine.runtime.handover import Handover
from arriero.engine.runtime.history import Done, History
from arriero.engine.runtime.inputs import EdgeSource
from arriero.engine.runtime.intake import Intake, remembered, want
from arriero.engine.runtime.journal import Progress
from arriero.engine.runtime.made_before import MadeBefore
from arriero.engine.runtime.outputs import Outbox
from arriero.engine.runtime.provenance import check_kind, check_place, child_id, origins_of, parents_of
from arriero.engine.runtime.versions import LoopSource
from arriero.engine.runtime.waits import NodeClock, first_error
from arriero.engine.stream import Loop, Source, Stream
from arriero.schemas.graph import GraphSpec
from arriero.schemas.ledger import DroppedEvent, Event, Step, loop_log
from arriero.schemas.messages import Dropped, Record, RolloutGroup, Weights
from arriero.schemas.run import RunOptions

if TYPE_CHECKING:
    from arriero.engine.runtime.spmd import World

_log = logging.getLogger(__name__)
LEAVE_S = 5.0  # for a component to clean up; one that computes in a thread can't be broken off


class NodeRunner:
    """Runs the component of one node in one replica."""

    def __init__(
        self,
        graph: Graph,
        spec: GraphSpec,
        name: str,
        broker: Broker,
        options: RunOptions,
        context: Context,
        progress: Progress,
        world: World,
    ) -> None:
        node = graph.nodes[name]
        self.graph, self.spec, self.node, self.broker, self.options = graph, spec, node, broker, options
        self.progress, self.world = progress, world
        self.clock = NodeClock(name, bound_s=options.wait_bound_s, remembered=remembered(spec, name))
        self.context = replace(context, count=self.clock.count)
        self._run: Any = node.component.run
        self._produces = node.rates.produces
        self._edges: dict[str, EdgeSource[Any]] = {}
        self._loop_inputs: list[LoopSource] = []
        self._children: dict[tuple[str, ...], list[asyncio.Task[None]]] = {}
        self._version = 0  # the last that this node has made
        window = guarded(spec, name)
        self._ahead = ahead = Ahead(window.producer) if window and window.producer != name else None
        if ahead is not None:
            before, over = "what it gave to be trained or dropped", progress.sinks_ended
            next_version = lambda: self.clock.wait(ahead.none_under_way(over), before)  # noqa: E731
            self.context = replace(self.context, next_version=next_version)
        self._makes_versions = issubclass(node.output, Weights)
        self._learns = isinstance(node.component, Recovers) and not self._makes_versions
        self._learned = 0  # steps of this node that aren't versions
        self._trained = Done(name if self._makes_versions else trainer_after(spec, name, window))
        self._frontier, self._done = FrontierFold(), self._trained
        heard = [self._trained.apply, self._ahead.apply if self._ahead else self._frontier.apply]
        if self._learns:
            self._done = Done(name)
            heard += [self._done.apply] + [self._frontier.apply] * (self._ahead is not None)
        self.history = History(name, context.replica, broker, heard)
        self._has_consumers = bool(spec.consumers(name))
        self._before = MadeBefore(name, self.history, carried=self._has_consumers)
        self.outbox = self._open_outbox()
        self.intake = Intake(
            name,
            broker,
            self.outbox,
            window=window,
            done=self._done,
            version=lambda: self._ahead.version if self._ahead else self._version,
            max_deliveries=options.max_deliveries,
        )
        self._handover = self._open_handover() if spec.node(name).puts_back else None

    def _open_outbox(self) -> Outbox:
        name, replica = self.node.name, self.context.replica
        return Outbox(
            self.broker,
            self.broker.producer(name, replica) if self._has_consumers else None,
            tuple(loop.name for loop in self.spec.loops if loop.producer == name),
            clock=self.clock,
            consumers_left=self.progress.consumers_left.get(name),
            max_deliveries=self.options.max_deliveries,
            one_by_one=self._learns,
        )

    def _open_handover(self) -> Handover:
        return Handover(
            self.node.name,
            self.broker,
            self.outbox,
            replica=self.context.replica,
            clock=self.clock,
            consumers_left=self.progress.consumers_left.get(self.node.name),
            max_deliveries=self.options.max_deliveries,
        )

    # --- its life -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """To the end of the inputs, or until the component is done. Raises the first error as it was."""
        enter(self.context)
        HELD_UP.set(self.clock.held_up)
        streams: dict[str, Any] = {p: self._stream(p, stream) for p, stream in self.node.inputs.items()}
        if self._handover is not None:
            streams["backlog"] = self._backlog(self._handover)
        watchers: list[asyncio.Task[None]] = []
        if self.world.rank == 0:
            # With a backlog a replica leases only from where its component asks for something.
            for source in self._loop_inputs if self._handover else self._sources():
                source.start()
            watchers = [asyncio.create_task(w) for w in self._watches()]
        work = asyncio.create_task(self._work(streams), name=self.node.name)
        try:
            await first_error(work, self.outbox.failed, *watchers)
        finally:
            for task in (work, *watchers):
                task.cancel()
            _, late = await asyncio.wait({work, *watchers}, timeout=LEAVE_S)
            if late:
                _log.warning(
                    "%s doesn't come to an end; its leases are given back all the same", self.node.name
                )
            await asyncio.gather(*(source.stop() for source in self._sources()))
            await self.outbox.stop()
            self.clock.stop()

    async def leave(self) -> None:
        """Take nothing more from outside this process; the component ends when it has answered the rest."""
        inside = fused_edges(self.spec, self.options)
        for port, source in self._edges.items():
            if port not in self.node.inputs or self.node.inputs[port].source not in inside:
                await source.close()

    def _sources(self) -> list[EdgeSource[Any] | LoopSource]:
        return [*self._edges.values(), *self._loop_inputs]

    def _watches(self) -> list[Coroutine[Any, Any, None]]:
        """What runs beside the component; an error in it ends the node."""
        watches: list[Coroutine[Any, Any, None]] = []
        if self._remembers:
            watches.append(self.history.follow())
        if self._handover is not None:
            watches += [self._handover.end_with_the_prompts(), self._handover.lengths.follow()]
        return watches

    @property
    def _remembers(self) -> bool:
        """Whether it matters to this node what was before it."""
        return self._ahead is not None or self._makes_versions or self._learns

    async def _recall(self) -> tuple[Step, ...]:
        """The steps of earlier lives, once the ledger is read up to now."""
        if self._remembers:
            await self.clock.wait(self.history.read.wait(), "the ledger up to now")
        return self._before.recall()

    async def _work(self, streams: dict[str, Any]) -> None:
        steps = await self._recall()
        self._learned = self._before.newest if self._learns else 0
        if self._makes_versions or self._learns:
            logs = [loop_log(loop.name) for loop in self.spec.loops if loop.producer == self.node.name]
            announced = -1
            if self.world.rank == 0:
                staleness = self.context.staleness
                announced = await self._before.announced(self.broker, logs, staleness=staleness)
            enter(replace(self.context, made=steps, announced=announced, frontier=self._frontier.frontier))
        try:
            await self._drive(streams)
        except SystemExit as error:  # would end the process in the middle of everything, perhaps with code 0
            raise RuntimeError(f"{self.node.name} called sys.exit({error.code!r}); raise an error") from error
        await self.outbox.sent()
        self._nothing_swallowed()
        if self._has_consumers and self.world.rank == 0:
            end = self.broker.producer(self.node.name, self.context.replica).end()
            await self.clock.wait(end, "the end of its edge to be durable")
        await self.outbox.flush()  # after the end: a reader that gathers records answers no sooner
        if self._handover is not None:
            await self._handover.end()

    async def _drive(self, streams: dict[str, Any]) -> None:
        component: object = self.node.component
        if isinstance(component, PerRecord) and self.world.ranks == 1:
            await self._apply_each(cast("PerRecord[Record, Record]", component))
            return
        async with aclosing(cast("AsyncGenerator[Record, None]", self._run(**streams))) as outputs:
            async for output in outputs:
                await self.emit(output)

    async def _apply_each(self, component: PerRecord[Record, Record]) -> None:
        """As `PerRecord.run`, but a record on which `apply` raises is given back alone."""
        (source,) = self._edges.values()
        while (item := await source.next()) is not None:
            try:
                out = component.apply(item)
                out = await out if not isinstance(out, Record) else out
            except asyncio.CancelledError as error:
                if cast("asyncio.Task[Any]", asyncio.current_task()).cancelling():
                    raise
                failure: BaseException = error  # of something that `apply` waited for
            except Exception as error:  # noqa: BLE001  # a record may fail: it is retried, then a dead letter
                failure = error
            else:
                await self.emit(out)
                continue
            self.clock.count("failed_records", 1)
            detail = describe(failure)
            await self.intake.failed(source.forget(item.id), item.origins, detail)
            source.came_back()

    # --- outputs ------------------------------------------------------------------------------------------

    async def emit(self, output: Record) -> None:
        """Publish one output of the component, or record why there is none."""
        taken = self._taken()
        if isinstance(output, Dropped):
            self._drop(output, taken)
            return
        check_kind(output, self.node.output, self.node.name)
        if isinstance(output, Weights) and self._before.holds(output):
            self._version = output.version
            await self.outbox.put(self._before.again(output), ())
            return
        parents = parents_of(output, taken, self.node.name)
        if self._edges:
            check_place(output, parents, self.node.name, version=self._version)
        records = [taken[p] for p in parents]
        if not isinstance(output, Weights) or records:
            name = child_id(self.node.name, parents, len(self._children.get(parents, ())))
            name += self._before.life if isinstance(output, Weights) else ""
            output = output.stamped(id=name, parents=parents, origins=origins_of(records))
        else:
            output = output.stamped(id=f"{self.node.name}-{output.version}", parents=(), origins=())
        await self.give(output, parents)

    async def give(self, output: Record, parents: tuple[str, ...], *, first: Event | None = None) -> None:
        """Hand a stamped output to the outbox with the leases it answers; `first` is recorded before it."""
        taken = self._taken()
        held = [s.taken[p][0] for s in self._edges.values() for p in parents if p in s.taken]
        earlier = max((lease.deliveries - 1 for lease in held), default=0)
        self.clock.given += 1
        self.clock.tokens += sampled_tokens(output)
        beside: Event | None = None
        if isinstance(output, Weights):
            self._version = output.version
            if parents:
                batch = taken[parents[0]]
                beside = trained(self.node.name, output, batch)
                self.clock.tokens += trained_tokens(batch)
        after: Event | None = None
        if self._learns:
            self._learned += 1
            after = learned(self.node.name, self._learned, output, parents)
        # What a crash made come again has been trained already, and replaces nothing.
        if self._ahead is not None and not (
            output.origins and all(o in self._trained for o in output.origins)
        ):
            self._ahead.gave(output)
        if self._handover is not None and isinstance(output, RolloutGroup):
            self._handover.lengths.note(output)
        siblings = self._children.pop(parents, [])
        if parents and len(siblings) + 1 >= self._produces:
            leases = tuple(lease for p in parents for lease in self._answer(p))
            await self.outbox.put(
                output, leases, first=first, beside=beside, after=after, siblings=siblings, earlier=earlier
            )
        else:
            answer = await self.outbox.put(output, (), first=first, beside=beside, earlier=earlier)
            if parents:
                self._children[parents] = [*siblings, answer]

    def _drop(self, output: Dropped, taken: dict[str, Record]) -> None:
        if output.parent not in taken:
            raise ValueError(
                f"{self.node.name} dropped {output.parent!r}, which it hasn't taken or has answered already"
            )
        event = DroppedEvent(
            node=self.node.name,
            parent=output.parent,
            origins=taken[output.parent].origins,
            reason=output.reason,
            detail=output.detail,
            right_share=output.right_share,
        )
        self.outbox.settle((event,), tuple(self._answer(output.parent)))

    # --- inputs -------------------------------------------------------------------------------------------

    def _stream(self, port: str, stream: Stream[Any]) -> Stream[Any]:
        live: Source[Any]
        if isinstance(stream, Loop):
            live = LoopSource(
                self.broker,
                loop_log(stream.source),
                stream.record,
                name=f"loop {stream.source}",
                clock=self.clock,
                keep=self.context.staleness + 2,
                keep_every=self.context.evaluates_every,
                over=self.progress.loops_over[stream.source],
            )
            self._loop_inputs.append(live)
        else:
            live = self._edges[port] = EdgeSource(
                self.broker.consumer(stream.source, f"{self.node.name}-{port}"),
                stream.record,
                name=f"a record of {stream.source}",
                clock=self.clock,
                accept=self.intake.accept,
                poisoned=self.intake.poisoned,
                again=self.intake.again,
                want=want(self.spec, self.node, port),
                max_deliveries=self.options.max_deliveries,
                settled=self._handover.settled if self._handover else self.intake.settled,
            )
        return Stream(stream.source, stream.record, live)

    def _backlog(self, handover: Handover) -> Backlog:
        (prompts,) = self._edges.values()
        self._edges["backlog"] = handover.connect(prompts, self.intake)
        return Backlog(handover)

    def _taken(self) -> dict[str, Record]:
        return {key: record for s in self._edges.values() for key, (_, record) in s.taken.items()}

    def _answer(self, key: str) -> list[Lease]:
        """The leases of the taken record `key`, one for each port it came through; it is taken no longer."""
        held = [(s, s.taken[key][0]) for s in self._edges.values() if key in s.taken]
        for source, _ in held:
            source.answer(key)
        return [lease for _, lease in held]

    def _nothing_swallowed(self) -> None:
        left = [key for source in self._edges.values() if source.ended for key in source.taken]
        if left:
            raise RuntimeError(
                f"{self.node.name} ended without an answer to {len(left)} inputs ({left[0]}, ...); "
                "give an output or Dropped for each"
            )
