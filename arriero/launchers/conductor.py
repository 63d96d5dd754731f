"""What conducts a run, wherever its roles are: supervision, the record, the end.

The command itself does it for a run of this machine, the first role of the job on a cluster.

Exit codes: 0 finished, 1 a fault, 2 a mistake of the user, 130 stopped by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from arriero.engine.broker import Broker, BrokerError
from arriero.engine.errors import UserError
from arriero.engine.graph import Graph
from arriero.engine.runtime.journal import announce
from arriero.engine.runtime.source import steps
from arriero.launchers.broadcast import Broadcast
from arriero.launchers.failures import Failure, out_of_space, raised
from arriero.launchers.options import LaunchOptions
from arriero.launchers.progress import display_for
from arriero.launchers.replicas import Replica
from arriero.launchers.reporter import Reporter
from arriero.launchers.rundir import RunDir
from arriero.launchers.scaling import Scaling
from arriero.launchers.summary import State, result_screen
from arriero.launchers.supervise import SETTLE_S, Supervisor
from arriero.schemas.graph import GraphSpec
from arriero.schemas.ledger import Stop
from arriero.schemas.run import RunOptions

if TYPE_CHECKING:
    from arriero.launchers.recording import Recording

INTERRUPTED = 130
_SAY_S, _CLOSE_S = 0.5, 1.0


class Crew(Protocol):
    """The processes of a run; `restart` starts one again that has ended."""

    @property
    def processes(self) -> Sequence[Replica]: ...

    def restart(self, name: str) -> Replica: ...


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended; `failure` says why if it failed."""

    state: State
    failure: Failure | None = None


