"""Replicas of later submissions, which join a run on a cluster and leave it when their scheduler says so.

    agent: Asks -> hub: Welcome with a number, or why not -> agent: Arrived, and from there as any other
    agent is told SIGTERM: Leaving -> hub: the replica answers what it has and ends -> agent leaves

Nobody restarts an agent that has vanished, for its job isn't the run's: its replica counts as one that
leaves.
"""

from __future__ import annotations

from arriero.engine.errors import UserError, one_line
from arriero.launchers.crew import Member, RemoteCrew
from arriero.launchers.scaling import Scaling
from arriero.launchers.supervise import Supervisor
from arriero.schemas.crew import Asks, Leaving, Welcome

_WITHIN_S = 300.0  # the scheduler's grace is shorter, and ends with a kill


class Guests:
    """The hub's side of it."""

    def __init__(self, crew: RemoteCrew, scaling: Scaling | None, supervisor: Supervisor) -> None:
        self._crew, self._scaling, self._supervisor = crew, scaling, supervisor
        crew.on_guest = self.take

    def take(self, said: Asks | Leaving | Member) -> None:
        """What an agent says, or a member whose agent has vanished; without waiting."""
        match said:
            case Asks():
                self._supervisor.watch(self._welcome(said))
            case Leaving():
                self._supervisor.watch(self._let_leave(said))
            case Member():
                if self._scaling is not None:
                    self._scaling.lose(said.role, said.replica)

    async def _welcome(self, asks: Asks) -> None:
        scaling = self._scaling
        if scaling is None:
            why = "a deterministic run keeps its replicas: what it does depends on how many there are"
            self._crew.order(Welcome(life=asks.life, why=why))
            return
        await scaling.started.wait()
        try:
            present = scaling.roster.staying(asks.role) if asks.role in scaling.roster else []
            scaling.check(asks.role, len(present) + 1)
        except UserError as error:
            self._crew.order(Welcome(life=asks.life, why=one_line(error)))
            return
        joining = scaling.admit(asks.role, 1)
        await scaling.join(asks.role, joining, lambda replica: self._crew.welcome(asks, replica))

    async def _let_leave(self, leaving: Leaving) -> None:
        member = self._crew.guest(leaving.name, leaving.life)
        if self._scaling is not None and member is not None:
            roster = self._scaling.roster
            if not roster.leaves(member.role, member.replica):
                await self._scaling.leave(member.role, [member.replica], _WITHIN_S)
