"""A replica that was killed starts again, a bounded number of times, while the others go on.

Only replicas whose work others can take over without a trace: each record that they take has one answer, and
its id follows from the record, so what was under way is delivered again at once and stored once. A source, a
trainer and a component that gathers several records would have to go on from where they were: their end ends
the run. An error that a component raises isn't tried again: it would come back.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable

from arriero.engine.broker import Broker
from arriero.launchers.failures import killed
from arriero.launchers.replicas import Replica
from arriero.schemas.graph import GraphSpec
from arriero.schemas.run import RunOptions


class Restarts:
    """The budget of each replica, and when it was started last; `over` when the run comes to its end."""

    def __init__(self, spec: GraphSpec, options: RunOptions, start: Callable[[str], Replica] | None) -> None:
        self._start, self._most = start, options.restarts
        self._roles = {role for role in spec.roles if _replaceable(spec, role)}
        self._began = time.monotonic()
        self._at: dict[str, float] = {}
        self.counts: Counter[str] = Counter()  # by replica
        self.over = False

    def begin(self) -> None:
        """All replicas have been started now."""
        self._began = time.monotonic()

    def may(self, p: Replica) -> bool:
        """Whether `p` would be started again if it were killed now."""
        return (
            self._start is not None
            and not self.over
            and p.role in self._roles
            and self.counts[p.name] < self._most
        )

    async def again(self, p: Replica, broker: Broker, number: int) -> Replica | None:
        """Start `p`, which signal `number` has ended, again; None if the run has come to its end meanwhile.

        Raises BrokerError, OSError.
        """
        assert self._start is not None
        await broker.evict(f"{p.name}-0")
        if self.over:  # nobody would end it
            return None
        self.counts[p.name] += 1
        why = killed(p.name, number, p.log).message
        print(
            f"arriero: {why}; it starts again ({self.counts[p.name]} of {self._most})",
            file=sys.stderr,
            flush=True,
        )
        self._at[p.name] = time.monotonic()
        return self._start(p.name)

    def age_s(self, name: str) -> float:
        """Seconds since the replica was started last."""
        return time.monotonic() - self._at.get(name, self._began)


def _replaceable(spec: GraphSpec, role: str) -> bool:
    producers = {loop.producer for loop in spec.loops}
    return all(
        n.ranks == 1
        and n.name not in producers
        and any(not i.loop for i in n.inputs)
        and all(i.consumes == 1 for i in n.inputs)
        and n.produces == 1
        for n in spec.roles[role]
    )
