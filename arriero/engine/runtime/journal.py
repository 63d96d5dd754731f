"""Writing to and reading from the two logs that all roles share: the ledger and control."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from arriero.engine.broker import Broker
from arriero.schemas.graph import GraphSpec
from arriero.schemas.ledger import (
    CONTROL,
    CONTROL_LOG,
    EVENT,
    LEDGER_LOG,
    Admitted,
    Control,
    DroppedEvent,
    Ended,
    Evaluated,
    Event,
    Joined,
    Learned,
    Leave,
    Restarted,
    Resumed,
    Scaled,
    Started,
    Stop,
    Trained,
    Unhealthy,
)  # fmt: skip


def event_id(event: Event) -> str:
    """What makes an event the same one when it is written again after a restart."""
    match event:
        case Admitted():
            return f"admitted:{event.id}"
        case DroppedEvent():
            return f"dropped:{event.parent}"
        case Trained():
            return f"trained:{event.node}:{event.version}"
        case Learned():
            return f"learned:{event.node}:{event.version}"
        case Evaluated():
            return f"evaluated:{event.id}"
        case Unhealthy():
            return f"unhealthy:{event.node}:{event.version}:{event.gate}"
        case Started():
            return f"started:{event.life}"
        case Restarted():
            return f"restarted:{event.name}:{event.number}"
        case Scaled():
            return f"scaled:{event.id}"
        case Resumed():
            return f"resumed:{event.number}"


async def record(broker: Broker, event: Event) -> None:
    """Append `event` to the ledger; returns when it is durable."""
    await broker.append(LEDGER_LOG, event_id(event), EVENT.dump_json(event))


async def dropped_already(broker: Broker, parent: str) -> bool:
    """Whether the ledger says that the record `parent` goes no further."""
    return await broker.appended(LEDGER_LOG, f"dropped:{parent}")


async def follow_ledger(broker: Broker) -> AsyncIterator[Event]:
    """All events from the first on, without end."""
    async for payload in broker.follow(LEDGER_LOG):
        yield EVENT.validate_json(payload)


async def announce(broker: Broker, message: Control) -> None:
    """Append `message` to the control log. A replica can fail, start again and end well: two messages."""
    match message:
        case Ended():
            name = f"{'failed' if message.error else 'ended'}:{message.node}:{message.replica}"
        case Joined():
            name = f"joined:{message.role}:{max(message.replicas)}"
        case Leave():
            name = f"leave:{message.role}:{message.replica}"
        case Stop():
            name = "stop"
    await broker.append(CONTROL_LOG, name, CONTROL.dump_json(message))


async def follow_control(broker: Broker) -> AsyncIterator[Control]:
    """All control messages from the first on, without end."""
    async for payload in broker.follow(CONTROL_LOG):
        yield CONTROL.validate_json(payload)


class Progress:
    """Which nodes have ended well, from the control log; somebody has to run `follow`.

    `leave`: replica `replica` of `role`, whose progress it is, was told to leave.
    """

    def __init__(self, spec: GraphSpec, broker: Broker, role: str, replica: int) -> None:
        self._spec, self._broker, self._here = spec, broker, (role, replica)
        self._replicas = {n.name: {*range(n.replicas)} for n in spec.nodes}
        self._ended: dict[str, set[int]] = {n.name: set() for n in spec.nodes}
        self._sinks = [n.name for n in spec.nodes if not spec.consumers(n.name)]
        self.consumers_left = {n.name: asyncio.Event() for n in spec.nodes if spec.consumers(n.name)}
        self.loops_over = {loop.name: asyncio.Event() for loop in spec.loops}
        self.sinks_ended = asyncio.Event()
        self.leave, self.stopped = asyncio.Event(), asyncio.Event()

    def ended(self, node: str) -> bool:
        return self._replicas[node] <= self._ended[node]

    async def follow(self) -> None:
        async for message in follow_control(self._broker):
            match message:
                case Ended(error=""):
                    self._ended[message.node].add(message.replica)
                    self._update()
                case Ended():  # whoever supervises the run decides: start it again, or stop all
                    pass
                case Joined():
                    for node in self._spec.roles[message.role]:
                        self._replicas[node.name].update(message.replicas)
                case Leave():
                    if (message.role, message.replica) == self._here:
                        self.leave.set()
                case Stop():
                    self.stopped.set()

    def _update(self) -> None:
        for name, event in self.consumers_left.items():
            if all(self.ended(c.name) for c, _ in self._spec.consumers(name)):
                event.set()
        for loop in self._spec.loops:
            if self.ended(loop.producer):
                self.loops_over[loop.name].set()
        if all(self.ended(name) for name in self._sinks):
            self.sinks_ended.set()
