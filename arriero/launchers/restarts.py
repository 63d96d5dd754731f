"""A replica that was killed starts again, a bounded number of times, while the others go on.

| role                     | goes on from                                                                  |
|--------------------------|-------------------------------------------------------------------------------|
| generator, reward, ...   | nothing: what it had taken is delivered again at once, and stored once        |
| one that gathers records | the same; what has been trained meanwhile goes no further                     |
| source                   | the ledger: it passes over what is settled, and sends again what is under way |
| what learns, with record | its checkpoint and the recorded batches after it                              |
| one hub of three         | what it had stored, and what the two others say has come since                |

Without the only hub, and without what learns on several ranks or without a record, all of the run starts
again, from what is certain (`resuming`). What makes versions and keeps no checkpoints can't come back: its
end ends the run. An error that a component raises isn't tried again: it would come back.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable

from arriero.engine.broker import Broker
from arriero.engine.component import Recovers
from arriero.engine.errors import UserError
from arriero.engine.portable import resolve
from arriero.engine.runtime.journal import record
from arriero.launchers.appdef import HUB
from arriero.launchers.failures import killed, signal_name
from arriero.launchers.replicas import Replica
from arriero.launchers.resuming import check_can_go_on
from arriero.schemas.graph import GraphSpec, NodeSpec
from arriero.schemas.ledger import Restarted
from arriero.schemas.messages import Weights
from arriero.schemas.run import RunOptions


class Restarts:
    """The budget of each replica, and when it was started last; `over` when the run comes to its end."""

    def __init__(self, spec: GraphSpec, options: RunOptions, start: Callable[[str], Replica] | None) -> None:
        self._start, self._most = start, options.restarts
        self._spec, self._options = spec, options
        self._roles = {role for role in spec.roles if _replaceable(spec, role, options)}
        if options.hubs > 1:
            self._roles.add(HUB)
        self._began = time.monotonic()
        self._at: dict[str, float] = {}
        self.counts: Counter[str] = Counter()  # by replica
        self.over = False

    def begin(self) -> None:
        """All replicas have been started now."""
        self._began = time.monotonic()

    def joined(self, name: str) -> None:
        """A replica has been started that the graph doesn't have."""
        self._at[name] = time.monotonic()

    def may(self, p: Replica) -> bool:
        """Whether `p` would be started again if it were killed now."""
        return (
            self._start is not None
            and not self.over
            and p.role in self._roles
            and self.counts[p.name] < self._most
        )

    def may_all(self, p: Replica | None) -> bool:
        """Whether the run could go on as a whole without `p` (None: without its broker)."""
        if self._start is None or (p is not None and p.role in self._roles and not p.hub):
            return False
        try:
            check_can_go_on(self._spec, self._options)
        except UserError:
            return False
        return True

    async def again(self, p: Replica, broker: Broker, number: int) -> Replica | None:
        """Start `p`, which signal `number` has ended, again; None if the run has come to its end meanwhile.

        Raises BrokerError, OSError.
        """
        assert self._start is not None
        if not p.hub:
            await broker.evict(f"{p.name}-0")
        if self.over:  # nobody would end it
            return None
        self.counts[p.name] += 1
        self._at[p.name] = time.monotonic()
        count, why = self.counts[p.name], killed(p.name, number, p.log).message
        restarted = Restarted(name=p.name, number=count, why=signal_name(number))
        print(f"arriero: {why}; it starts again ({count} of {self._most})", file=sys.stderr, flush=True)
        if p.hub:  # first of all: without it too few of them may be left to record anything
            again = self._start(p.name)
            await record(broker, restarted)
            return again
        await record(broker, restarted)
        return self._start(p.name)

    def age_s(self, name: str) -> float:
        """Seconds since the replica was started last."""
        return time.monotonic() - self._at.get(name, self._began)


def _replaceable(spec: GraphSpec, role: str, options: RunOptions) -> bool:
    return all(n.ranks == 1 and _comes_back(n, options) for n in spec.roles[role])


def _comes_back(node: NodeSpec, options: RunOptions) -> bool:
    kind = resolve(node.component)
    learns = issubclass(kind, Recovers)
    return options.record if learns else not issubclass(resolve(node.output), Weights)
