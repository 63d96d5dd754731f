"""The replicas of a run on a cluster, as the hub sees them: it never touches a process, their agents do.

| a member is | because                             | and becomes by                          |
|-------------|-------------------------------------|-----------------------------------------|
| expected    | the graph has it                    | Arrived: running                        |
| running     | its agent has started the process   | Left: ended                             |
| ended       | the process has ended               | `restart`: expected, in the same life   |

A guest is a member whom a later submission brought: its agent has asked, and may vanish with its own job.
"""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import Callable, Sequence

from arriero.engine.broker import Broker, BrokerError
from arriero.schemas.crew import (
    CREW_LOG,
    ORDERS_LOG,
    REPORT,
    Arrived,
    Asks,
    Leaving,
    Left,
    Order,
    Welcome,
    replica_name,
)  # fmt: skip
from arriero.schemas.graph import GraphSpec

_NAMED = 5  # of those that are missed
_VANISHED_S = 10.0  # for an agent to answer an order


class Member:
    """One replica; a `Replica` of the supervision."""

    def __init__(
        self, role: str, replica: int, host: int, log: str, crew: RemoteCrew, guest: bool = False
    ) -> None:
        self.role, self.replica, self.log, self.hub = role, replica, log, False
        self.name = replica_name(role, replica, host)
        self.life = ""
        self.guest = guest
        self._host, self._crew, self._killed = host, crew, False
        self._left: asyncio.Future[Left] = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        return not self._left.done()

    async def ended(self) -> int:
        return (await asyncio.shield(self._left)).code

    def said(self) -> str:
        return self._left.result().said if self._left.done() else ""

    def signal(self, number: signal.Signals) -> None:
        """Only SIGKILL: who is to leave in order is told so by the control log."""
        assert number is signal.SIGKILL
        if self.alive and self.life and not (self.guest and self._killed):
            self._killed = True
            self._crew.order(Order(what="kill", life=self.life))
            if self.guest:
                asyncio.get_running_loop().call_later(_VANISHED_S, self._vanished)

    def _vanished(self) -> None:
        """Its agent doesn't even say that the process was killed."""
        if self.alive:
            self._crew.on_guest(self)
            self.report(Left(name=self.name, life=self.life, code=-signal.SIGKILL))

    def report(self, left: Left) -> None:
        if not self._left.done():
            self._left.set_result(left)

    def again(self) -> Member:
        """The same replica, expected anew."""
        member = Member(self.role, self.replica, self._host, self.log, self._crew, self.guest)
        member.life = self.life
        return member


class RemoteCrew:
    """All replicas of a run; `hosts` are those of roles whose ranks need more than one.

    `log` says where the output of a replica is found, with {} for its name.
    """

    def __init__(self, spec: GraphSpec, broker: Broker, hosts: dict[str, int], log: str) -> None:
        self._broker, self._log = broker, log
        self.on_guest: Callable[[Asks | Leaving | Member], None] = lambda _: None
        places = [
            (role, replica, host)
            for role, nodes in spec.roles.items()
            for replica in range(nodes[0].replicas)
            for host in range(hosts.get(role, 1))
        ]
        members = [Member(*place, log.format(replica_name(*place)), self) for place in places]
        self._members = {m.name: m for m in members}
        self._arrived = asyncio.Event()
        self._sending: set[asyncio.Task[None]] = set()
        self.failed: BrokerError | None = None  # of an order that couldn't be given

    @property
    def processes(self) -> Sequence[Member]:
        return list(self._members.values())

    def restart(self, name: str) -> Member:
        self._members[name] = member = self._members[name].again()
        self.order(Order(what="start", life=member.life))
        return member

    def welcome(self, asks: Asks, replica: int) -> Member:
        """A guest has its number; its agent is told so, and starts it."""
        log = self._log.format(replica_name(asks.role, replica, 0))
        member = Member(asks.role, replica, 0, log, self, guest=True)
        member.life = asks.life
        self._members[member.name] = member
        self.order(Welcome(life=asks.life, replica=replica))
        return member

    def guest(self, name: str, life: str) -> Member | None:
        """The guest `name`, if this is its life."""
        member = self._members.get(name)
        return member if member is not None and member.guest and member.life == life else None

    def order(self, order: Order | Welcome) -> None:
        """Give it, without waiting until it is stored."""
        task = asyncio.create_task(self._give(order))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def follow(self) -> None:
        """Take reports, without end. Raises BrokerError."""
        async for payload in self._broker.follow(CREW_LOG):
            report = REPORT.validate_json(payload)
            if isinstance(report, Asks | Leaving):
                self.on_guest(report)
                continue
            member = self._members.get(report.name)
            if member is None:
                continue
            member.life = report.life
            match report:
                case Arrived():
                    if all(m.life for m in self._members.values()):
                        self._arrived.set()
                case Left():
                    member.report(report)

    async def all_arrived(self, bound_s: float) -> None:
        """Raises TimeoutError that names who is missing."""
        try:
            async with asyncio.timeout(bound_s):
                await self._arrived.wait()
        except TimeoutError:
            missing = [m.name for m in self._members.values() if not m.life]
            shown = ", ".join(missing[:_NAMED]) + (", ..." if len(missing) > _NAMED else "")
            raise TimeoutError(
                f"waited {bound_s:g} s for {len(missing)} of {len(self._members)} replicas to arrive: {shown}"
            ) from None

    async def dismiss(self) -> None:
        """Every agent leaves. Raises BrokerError."""
        await asyncio.gather(*self._sending)
        await self._give(Order(what="leave"))

    async def _give(self, order: Order | Welcome) -> None:
        await self._broker.append(ORDERS_LOG, uuid.uuid4().hex, order.model_dump_json().encode())
