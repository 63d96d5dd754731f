"""What `arriero scale` asks of the process that conducts a run on this machine.

A request is a file in `scale/` of the run directory, so that only who may write there can ask; the answer
lies beside it. All of it is done, or nothing.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

from arriero.engine.errors import UserError, one_line
from arriero.launchers.replicas import Replica
from arriero.launchers.rundir import RunDir, read_json, write_json
from arriero.launchers.scaling import Scaling
from arriero.schemas.scaling import ScaleAnswer, ScaleRequest

_LOOK_S = 0.1


class Elastic(Protocol):
    """Who starts the replicas that join."""

    def check_room(self, role: str, count: int) -> None:
        """Raises UserError if there is no room for `count` more of `role`."""
        ...

    def join(self, role: str, replica: int) -> Replica:
        """Start a replica that the graph doesn't have. Raises OSError."""
        ...


class Requests:
    """Takes requests, one after the other; `follow` them as long as the run goes on."""

    def __init__(self, scaling: Scaling, crew: Elastic, run: RunDir) -> None:
        self._scaling, self._crew, self._folder = scaling, crew, run.scale

    async def follow(self) -> None:
        """Without end. Raises BrokerError, OSError."""
        self._folder.mkdir(exist_ok=True)
        while True:
            for path in sorted(self._folder.glob("*.request.json")):
                write_json(answer_to(path), await self._answer(path))
                path.unlink(missing_ok=True)
            await asyncio.sleep(_LOOK_S)

    async def _answer(self, path: Path) -> ScaleAnswer:
        roster = self._scaling.roster
        try:
            request = read_json(path, ScaleRequest)
            more = {
                role: n - len(roster.staying(role)) for role, n in request.replicas.items() if role in roster
            }
            for role, wanted in request.replicas.items():
                self._scaling.check(role, wanted)
                self._crew.check_room(role, max(more[role], 0))
        except UserError as error:
            return ScaleAnswer(error=one_line(error))
        return ScaleAnswer(lines=tuple([await self._scale(role, n, request) for role, n in more.items()]))

    async def _scale(self, role: str, more: int, request: ScaleRequest) -> str:
        """What was done about one role."""
        before = self._scaling.roster.staying(role)
        told = f"{role}: {len(before)} -> {len(before) + more}"
        if more > 0:
            joined = await self._scaling.join(role, more, lambda k: self._crew.join(role, k))
            return f"{told}, {_named(role, joined)} join"
        if more < 0:
            leaving = tuple(before[more:])  # those that came last
            await self._scaling.leave(role, leaving, request.within_s)
            return f"{told}, {_named(role, leaving)} leave within {request.within_s:g} s"
        return f"{told}, as it was"


def _named(role: str, replicas: tuple[int, ...]) -> str:
    return ", ".join(f"{role}-{k}" for k in replicas)


def request_path(run: RunDir, id: str) -> Path:
    """Where a request is put."""
    return run.scale / f"{id}.request.json"


def answer_to(request: Path) -> Path:
    """Where the answer to a request lies."""
    return request.with_name(request.name.replace(".request.", ".answer."))
