"""The record of a run while it goes on, and its summary: whatever the ledger says, written as it comes.

ledger log, heartbeats, edge depths -> ledger, metrics, timeline (.jsonl), sinks -> summary.json
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO, cast

from arriero.engine.broker import Broker, BrokerError
from arriero.engine.graph import Graph
from arriero.engine.runtime.ledger import Ledger, LedgerError
from arriero.engine.runtime.source import steps
from arriero.launchers.failures import Failure, dead_letters, raised
from arriero.launchers.health import Health
from arriero.launchers.look import last_lines
from arriero.launchers.progress import Display, View
from arriero.launchers.prometheus import exposition
from arriero.launchers.resuming import read_history
from arriero.launchers.rundir import RunDir, write_json
from arriero.launchers.sinks import Sinks
from arriero.launchers.step_lines import Line, scalars, step_line
from arriero.launchers.summary import Account, State
from arriero.launchers.timeline import Timeline
from arriero.launchers.vitals import Vitals
from arriero.schemas.graph import GraphSpec
from arriero.schemas.ledger import (
    EVENT,
    LEDGER_LOG,
    Admitted,
    DroppedEvent,
    Evaluated,
    Event,
    Trained,
    Unhealthy,
)  # fmt: skip
from arriero.schemas.run import RunOptions, RunSummary

if TYPE_CHECKING:
    from arriero.launchers.recording import Recording

_DRAIN_S = 1.0
_LINES = 256  # of the last steps, for who looks on
_log = logging.getLogger(__name__)


class Reporter:
    """Follows one run. `fail` is told when more dead letters come than the options allow."""

    def __init__(
        self, spec: GraphSpec, options: RunOptions, run: RunDir, *, vitals: Vitals, display: Display,
        fail: Callable[[Failure], None], recording: Recording | None = None,
    ) -> None:  # fmt: skip
        self._exposition = exposition(spec, options, run)  # first: its port may be taken
        self._recording = recording
        self._spec, self._options, self._run = spec, options, run
        self._vitals, self._display, self._fail = vitals, display, fail
        self._began = time.monotonic()
        self.ledger, self._account = Ledger(), Account(spec)
        self._held_out: set[int] = set()  # origins under way
        self._contradictions: list[str] = []
        self._dead = 0
        self._last_drop: DroppedEvent | None = None
        self._last = b""
        self._newest: Trained | None = None
        self.lines: deque[Line] = deque(last_lines(run.metrics), maxlen=_LINES)
        self._past = len(read_history(run)[1])  # events to come that are in the files already
        self._files: list[TextIO] = [run.ledger.open("a"), run.metrics.open("a")]
        self._sinks = Sinks(options.sinks, run)
        self._health = Health(spec)
        self._timeline = Timeline(run.timeline)

    async def follow(self, broker: Broker) -> None:
        """Take every event; ends only when that fails."""
        try:
            async for payload in broker.follow(LEDGER_LOG):
                self._last = payload
                if self._past:
                    self._past -= 1
                    self._count(EVENT.validate_json(payload), math.nan)
                else:
                    self._take(EVENT.validate_json(payload))
        except BrokerError:
            pass  # whoever supervises hears of it too
        except Exception as error:  # noqa: BLE001  # a run without its record must not go on
            self._fail(raised(error))

    async def drain(self, broker: Broker, following: asyncio.Task[None]) -> None:
        """When nobody writes any more: take what the ledger holds, for at most 1 s; ends `following`."""
        try:
            async with asyncio.timeout(_DRAIN_S):
                newest = cast("AsyncGenerator[bytes, None]", broker.follow(LEDGER_LOG, newest_only=True))
                last = await anext(newest)
                await newest.aclose()
                while self._last != last and not following.done():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        except (TimeoutError, BrokerError):
            pass  # an empty ledger, or the broker is gone: what was seen is what there is
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    def on_poll(self) -> None:
        """Heartbeats and depths are new."""
        now = time.monotonic()
        for pulse in self._vitals.pulses.values():
            self._account.heartbeat(pulse.status, now - pulse.age_s)
        self._timeline.look(self._vitals)
        write_json(self._run.vitals, self._vitals.written(self._spec, self._account.steps))
        if self._exposition is not None:
            newest = self.lines[-1] if self.lines else {}
            self._exposition.look(self._vitals, self.ledger, newest, self._health.warned)
        self._display.update(self._view())

    def ended(self, counts: Mapping[tuple[str, int], Mapping[str, int]]) -> None:
        """The last word on the counters of these nodes and replicas."""
        self._account.ended(counts)

    def fruitless(self) -> str:
        """Why a run that came to its end made no step; empty if it did, or was to make none."""
        ledger, drop = self.ledger, self._last_drop
        graph = Graph.from_spec(self._spec)
        if self._account.steps or not steps(graph, tuple(graph.nodes)):
            return ""
        told = f"no step was made: none of {ledger.admitted} records was trained on"
        if drop is None:
            return f"{told}, and nothing dropped them; a component returned before its stream ended"
        reasons = ", ".join(f"{n} {reason}" for reason, n in ledger.dropped.items())
        return f"{told} (dropped: {reasons}; the last by {drop.node}: {drop.detail})"

    def finish(self, state: State, error: str, restarts: Mapping[str, int]) -> RunSummary:
        """Account for the prompts still under way, write the summary and close the files."""
        if under_way := (*self.ledger.in_flight_origins, *sorted(self._held_out)):
            # An earlier life of the run may have let go of prompts, too, under a name of its own.
            before = self.ledger.dropped["end_of_run"]
            parent = f"run-{self._options.run_id}" + (f"-{before}" if before else "")
            with suppress(OSError):  # accounted for all the same
                self._take(DroppedEvent(node="run", parent=parent, origins=under_way, reason="end_of_run"))
        problems = [p for p in (*self._contradictions, self._imbalance()) if p]
        error = "\n".join(p for p in (error, *problems) if p)
        state = "failed" if problems and state == "finished" else state
        summary = self._account.summary(
            self.ledger, state=state, error=error, wall_s=time.monotonic() - self._began
        ).model_copy(update={"restarts": dict(restarts), "health": self._health.warned})
        summary = self._sealed(summary)
        try:
            write_json(self._run.summary, summary)
            for file in self._files:
                file.close()
            self._timeline.close()
            self._sinks.close()
        except OSError as problem:
            summary = self._incomplete(summary, problem)
        if self._exposition is not None:
            self._exposition.close()
        self._display.close()
        return summary

    def _sealed(self, summary: RunSummary) -> RunSummary:
        """With the head of the record's chain."""
        if self._recording is None:
            return summary
        try:
            return summary.model_copy(update={"lineage": self._recording.seal(summary.state)})
        except Exception as problem:  # noqa: BLE001  # whatever it is, how the run ended must still be told
            return self._incomplete(summary, problem)

    def _incomplete(self, summary: RunSummary, problem: Exception) -> RunSummary:
        """A full disk, say: the run has failed, whatever it was."""
        why = problem.strerror if isinstance(problem, OSError) and problem.strerror else repr(problem)
        error = f"the record in {self._run.path} can't be completed: {why}"
        state = "failed" if summary.state == "finished" else summary.state
        errors = "\n".join(p for p in (summary.error, error) if p)
        return summary.model_copy(update={"state": state, "error": errors})

    def _imbalance(self) -> str:
        if not self.ledger.in_flight and not self.ledger.evaluating:
            return ""
        held_out = self.ledger.held_out_sent - self.ledger.held_out_back
        missing = f"{self.ledger.in_flight} prompts and {held_out} held-out ones"
        return f"the ledger doesn't balance: {missing} are unaccounted for"

    def _count(self, event: Event, at_s: float) -> None:
        """Take an event into account; `at_s` is not a number for one of an earlier life of the run."""
        try:
            self.ledger.apply(event)
        except LedgerError as error:
            self._contradictions.append(f"the ledger contradicts itself: {error}")
        self._account.event(event, at_s)
        self._health.event(event)
        match event:
            case Admitted() if event.split == "eval":
                self._held_out.add(event.origin)
            case Evaluated():
                self._held_out.discard(event.origin)
            case DroppedEvent():
                self._held_out.difference_update(event.origins)
            case _:
                pass

    def _take(self, event: Event) -> None:
        self._count(event, time.monotonic())
        if self._recording is not None:
            self._recording.event(event)
        print(event.model_dump_json(), file=self._files[0], flush=True)
        self._timeline.event(event)
        match event:
            case DroppedEvent():
                self._last_drop = event
                if event.reason == "dead_letter":
                    self._bury(event)
            case Trained():
                self._newest = event
                self._write_step(event)
                for finding in self._health.found:
                    self._take(finding)
                self._display.step(self._view())
            case _:
                pass

    def _bury(self, event: DroppedEvent) -> None:
        self._dead += 1
        if self._dead > self._options.max_dead_letters:
            self._fail(dead_letters(event, self._dead, self._options.max_dead_letters))

    def _write_step(self, event: Trained) -> None:
        line = step_line(event, self._vitals) | {"evaluation": self._account.evaluations.newest()}
        line |= self._health.step(event, self._vitals, self._warned)
        print(json.dumps(line), file=self._files[1], flush=True)
        self._sinks.step(event.version, time.time(), scalars(line))
        self.lines.append(line)

    def _warned(self, finding: Unhealthy) -> None:
        """A gate has something to say that it didn't say of the step before."""
        if finding.level == "stop":
            self._fail(Failure(message=finding.detail, code=2))
        else:
            _log.warning("%s", finding.detail)

    def _view(self) -> View:
        return View(
            step=self._account.steps,
            newest=self._newest,
            elapsed_s=time.monotonic() - self._began,
            tokens_per_s=self._account.tokens_per_s(),
            vitals=self._vitals,
        )
