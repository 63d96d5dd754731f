"""Shows a run, while it goes on, to those who may only watch it: once a second, on its broker, kept nowhere.

They get what the launcher knows, ready to be drawn: not the graph's configuration, nor any record.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from arriero.engine.broker import Broker
from arriero.launchers.look import Lines, Observer
from arriero.launchers.seen import SEEN, Seen, curves, rollouts
from arriero.launchers.vitals import Vitals
from arriero.schemas.graph import GraphSpec
from arriero.schemas.messages import ScoredGroup

EVERY_S = 1.0


class Broadcast:
    """`lines`: the last steps, `groups`: the last scored groups that the record took."""

    def __init__(
        self,
        spec: GraphSpec,
        name: str,
        vitals: Vitals,
        lines: Callable[[], Lines],
        groups: Callable[[], Sequence[ScoredGroup]],
    ) -> None:
        self._spec, self._name, self._vitals = spec, name, vitals
        self._lines, self._groups = lines, groups
        self._observer = Observer(spec)

    async def run(self, broker: Broker) -> None:
        """Without end."""
        while True:
            began = time.monotonic()
            await self.show(broker, "goes on")
            await asyncio.sleep(max(EVERY_S - (time.monotonic() - began), EVERY_S / 10))

    async def show(self, broker: Broker, state: str) -> None:
        """Now; `state` as `arriero top` tells it."""
        lines = self._lines()
        file = self._vitals.written(self._spec, lines[-1]["step"] if lines else 0)
        now = self._observer.now(file, lines, run=self._name, state=state)
        seen = Seen(now=now, curves=curves(lines), rollouts=rollouts(self._groups()))
        await broker.show(SEEN.dump_json(seen))
