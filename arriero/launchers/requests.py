"""What `arriero scale` asks of the process that conducts a run on this machine.

A request is a file in `scale/` of the run directory, so that only who may write there can ask; the answer
lies beside it. All of it is done, or nothing.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from arriero.engine.errors import UserError, one_line
from arriero.launchers.replicas import Replica
from arriero.launchers.rundir import RunDir, read_json, write_json
from arriero.launchers.scaling import Scaling
from arriero.schemas.scaling import ScaleAnswer, ScaleRequest

_LOOK_S, _WITHIN_S = 0.1, 60.0


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

    async def follow(self, before: Mapping[str, int]) -> None:
        """Without end. First roles get the replicas that they had `before`. Raises BrokerError, OSError."""
        self._folder.mkdir(exist_ok=True)
        if before:
            again = ScaleRequest(id="before", replicas=dict(before), within_s=_WITHIN_S)
            if why := (await self._answered(again)).error:
                print(f"arriero: as many replicas as before can't be had: {why}", file=sys.stderr, flush=True)
        while True:
            for path in sorted(self._folder.glob("*.request.json")):
                write_json(answer_to(path), await self._answer(path))
                path.unlink(missing_ok=True)
            await asyncio.sleep(_LOOK_S)

    async def _answer(self, path: Path) -> ScaleAnswer:
        try:
            return await self._answered(read_json(path, ScaleRequest))
        except UserError as error:
            return ScaleAnswer(error=one_line(error))

    async def _answered(self, request: ScaleRequest) -> ScaleAnswer:
        roster = self._scaling.roster
        try:
            more = {
                role: n - len(roster.staying(role)) for role, n in request.replicas.items() if role in roster
            }
            for role, wanted in request.replicas.items():
                self._scaling.check(role, wanted)
                self._crew.check_room(role, max(more[role], 0))
        except UserError as error:
            return ScaleAnswer(error=one_line(error))
        before = {role: roster.staying(role) for role in more}
        # All numbers before anything is waited for: the run may come to its end meanwhile.
        joining = {role: self._scaling.admit(role, n) for role, n in more.items() if n > 0}
        lines: list[str] = []
        for role, number in more.items():
            had = len(before[role])
            told = f"{role}: {had} -> {had + number}"
            if role in joining:
                what = await self._join(role, joining[role])
            elif number < 0:
                what = await self._leave(role, tuple(before[role][number:]), request.within_s)
            else:
                what = "as it was"
            lines.append(f"{told}, {what}")
        return ScaleAnswer(lines=tuple(lines))

    async def _join(self, role: str, joining: tuple[int, ...]) -> str:
        failed = await self._scaling.join(role, joining, lambda k: self._crew.join(role, k))
        lost = [f"{role}-{k} couldn't be started: {why}" for k, why in failed.items()]
        joined = tuple(k for k in joining if k not in failed)
        return ", ".join([f"{_named(role, joined)} join"] * bool(joined) + lost)

    async def _leave(self, role: str, leaving: tuple[int, ...], within_s: float) -> str:
        """`leaving`: those that came last."""
        await self._scaling.leave(role, leaving, within_s)
        return f"{_named(role, leaving)} leave within {within_s:g} s"


def _named(role: str, replicas: tuple[int, ...]) -> str:
    return ", ".join(f"{role}-{k}" for k in replicas)


def request_path(run: RunDir, id: str) -> Path:
    """Where a request is put."""
    return run.scale / f"{id}.request.json"


def answer_to(request: Path) -> Path:
    """Where the answer to a request lies."""
    return request.with_name(request.name.replace(".request.", ".answer."))
