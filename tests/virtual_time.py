"""The real runtime in virtual time: whenever all wait, the clock of the event loop jumps to the next timer.

Components that sleep then take exactly as long as they say, however busy the machine is, and messages take no
time at all. Threads (heartbeats) live in real time and don't hold the clock.
"""

from __future__ import annotations

import asyncio
import selectors
from contextlib import suppress
from pathlib import Path
from typing import Any

from arriero.engine.memory import MemoryBroker
from arriero.engine.runtime.journal import follow_ledger
from arriero.engine.runtime.role import Stopped, run_role
from arriero.launchers.hub import declare
from arriero.schemas.graph import GraphSpec
from arriero.schemas.ledger import Trained
from arriero.schemas.run import RunOptions


class _Jumping(selectors.SelectSelector):
    """Never waits for a timer: says how long it would have."""

    jumped = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0 if timeout is not None else None)
        if not found and timeout:
            self.jumped += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.jumped


def run_in_virtual_time(spec: GraphSpec, path: Path) -> list[Trained]:
    """Run all roles of `spec` to their end; its versions, each with the moment it was made as metric `at`."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(_run(spec, path))
    finally:
        loop.close()


async def _run(spec: GraphSpec, path: Path) -> list[Trained]:
    options, hub = RunOptions(run_id="virtual"), MemoryBroker()
    await declare(hub, spec, options)
    made: list[Trained] = []

    async def watch() -> None:
        async for event in follow_ledger(hub):
            if isinstance(event, Trained):
                at = asyncio.get_running_loop().time()
                made.append(event.model_copy(update={"metrics": {"at": at}}))

    async def replica(role: str, number: int) -> None:
        broker: Any = hub.connect()
        try:
            with suppress(Stopped):
                await run_role(spec, options, role=role, replica=number, run_dir=path, broker=broker)
        finally:
            await broker.close()

    watcher = asyncio.create_task(watch())
    async with asyncio.TaskGroup() as roles:
        for role, nodes in spec.roles.items():
            for number in range(nodes[0].replicas):
                roles.create_task(replica(role, number))
    watcher.cancel()
    return made
