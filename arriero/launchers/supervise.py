"""Supervision of a run by the process that launched it. The first real error ends the run.

| watched             | noticed                         | says                                     |
|---------------------|---------------------------------|------------------------------------------|
| processes           | at once                         | killed by signal, exit code, left early  |
|                     |                                 | (some are started again: `Restarts`)     |
| control log         | at once                         | a node's error and traceback             |
| heartbeats          | `liveness_s` after the last one | who is silent, and the diagnosis         |
| dead letters        | within 5 s                      | nothing: it writes them into the ledger  |
| ledger (`Reporter`) | at once                         | dead letters above the limit             |

A failure makes others fail: what is seen within `SETTLE_S` of the first is weighed against it.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from arriero.engine.backlog import node_of
from arriero.engine.broker import Broker, BrokerError
from arriero.engine.runtime.journal import announce, follow_control
from arriero.launchers.burials import Burials
from arriero.launchers.doctor import diagnosis
from arriero.launchers.failures import Failure, exited, killed, node_failed, raised, silent
from arriero.launchers.hub import edges
from arriero.launchers.replicas import Replica
from arriero.launchers.restarts import Restarts
from arriero.launchers.roster import Roster
from arriero.launchers.vitals import Vitals
from arriero.schemas.graph import GraphSpec
from arriero.schemas.ledger import Ended
from arriero.schemas.run import RunOptions

SETTLE_S = 0.4
_START_S = 120.0  # importing torch on a busy machine; then the first heartbeat
_LEAVE_S = 3.0  # for a process whose nodes have all ended
_RANKS_S = 20.0  # for torchrun to notice and end all ranks, on a busy host
_POLL_S = 0.5
_BURIALS_S = 5.0
_CHOICE_S = 20.0  # for those that are left of several hubs to choose who leads, on a busy host


class Supervisor:
    """Watches one run. `processes` is empty when all nodes run in this process; `start` starts one again."""

    def __init__(
        self,
        spec: GraphSpec,
        options: RunOptions,
        processes: Sequence[Replica],
        start: Callable[[str], Replica] | None = None,
    ) -> None:
        self._spec, self._options = spec, options
        self._processes = {p.name: p for p in processes}
        self.vitals = Vitals([e.name for e in edges(spec, options)])
        self._failures: list[Failure] = []
        self._changed = asyncio.Event()
        self._ended: dict[tuple[str, int], dict[str, int]] = {}  # counters by node, replica
        self._gone: set[str] = set()
        self.roster = Roster(spec)
        self.ending = asyncio.Event()  # a node has ended that wasn't told to leave: the run comes to its end
        self.restarts = Restarts(spec, options, start)
        self._broker: Broker | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._diagnosing = 0
        self._unfit: set[str] = set()  # joined, failed, and let go
        self.lost: Callable[[str, int], None] = lambda role, replica: self.roster.leave(role, [replica])

    # --- what is watched ----------------------------------------------------------------------------------

    def watch_processes(self) -> None:
        """From now on the end of a process counts."""
        self._tasks += [asyncio.create_task(self._watch(p)) for p in self._processes.values()]

    def watch_run(self, broker: Broker, on_poll: Callable[[], None]) -> None:
        """From now on control log and heartbeats count too; `on_poll` is called when `vitals` are new."""
        self._broker = broker
        self.restarts.begin()
        self.watch(self._follow_control(broker))
        self.watch(self._watch_vitals(broker, on_poll))

    def watch(self, work: Coroutine[None, None, None]) -> None:
        """Run `work` beside; should it raise, the run has failed."""
        self._tasks.append(asyncio.create_task(self._guarded(work)))

    def joined(self, p: Replica) -> None:
        """Watch a replica that has come to those of the graph."""
        self._processes[p.name] = p
        self.restarts.joined(p.name)
        self._tasks.append(asyncio.create_task(self._watch(p)))

    async def gone(self, name: str, within_s: float) -> None:
        """Until replica `name`, which was told to leave, has left; after `within_s` it is killed."""
        leaving = asyncio.create_task(self._until(lambda: name in self._gone))
        await asyncio.wait({leaving}, timeout=within_s)
        if not leaving.done():
            self._processes[name].signal(signal.SIGKILL)
        await leaving

    def not_begun(self) -> list[tuple[str, Replica]]:
        """Those that have joined and taken nothing yet, as far as is known, and are there to stay."""
        return [
            (name, p)
            for name, p in self._processes.items()
            if self._guest(p.role, p.replica) and name not in self._gone
            if not self.roster.leaves(p.role, p.replica) and not self._has(name, "taken")
        ]

    def fail(self, failure: Failure) -> None:
        """Something went wrong that the caller has seen."""
        self._failures.append(failure)
        self.restarts.over = True
        self._changed.set()

    @property
    def failed(self) -> bool:
        return bool(self._failures)

    async def failure(self) -> Failure:
        """The cause, as soon as there is one, and known as well as can be."""
        await self._until(lambda: bool(self._failures))
        await asyncio.sleep(SETTLE_S)
        await self._until(lambda: not self._diagnosing)
        return min(self._failures, key=lambda f: f.weight)

    @property
    def counts(self) -> Mapping[tuple[str, int], Mapping[str, int]]:
        """The counters of replicas that have ended, by node and replica."""
        return self._ended

    async def all_ended(self) -> None:
        """Returns when all nodes have ended and their processes have left, or were given time to."""
        await self._until(lambda: self._nodes_ended)
        roles = {name for name, p in self._processes.items() if not p.hub}
        waiting = asyncio.create_task(self._until(lambda: roles <= self._gone))
        await asyncio.wait({waiting}, timeout=_LEAVE_S)
        waiting.cancel()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- how ----------------------------------------------------------------------------------------------

    @property
    def _nodes_ended(self) -> bool:
        return all(self._role_ended(role, k) for role in self._spec.roles for k in self.roster.of(role))

    def _role_ended(self, role: str, replica: int) -> bool:
        return all((n.name, replica) in self._ended for n in self._spec.roles[role])

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def _guarded(self, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except BrokerError as error:
            log = self._log("hub-0")
            self.fail(
                Failure(
                    message=f"the message broker is lost: {error}" + (f"; its log is {log}" if log else ""),
                    weight=3,
                    again=self.restarts.may_all(None),
                )
            )
        except Exception as error:  # noqa: BLE001  # nobody else would notice that this watch has ended
            self.fail(raised(error))

    async def _watch(self, p: Replica) -> None:
        code = await p.ended()
        if self._broker is not None and not p.hub and self._may_go(p, code):
            await self._guarded(self.let_go(p.role, p.replica))
            return
        if code < 0 and self._broker is not None and self.restarts.may(p):
            await self._guarded(self._start_again(p, self._broker, -code))
            return
        self._gone.add(p.name)
        self._changed.set()
        again = self.restarts.may_all(p)
        if code < 0:
            self.fail(replace(killed(p.name, -code, p.log), again=again))
            return
        # What its nodes said may still be on its way; the exit code alone says little.
        await asyncio.sleep(SETTLE_S / 2)
        if code != 0 or p.hub or not self._role_ended(p.role, p.replica):
            failure = exited(p.name, code, p.log, p.said())
            self.fail(replace(failure, again=again and failure.weight == 0))  # a rank was killed

    async def _start_again(self, p: Replica, broker: Broker, number: int) -> None:
        again = await self.restarts.again(p, broker, number)
        if again is None:
            self._gone.add(p.name)
            self._changed.set()
            return
        self._processes[p.name] = again
        self._tasks.append(asyncio.create_task(self._watch(again)))

    def _may_go(self, p: Replica, code: int) -> bool:
        """Whether the end of `p` with this exit code is none that matters to the run."""
        if self.roster.leaves(p.role, p.replica):
            return code <= 0 or p.name in self._unfit
        if code > 0 and self._unfit_to_join(p.role, p.replica):
            self._leave_unfit(p.role, p.replica, f"exit code {code}")
            return True
        return False

    def _guest(self, role: str, replica: int) -> bool:
        """Whether it has come to those of the graph."""
        return role in self.roster and replica >= self._spec.roles[role][0].replicas

    def _has(self, name: str, what: Literal["taken", "given"]) -> bool:
        pulse = self.vitals.pulses.get(f"{name}-0")
        return pulse is not None and any(getattr(n, what) for n in pulse.status.nodes)

    def _unfit_to_join(self, role: str, replica: int) -> bool:
        """Whether one that failed came later and has given nothing: the run went on without it before."""
        here = self._guest(role, replica) and not self.ending.is_set()
        return here and not self._has(f"{role}-{replica}", "given")

    def _leave_unfit(self, role: str, replica: int, why: str) -> None:
        name = f"{role}-{replica}"
        if name not in self._unfit:
            self._unfit.add(name)
            told = f"{name} couldn't join: {why}; the run goes on without it; its log is {self._log(name)}"
            print(f"arriero: {told}", file=sys.stderr, flush=True)
            self.lost(role, replica)
            self.watch(self.gone(name, _RANKS_S))

    async def let_go(self, role: str, replica: int) -> None:
        """It has left, or never came. What it couldn't say any more is said for it."""
        broker = self._broker
        assert broker is not None, "nobody joins or leaves before"
        name = f"{role}-{replica}"
        if not self._role_ended(role, replica):
            await asyncio.sleep(SETTLE_S / 2)  # it may still be on its way
        if not self._role_ended(role, replica):
            await broker.evict(f"{name}-0")
            own = {n.name for n in self._spec.roles[role]}
            made = [e for e in edges(self._spec, self._options) if node_of(e.name) in own]
            await asyncio.gather(*(broker.producer(e.name, replica).end() for e in made))
            for node in own:
                await announce(broker, Ended(node=node, replica=replica))
        self._gone.add(name)
        self.vitals.forget(role, replica)
        self._changed.set()

    async def _follow_control(self, broker: Broker) -> None:
        async for message in follow_control(broker):
            if not isinstance(message, Ended):
                continue
            role = self._spec.node(message.node).role
            if message.error and self._unfit_to_join(role, message.replica):
                self._leave_unfit(role, message.replica, message.error)
            elif message.error:
                self._tasks.append(asyncio.create_task(self._node_failed(message)))
            else:
                self._ended[message.node, message.replica] = message.counts
                if not self.roster.leaves(role, message.replica):
                    self.ending.set()
                self._changed.set()

    async def _node_failed(self, ended: Ended) -> None:
        node = self._spec.node(ended.node)
        name = f"{node.role}-{ended.replica}"
        waits = await self._diagnosis() if "WaitTimeout" in ended.error else ""
        if node.ranks > 1:  # it may fail because another rank was killed, which torchrun will say
            gone = asyncio.create_task(self._until(lambda: name in self._gone))
            await asyncio.wait({gone}, timeout=_RANKS_S)
            gone.cancel()
        self.fail(node_failed(name, ended, self._log(name), waits))

    async def _watch_vitals(self, broker: Broker, on_poll: Callable[[], None]) -> None:
        late: set[str] = set()
        burials, buried = Burials(self._spec), time.monotonic()
        bound_s = self._options.liveness_s + (_CHOICE_S if self._options.hubs > 1 else 0)
        while True:
            try:
                async with asyncio.timeout(bound_s):
                    await self.vitals.poll(broker)
            except TimeoutError:
                raise BrokerError(f"it didn't answer within {bound_s:g} s") from None
            on_poll()
            if time.monotonic() - buried > _BURIALS_S:
                await burials.write(broker)
                buried = time.monotonic()
            # Twice in a row: after a pause of this process itself every heartbeat looks old once.
            late, before = self._late(), late
            for name in sorted(late & before):
                await self._say_silent(name)
            await asyncio.sleep(_POLL_S)

    def _late(self) -> set[str]:
        """Replicas (and ranks) whose last heartbeat, or whose start without one, is too long ago."""
        return {
            key
            for role, nodes in self._spec.roles.items()
            for k in self.roster.of(role)
            for rank in range(nodes[0].ranks)
            if not (f"{role}-{k}" in self._gone or self._role_ended(role, k))
            if self._age_s(key := f"{role}-{k}-{rank}") > self._bound_s(key)
        }

    def _age_s(self, key: str) -> float:
        age_s = self._pulse_age_s(key)
        return self.restarts.age_s(key.rpartition("-")[0]) if age_s is None else age_s

    def _bound_s(self, key: str) -> float:
        bound = self._options.liveness_s
        return bound if self._pulse_age_s(key) is not None else max(bound, _START_S)

    def _pulse_age_s(self, key: str) -> float | None:
        """None if the process that runs now hasn't been heard of."""
        pulse = self.vitals.pulses.get(key)
        return pulse.age_s if pulse and pulse.age_s < self.restarts.age_s(key.rpartition("-")[0]) else None

    async def _say_silent(self, key: str) -> None:
        name, _, rank = key.rpartition("-")
        if (p := self._processes.get(name)) is not None and (
            self.roster.leaves(p.role, p.replica) or self.restarts.may(p)
        ):
            p.signal(signal.SIGKILL)  # its end is seen, and it starts again
            return
        shown = name if rank == "0" else f"{name} rank {rank}"
        age_s, bound_s = self._age_s(key), self._bound_s(key)
        failure = silent(shown, age_s, bound_s, self._log(name), await self._diagnosis())
        self.fail(replace(failure, again=p is not None and self.restarts.may_all(p)))

    def _log(self, name: str) -> object:
        return self._processes[name].log if name in self._processes else None

    async def _diagnosis(self) -> str:
        """Read while everybody is still there: `failure` waits for it."""
        self._diagnosing += 1
        try:
            apart = bool(self._processes)  # the stacks of this process itself say nothing
            return await asyncio.to_thread(diagnosis, self._spec, self.vitals, with_stacks=apart)
        finally:
            self._diagnosing -= 1
            self._changed.set()
