"""Replicas join and leave while a run goes on.

    join:  a number nobody has had -> announced to all -> its process starts -> it takes the newest version
    leave: told on the control log -> it takes nothing more, answers what it has, ends
           -> after `within_s` it is killed, and what it held is delivered to another

An edge that replicas may join is open: it ends when all that there have been have ended it. How many these
are is said as soon as any node ends that wasn't told to leave, for then the run comes to its end; who wants
to join after that comes too late.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import uuid
from collections.abc import Callable, Sequence

from arriero.engine.backlog import node_of
from arriero.engine.broker import Broker
from arriero.engine.elastic import check_role, check_scaled
from arriero.engine.errors import UserError
from arriero.engine.runtime.journal import announce, record
from arriero.launchers.hub import edges
from arriero.launchers.replicas import Replica
from arriero.launchers.roster import Roster
from arriero.launchers.supervise import Supervisor
from arriero.schemas.graph import GraphSpec
from arriero.schemas.ledger import Joined, Leave, Scaled
from arriero.schemas.run import RunOptions


class Scaling:
    """Who joins and leaves one run; `start` it when its broker is there."""

    def __init__(self, spec: GraphSpec, options: RunOptions, supervisor: Supervisor) -> None:
        self._spec, self._options, self._supervisor = spec, options, supervisor
        self._broker: Broker
        self.started = asyncio.Event()

    @property
    def roster(self) -> Roster:
        return self._supervisor.roster

    def start(self, broker: Broker) -> None:
        self._broker = broker
        self._supervisor.lost = self.lose
        self.started.set()
        self._supervisor.watch(self._seal(broker))

    def check(self, role: str, wanted: int) -> None:
        """Raises UserError if `role` can't have `wanted` replicas now."""
        if self._supervisor.ending.is_set() or self._supervisor.failed:
            raise UserError("the run comes to its end; nobody joins or leaves any more")
        if role not in self._spec.roles:
            raise UserError(f"{self._spec.name} has no role {role}; it has {', '.join(self._spec.roles)}")
        check_role(self._spec, role)
        check_scaled(self._spec, role, wanted)

    def admit(self, role: str, count: int) -> tuple[int, ...]:
        """The numbers of `count` more; `join` them. Right after `check`: the run waits for them from now."""
        return self.roster.join(role, count)

    async def join(
        self, role: str, joining: tuple[int, ...], start: Callable[[int], Replica]
    ) -> dict[int, str]:
        """Let these join, which `start` starts by their numbers; those that it can't, with the reason.

        Raises BrokerError.
        """
        await self._tell(role, joined=joining)
        await announce(self._broker, Joined(role=role, replicas=joining))
        failed: dict[int, str] = {}
        for replica in joining:
            try:
                self._supervisor.joined(start(replica))
            except OSError as error:  # too many processes, say: the run has done without it so far
                failed[replica] = str(error)
                self.lose(role, replica)
                self._supervisor.watch(self._supervisor.let_go(role, replica))
        return failed

    async def leave(self, role: str, replicas: Sequence[int], within_s: float) -> None:
        """Let these leave, and wait for none of them. Raises BrokerError."""
        self.roster.leave(role, replicas)
        await self._tell(role, leaving=tuple(replicas))
        for replica in replicas:
            await announce(self._broker, Leave(role=role, replica=replica))
            self._supervisor.watch(self._supervisor.gone(f"{role}-{replica}", within_s))

    def lose(self, role: str, replica: int) -> None:
        """It can't be started, or not again, or isn't wanted any more: its end is no failure from now on."""
        self.roster.leave(role, [replica])
        self._supervisor.watch(self._tell(role, leaving=(replica,)))

    async def _tell(self, role: str, *, joined: tuple[int, ...] = (), leaving: tuple[int, ...] = ()) -> None:
        number = len(self.roster.staying(role))
        moved = [f"{role}-{k} joins" for k in joined] + [f"{role}-{k} leaves" for k in leaving]
        print(f"arriero: {', '.join(moved)}; {role} has {number}", file=sys.stderr, flush=True)
        event = Scaled(id=uuid.uuid4().hex, role=role, joined=joined, leaving=leaving, number=number)
        await record(self._broker, event)

    async def _seal(self, broker: Broker) -> None:
        await self._supervisor.ending.wait()
        for edge in edges(self._spec, self._options):
            if edge.open:
                await broker.seal(edge.name, len(self.roster.of(self._spec.node(node_of(edge.name)).role)))
        for (
            name,
            replica,
        ) in self._supervisor.not_begun():  # loading a model may take longer than what is left
            self.lose(replica.role, replica.replica)
            print(f"arriero: {name} hadn't begun, and the run comes to its end", file=sys.stderr, flush=True)
            replica.signal(signal.SIGKILL)
