"""Edges of a simulated graph: the broker's rules on counted records.

A record takes a place when it is put and gives it back when every reader has answered it. Replicas call for
a record as soon as they have room for one more ahead of their work, and calls are served in order, so that a
busy replica may get a record before an idle one does: as at run time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import simpy

AT_ONCE = 8  # calls of one replica and port at the same time
BACKLOG = 17  # outputs of one replica that wait for a place before it stops: 16 in its outbox, one on the way


class Sample:
    """A record in flight: which source records it came from, and which version made each of them."""

    __slots__ = ("groups", "min_version", "number")

    def __init__(self, number: int, groups: list[tuple[int, int]], min_version: int) -> None:
        self.number, self.groups, self.min_version = number, groups, min_version


class Reader:
    """One replica at one port: `want` records at most are ahead of its work, asked for or arrived."""

    def __init__(self, env: simpy.Environment, port: Port, want: int) -> None:
        self.env, self.port, self.want = env, port, want
        self.ready: deque[Sample] = deque()
        self.asked = 0
        self.arrived: simpy.Event | None = None

    def ask(self) -> None:
        """Call for as many records as there is room for."""
        while self.asked < min(AT_ONCE, self.want - len(self.ready)):
            self.asked += 1
            self.port.calls.append(self)
        self.port.serve()

    def deliver(self, record: Sample) -> None:
        self.asked -= 1
        self.ready.append(record)
        if self.arrived is not None and not self.arrived.triggered:
            self.arrived.succeed()

    def wait(self) -> simpy.Event:
        """An event that comes when a record is ready."""
        self.arrived = simpy.Event(self.env)
        if self.ready:
            self.arrived.succeed()
        return self.arrived

    def leave(self) -> list[Sample]:
        """Ask for nothing more; what was ready and not taken."""
        left = list(self.ready)
        self.ready.clear()
        self.want = self.asked = 0
        self.port.calls = deque(r for r in self.port.calls if r is not self)
        return left


class Replica:
    """One replica of a node: what it has leased and taken, and how many outputs wait for a place."""

    def __init__(self, number: int, factor: float) -> None:
        self.number, self.factor = number, factor
        self.readers: list[Reader] = []
        self.holding: list[tuple[Reader, Sample]] = []
        self.backlog = 0
        self.room: simpy.Event | None = None
        self.leaving = False
        self.process: simpy.Process | None = None
        self.began = 0.0


class Port:
    """One reading port: what waits, and who calls for it."""

    def __init__(self, edge: Edge) -> None:
        self.edge = edge
        self.waiting: deque[Sample] = deque()
        self.calls: deque[Reader] = deque()

    def serve(self) -> None:
        while self.waiting and self.calls:
            self.calls.popleft().deliver(self.waiting.popleft())

    def give_back(self, records: list[Sample]) -> None:
        self.waiting.extendleft(reversed(records))
        self.serve()


class Edge:
    """The output of one node, bounded in records."""

    def __init__(self, readers: int, capacity: int) -> None:
        self.ports = [Port(self) for _ in range(readers)]
        self.capacity, self.held = capacity, 0
        self._open: dict[int, int] = {}  # record -> ports that have yet to answer it
        self._blocked: deque[tuple[Sample, Callable[[], None]]] = deque()

    def put(self, record: Sample, stored: Callable[[], None]) -> None:
        """Store `record` as soon as there is a place, in order; then call `stored`."""
        self._blocked.append((record, stored))
        self._admit()

    def settle(self, record: Sample) -> None:
        """One port has answered `record`."""
        key = id(record)
        self._open[key] -= 1
        if not self._open[key]:
            del self._open[key]
            self.held -= 1
            self._admit()

    def _admit(self) -> None:
        while self._blocked and self.held < self.capacity:
            record, stored = self._blocked.popleft()
            self.held += 1
            self._open[id(record)] = len(self.ports)
            for port in self.ports:
                port.waiting.append(record)
            stored()
            for port in self.ports:
                port.serve()