class Conductor:
    """What both ways of running have in common: supervision, the record, the end."""

    def __init__(
        self, spec: GraphSpec, options: RunOptions, run: RunDir, launch: LaunchOptions, crew: Crew | None
    ) -> None:  # fmt: skip
        self._run, self._result = run, launch.result
        self.supervisor = Supervisor(
            spec, options, crew.processes if crew else (), start=crew.restart if crew else None
        )
        producers = tuple(loop.producer for loop in spec.loops)
        display = display_for(spec, steps(Graph.from_spec(spec), producers), quiet=launch.quiet)
        self._recording = _recording(spec, options, run, self.supervisor.fail)
        self.reporter = Reporter(
            spec, options, run, vitals=self.supervisor.vitals, display=display, fail=self.supervisor.fail,
            recording=self._recording,
        )  # fmt: skip
        record = self._recording
        self._broadcast = Broadcast(
            spec, run.path.name, self.supervisor.vitals, lambda: self.reporter.lines,
            lambda: record.newest if record else (),
        )  # fmt: skip
        self.scaling = Scaling(spec, options, self.supervisor) if options.elastic else None
        self.brokers: list[Broker] = []
        self._following: asyncio.Task[None] | None = None
        self.supervisor.watch_processes()

    def follow(self, broker: Broker) -> None:
        """Supervise and record what goes over `broker`."""
        self.brokers.append(broker)
        self.supervisor.watch_run(broker, self.reporter.on_poll)
        self._following = asyncio.create_task(self.reporter.follow(broker))
        if self._recording is not None:
            self._recording.start(broker)
        if self.scaling is not None:
            self.scaling.start(broker)
        self.supervisor.watch(self._broadcast.run(broker))

    async def outcome(self, work: Coroutine[None, None, None], interrupted: asyncio.Event) -> Outcome:
        """Until `work` is done, something fails or the user stops the run. Ends `work`."""
        working = asyncio.create_task(work)
        failing = asyncio.create_task(self.supervisor.failure())
        stopping = asyncio.create_task(interrupted.wait())
        try:
            await asyncio.wait({working, failing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                return Outcome(state="stopped")
            # Whoever raised has also said so on the control log, with more about it.
            await asyncio.wait(
                {failing}, timeout=2 * SETTLE_S if working.done() and working.exception() else 0
            )
            if self.supervisor.failed:
                return self._failed(await failing)
            if error := working.exception():
                return self._failed(raised(error))
            return Outcome(state="finished")
        finally:
            self.supervisor.restarts.over = True
            for task in (working, failing, stopping):
                task.cancel()
            await asyncio.gather(working, failing, stopping, return_exceptions=True)

    def _failed(self, failure: Failure) -> Outcome:
        # Looked at now: cleaning up makes room.
        return Outcome(state="failed", failure=out_of_space(failure, (self._run.path, Path("/dev/shm"))))

    async def close(self, outcome: Outcome, interrupted: asyncio.Event) -> None:
        """When all roles have left: read what they wrote last, then disconnect."""
        if self._following is not None:
            await self.reporter.drain(self.brokers[0], self._following)
        if self._recording is not None and self.brokers:
            finished = outcome.state == "finished"
            await self._recording.close(self.brokers[0], finished=finished, interrupted=interrupted)
        await self.supervisor.close()
        if self.brokers:
            await self._broadcast.show(self.brokers[0], outcome.state)
        for broker in self.brokers:
            with suppress(BrokerError, TimeoutError):
                await asyncio.wait_for(broker.close(), _CLOSE_S)

    def conclude(self, outcome: Outcome, *, told: bool = True) -> int:
        """Write the summary, show how it ended (unless not `told`); the exit code."""
        if outcome.state == "finished" and (why := self.reporter.fruitless()):
            outcome = Outcome(state="failed", failure=Failure(message=why, code=2))
        if outcome.state == "finished" and self._recording is not None and self._recording.failure:
            outcome = self._failed(self._recording.failure)
        message = outcome.failure.message if outcome.failure else ""
        if self._recording is not None and message:
            self._recording.note(outcome.state, message)
        self.reporter.ended(self.supervisor.counts)
        summary = self.reporter.finish(outcome.state, message, self.supervisor.restarts.counts)
        if not told:
            pass
        elif summary.error:
            print(f"arriero: error: {summary.error}", file=sys.stderr, flush=True)
        elif self._result:
            print(result_screen(summary, self._run.path), flush=True)
        if outcome.state == "stopped":
            return INTERRUPTED
        return outcome.failure.code if outcome.failure else int(summary.state != "finished")


def _recording(
    spec: GraphSpec, options: RunOptions, run: RunDir, fail: Callable[[Failure], None]
) -> Recording | None:
    """Whatever keeps the lineage, if the run is to have one; UserError if it can't. Imports zarr."""
    if not options.record:
        return None
    from arriero.engine.lineage.chain import ChainError
    from arriero.launchers.recording import Recording

    try:
        return Recording(spec, options, run, fail=fail)
    except (ChainError, ImportError, OSError, ValueError) as error:
        raise UserError(
            f"the run can't be recorded at {options.record_url or run.lineage}: {error}; choose another "
            "--record-url, or run with --record false"
        ) from error


@asynccontextmanager
async def interrupts() -> AsyncGenerator[asyncio.Event]:
    """Set by Ctrl-C and SIGTERM, which then do nothing else."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    try:
        for number in numbers:
            with suppress(ValueError, RuntimeError):  # not in the main thread
                loop.add_signal_handler(number, event.set)
        yield event
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def end_roles(
    processes: Sequence[Replica], brokers: Sequence[Broker], outcome: Outcome, leave_s: float
) -> None:
    """All roles leave: asked first, unless they have ended; after `leave_s` by force. The hub stays."""
    roles = [p for p in processes if not p.hub]
    hubs = [p.alive for p in processes if p.hub]
    hub_lives = 2 * sum(hubs) >= len(hubs)  # most of them; on a cluster none is among the processes
    if outcome.state != "finished" and brokers and hub_lives:
        reason = "interrupted" if outcome.failure is None else "another role failed"
        with suppress(BrokerError, TimeoutError):
            await asyncio.wait_for(announce(brokers[0], Stop(reason=reason)), _SAY_S)
        await gone(roles, leave_s)
    for p in roles:
        p.signal(signal.SIGKILL)
    await gone(roles, leave_s)


async def gone(processes: Sequence[Replica], timeout_s: float) -> None:
    """Until all have ended, at most `timeout_s`; asks, for they may be reaped by somebody else."""
    deadline = time.monotonic() + timeout_s
    while any(p.alive for p in processes) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
